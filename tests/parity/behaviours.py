"""Checks of a distributed optimizer's behaviour, each of which runs in PyTorch and in Keras.

A check takes an adapter (`tests/ranks/parity_*_checks.py`). The adapter's jobs train three arrays
with gradients that the check supplies, so that NumPy or simulated ranks can compute the results.
"""

from __future__ import annotations

import copy
import functools
import math
import os
import resource
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter, sleep
from typing import Any, Protocol

import harness
import numpy as np
from harness import refused, some

from accordion_hvd import (
    BF16,
    DGC,
    EF21,
    FP16,
    LGC,
    QSGD,
    STC,
    Accordion,
    AdaComp,
    AdaQS,
    Compressor,
    Dense,
    Diana,
    Displacement,
    DoubleSqueeze,
    EFSignSGD,
    Fixed,
    Goodput,
    Int8,
    LocalSGD,
    Momentum,
    Natural,
    OneBit,
    PowerSGD,
    RandomK,
    Replay,
    ScaleCom,
    SignSGD,
    SketchedSGD,
    StepSchedule,
    TernGrad,
    Threshold,
    TopK,
    TwoLevel,
    simulate,
)
from accordion_hvd.check import PayloadError
from accordion_hvd.comm import fp16_reduction
from accordion_hvd.comm.agreement import RanksDisagree
from accordion_hvd.core.running import Running
from accordion_hvd.engine.exchange import Exchange
from accordion_hvd.engine.guard import ReplicasDiffer
from accordion_hvd.engine.ledger import Ledger, files
from accordion_hvd.engine.ledger.ledger import SUMS
from accordion_hvd.engine.ledger.samples import PARTS
from accordion_hvd.engine.ledger.summary import summarize
from accordion_hvd.engine.membership import replaced
from accordion_hvd.ops import namespace
from accordion_hvd.policies import base
from accordion_hvd.simulation import one_process
from accordion_hvd.simulation.one_process import World

Arrays = Mapping[str, np.ndarray]

SHAPES = {"first": (32, 40), "second": (40, 32), "bias": (40,)}
"""Two matrices that are compressed, and a vector that is too small."""

ZEROS: Arrays = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}

COMPRESSORS = [
    Dense(),
    FP16(),
    BF16(),
    TopK(0.05),
    STC(0.05),
    RandomK(0.05),
    PowerSGD(2),
    PowerSGD(2, alternate=True),
    Threshold(1.5),
    AdaComp(50),
    ScaleCom(0.05, beta=0.3),
    DGC(0.05),
    SketchedSGD(0.02, columns=5),
    QSGD(4),
    TernGrad(),
    Natural(),
    Int8(),
    EFSignSGD(),
    OneBit(),
    SignSGD(0.9),
    EF21(TopK(0.05)),
    Diana(QSGD(4)),
    Momentum(EFSignSGD()),
    DoubleSqueeze(EFSignSGD()),
    DoubleSqueeze(QSGD(4)),
]
"""All but LGC, whose graphs are large: see `check_learned_codes_equal_simulation`."""


class Job(Protocol):
    """A training of the arrays in `SHAPES` by SGD or Adam.

    Attributes:
        optimizer: the distributed optimizer.
    """

    optimizer: Any

    def step(self, gradients: Arrays) -> None:
        """Take a step with this rank's gradients; an array that is not named has no gradient."""

    def accumulate(self, passes: Sequence[Arrays]) -> None:
        """Take one step with the gradients of several backward passes."""

    def averages(self, gradients: Arrays) -> Arrays:
        """Exchange gradients and return the averages, without a step."""

    def weights(self) -> Arrays:
        """Return the current values of all arrays."""

    def assign(self, name: str, values: np.ndarray) -> None:
        """Change an array on this rank."""

    def set_lr(self, lr: float) -> None:
        """Change the learning rate."""


class Switch:
    """A number, initially 0, that a traced step reads each time it runs.

    Args:
        variable: variable of the framework that holds the number; None if nothing is traced.
    """

    def __init__(self, variable: Any = None) -> None:
        self._variable, self._number = variable, 0.0

    def __repr__(self) -> str:
        return "Switch()"  # the same on all ranks

    @property
    def value(self) -> Any:
        """Return the number, or the value of the variable that holds it."""
        return self._number if self._variable is None else self._variable.value

    def assign(self, number: float) -> None:
        """Change the number."""
        self._number = number
        if self._variable is not None:
            self._variable.assign(number)


class Adapter(Protocol):
    """A framework that runs the checks; in Keras, with or without traced steps.

    Attributes:
        hvd: the module that users import.
        horovod: Horovod's module, which `hvd` replaces.
        xp: the framework's tensor operations.
        adasum: Horovod's reduction Adasum.
        traced: whether steps are traced.
        failed: exceptions in which an error within a step may be wrapped.
    """

    hvd: Any
    horovod: Any
    xp: Any
    adasum: Any
    traced: bool
    failed: tuple[type[BaseException], ...]

    def job(
        self,
        compression: Any = None,
        *,
        lr: float = 1.0,
        momentum: float = 0.0,
        adam: bool = False,
        first: Arrays = ZEROS,
        **options: Any,
    ) -> Job:
        """Begin a training; `options` go to `DistributedOptimizer`."""

    def switch(self) -> Switch:
        """Return a new switch."""

    def gather(self, values: np.ndarray) -> np.ndarray:
        """Return every rank's array, as rows."""

    def shared(self, text: str) -> str:
        """Return rank 0's text."""


def once(check: Callable[[Any], None]) -> Callable[[Any], None]:
    """Mark a check that runs in one mode of a framework only: traced, if steps can be traced."""
    check.modes = slice(-1, None)  # type: ignore[attr-defined]
    return check


def eagerly(check: Callable[[Any], None]) -> Callable[[Any], None]:
    """Mark a check that is not run where steps are traced."""
    check.modes = slice(0, 1)  # type: ignore[attr-defined]
    return check


def bound(adapters: Sequence[Adapter]) -> dict[str, Callable[[], None]]:
    """Return all checks by name, as functions that run them with these adapters.

    `make test` runs them in the last mode only, in which steps are traced if they can be.
    """

    def bind(check: Callable[[Any], None]) -> Callable[[], None]:
        def run() -> None:
            modes = adapters[getattr(check, "modes", slice(None))]
            for adapter in some(modes, modes[-1:]):
                check(adapter)

        run.__module__ = check.__module__
        return run

    checks = {name: f for name, f in globals().items() if name.startswith("check_")}
    return {name: bind(check) for name, check in checks.items()}


# ---------------------------------------------------------------------------------------- tools
def gradients(rank: int, step: int, scale: float = 1.0) -> dict[str, np.ndarray]:
    """Return pseudorandom gradients, which depend on the rank and the step only."""
    draw = np.random.default_rng([rank, step])
    return {
        name: (scale * draw.standard_normal(shape)).astype(np.float32)
        for name, shape in SHAPES.items()
    }


def mean(ranks: Sequence[int], step: int) -> dict[str, np.ndarray]:
    """Return the mean of these ranks' gradients at a step."""
    rows = [gradients(rank, step) for rank in ranks]
    return {name: np.mean([row[name] for row in rows], 0) for name in SHAPES}


def everybody(a: Adapter) -> range:
    """Return all ranks."""
    return range(a.hvd.size())


def train(a: Adapter, job: Job, steps: int, start: int = 0) -> None:
    """Take steps with this rank's gradients."""
    for step in range(start, start + steps):
        job.step(gradients(a.hvd.rank(), step))


def assert_close(found: Arrays, wanted: Arrays, what: object = "", atol: float = 1e-5) -> None:
    """Assert that arrays are equal except for rounding."""
    for name in wanted:
        np.testing.assert_allclose(
            found[name], wanted[name], rtol=1e-4, atol=atol, err_msg=f"{what}"
        )


def assert_equal_ranks(a: Adapter, job: Job, what: object = "") -> None:
    """Assert that all ranks have the same finite weights, bit for bit."""
    rows = a.gather(np.concatenate([x.ravel() for x in job.weights().values()]))
    assert np.isfinite(rows).all(), what
    assert (rows == rows[0]).all(), what


def assert_alike(a: Adapter, text: str) -> None:
    """Assert that all ranks have the same text."""
    rows = a.gather(np.array([zlib.crc32(text.encode())], np.float64))
    assert (rows == rows[0]).all(), text


def names_of(job: Job) -> list[str]:
    """Return the tensors' names in the order in which they are exchanged."""
    return [tensor.name for tensor in job.optimizer.exchange.tensors]


class Simulated:
    """A training by SGD on ranks that rank 0 simulates in NumPy; other ranks do nothing.

    NumPy computes what the frameworks compute (`laws.frameworks_agree`), in less time.
    """

    def __init__(self, a: Adapter, compression: Any, lr: float = 1.0, local_size: int = 1) -> None:
        ranks = a.hvd.size()
        self.here = a.hvd.rank() == 0
        self.world: World = simulate(compression, ranks, local_size=local_size, momentum=0.0)
        self.weights = dict(ZEROS)
        self._a, self._lr = a, lr

    def step(self, names: Sequence[str], rows: Sequence[Arrays]) -> None:
        """Take a step with all ranks' gradients."""
        if not self.here:
            return
        given = [{name: row[name].copy() for name in names} for row in rows]
        told = [{name: self.weights[name] for name in names} for _ in rows]
        means = self.world.step(given, self._lr, told)[0]
        assert means is not None
        for name in names:
            self.weights[name] = self.weights[name] - self._lr * means[name]

    def assert_same_weights(self, job: Job, what: object = "", atol: float = 1e-5) -> None:
        """Assert on rank 0 that the training's weights are equal except for rounding."""
        if self.here:
            assert_close(job.weights(), self.weights, what, atol)

    def assert_same_bytes(self, job: Job, what: object = "") -> None:
        """Assert on rank 0 that every rank sends what its simulation sends."""
        keys = ("payload", "sent", "between")
        stats = job.optimizer.exchange.stats()
        rows = self._a.gather(np.array([stats[key] for key in keys]))
        if self.here:
            theirs = [[x.stats()[key] for key in keys] for x in self.world.exchanges]
            np.testing.assert_allclose(rows, theirs, rtol=1e-5, err_msg=f"{what}: {keys}")


def compare_with_simulation(
    a: Adapter, compression: Any, local_size: int = 1, atol: float = 1e-5, **options: Any
) -> Job:
    """Assert that weights and bytes equal those of simulated ranks; return the training."""
    job = a.job(compression, lr=0.5, **options)
    oracle = Simulated(a, compression, 0.5, local_size)
    for step in range(4):
        rows = [gradients(rank, step) for rank in everybody(a)]
        job.step(rows[a.hvd.rank()])
        oracle.step(names_of(job), rows)
        oracle.assert_same_weights(job, f"{compression!r}, step {step}", atol)
    assert_equal_ranks(a, job, compression)
    if not (a.traced and isinstance(compression, (ScaleCom, LGC))):  # graphs do not know the leader
        oracle.assert_same_bytes(job, compression)
    return job


def residuals(a: Adapter, job: Job) -> list[np.ndarray]:
    """Return this rank's residuals, one array for each compressed bucket that has a residual."""
    entries = [entry for entry in job.optimizer.exchange.bucket_states if entry.bucket.compress]
    found = [entry.compressor.residual(entry.state) for entry in entries]
    return [np.array(a.xp.to_numpy(x)) for x in found if x is not None]


@contextmanager
def process_set(a: Adapter, ranks: Sequence[int]) -> Iterator[Any]:
    """Yield a process set of these ranks, which is removed afterwards."""
    if len(ranks) == a.hvd.size():
        yield a.hvd.global_process_set
        return
    added = a.hvd.add_process_set(list(ranks))
    try:
        yield added
        a.gather(np.zeros(1))
    finally:
        a.hvd.remove_process_set(added)


@contextmanager
def folder(a: Adapter) -> Iterator[Path]:
    """Yield a new folder that all ranks see (they share a host), and remove it afterwards."""
    import shutil
    import tempfile

    path = Path(a.shared(tempfile.mkdtemp() if a.hvd.rank() == 0 else ""))
    try:
        yield path
        a.gather(np.zeros(1))
    finally:
        if a.hvd.rank() == 0:
            shutil.rmtree(path)


@contextmanager
def environment(**words: str) -> Iterator[None]:
    """Set environment variables `ACCORDION_HVD_...`, and remove them afterwards."""
    names = {f"ACCORDION_HVD_{name}": value for name, value in words.items()}
    os.environ.update(names)
    try:
        yield
    finally:
        for name in names:
            del os.environ[name]


# ----------------------------------------------------------------------------- averages and bytes
def check_dense_is_the_average(a: Adapter) -> None:
    """Without compression, each step uses the average, or the sum, of all ranks' gradients."""
    for op, factor in ((a.hvd.Average, 1.0), (a.hvd.Sum, float(a.hvd.size()))):
        job, wanted = a.job(op=op, lr=0.5), dict(ZEROS)
        for step in range(3):
            job.step(gradients(a.hvd.rank(), step))
            average = mean(everybody(a), step)
            wanted = {name: x - 0.5 * factor * average[name] for name, x in wanted.items()}
        assert_close(job.weights(), wanted, op)
        assert_equal_ranks(a, job, op)


@once
def check_compressed_equals_simulation(a: Adapter) -> None:
    """Real ranks compute the same weights and send the same bytes as simulated ranks."""
    for compression in some(COMPRESSORS, COMPRESSORS[3::5] if a.traced else COMPRESSORS):
        compare_with_simulation(a, compression)


def check_residuals_in_16_bits_equal_simulation(a: Adapter) -> None:
    """Real ranks store the words of simulated ranks, and a job with fp32 residuals loads them."""
    narrow = functools.partial(Exchange, residual_dtype="bfloat16")
    some_bits = [EFSignSGD(), STC(0.05), PowerSGD(2), Accordion(low=TopK(0.2), high=TopK(0.05))]
    for compression in [TopK(0.05), *some(some_bits, [])]:
        fresh = copy.deepcopy(compression)
        atol = 1e-2 if isinstance(compression, PowerSGD) else 1e-5  # of last bits
        with replaced(one_process, Exchange=narrow):
            job = compare_with_simulation(a, compression, 1, atol, residual_dtype="bfloat16")
        found = [entry.stored or {} for entry in job.optimizer.exchange.bucket_states]
        assert {a.xp.dtype(x["error"]) for x in found if "error" in x} == {"int16"}
        with folder(a) as path:
            a.hvd.save_state(path, only=[job.optimizer])
            other = a.job(fresh, lr=0.5)
            train(a, other, 1)
            a.hvd.load_state(path, only=[other.optimizer])
        pairs = zip(residuals(a, other), residuals(a, job), strict=True)
        assert all(np.array_equal(mine, theirs) for mine, theirs in pairs)
    with refused(ValueError, "residual_dtype is 'half', but must be one of 'float32', 'bfloat16'"):
        a.job(TopK(0.1), residual_dtype="half")


@once
def check_learned_codes_equal_simulation(a: Adapter) -> None:
    """LGC equals its simulation in each phase, and all ranks train the same autoencoder.

    Convolutions differ between frameworks by more than a rounding error.
    """
    for form in some(("ring", "server"), ("server",) if a.traced else ("ring", "server")):
        lgc = LGC(0.05, form, dense=1, training=2, innovation=0.005)
        job = compare_with_simulation(a, lgc, atol=1e-3)
        exchange = job.optimizer.exchange
        (entry,) = (s for s in exchange.bucket_states if s.bucket.compress)
        assert exchange.phase(entry) == 3
        rows = a.gather(np.array(a.xp.to_numpy(entry.state["weights"])))
        assert (rows == rows[0]).all()
        assert 0 < exchange.stats()["reports"][entry.bucket.name]["reconstruction"] < 10


def check_hosts_of_different_size_are_refused(a: Adapter) -> None:
    if a.hvd.size() == 4:
        job = a.job(TwoLevel(TopK(0.05)))
        with harness.machines_of(3, lambda: a.gather(np.zeros(1))):
            with refused(ValueError, "hosts have 3, 1 ranks"):
                train(a, job, 1)


@once
def check_two_levels_equal_simulation(a: Adapter) -> None:
    """`TwoLevel` equals its simulation on two hosts, and on one, which sends nothing to others."""
    local_size = max(1, a.hvd.size() // 2)
    barrier = lambda: a.gather(np.zeros(1))  # noqa: E731
    with harness.machines_of(local_size, barrier):
        for level in (TopK(0.05), PowerSGD(2), BF16()):
            job = compare_with_simulation(a, TwoLevel(level), local_size)
            stats = job.optimizer.exchange.stats()
            assert 0 < stats["between"] < stats["sent"] or local_size == 1
    with harness.machines_of(a.hvd.size(), barrier):
        job = compare_with_simulation(a, TwoLevel(TopK(0.05)), a.hvd.size())
        stats = job.optimizer.exchange.stats()
        assert stats["between"] == 0 < stats["sent"]


@once
def check_two_levels_change_and_are_saved(a: Adapter) -> None:
    """Accordion switches levels with `TwoLevel`; ranks stay equal after a save and a restore."""
    pair = {"low": TwoLevel(PowerSGD(4)), "high": TwoLevel(PowerSGD(1))}
    mixed = {"low": Dense(), "high": TwoLevel(TopK(0.05))}
    with harness.machines_of(max(1, a.hvd.size() // 2), lambda: a.gather(np.zeros(1))):
        for levels in (pair, mixed):
            policy = Accordion(**levels, window=2, interval=1, threshold=0.2)
            job = a.job(policy, lr=0.1)
            for step in range(8):
                job.step(gradients(a.hvd.rank(), step, scale=2.0 if step == 4 else 1.0))
            assert {row["level"] for row in policy.history} == {0, 1}, policy.history
            with folder(a) as path:
                a.hvd.save_state(path, only=[job.optimizer])
                a.hvd.load_state(path, only=[job.optimizer])
            train(a, job, 2, start=8)
            assert_equal_ranks(a, job, levels)


def check_halves_that_the_engine_adds(a: Adapter) -> None:
    """FP16 averages are correct if the engine adds fp16 numbers itself, as on slow links."""
    limits = fp16_reduction.SLOW
    fp16_reduction.SLOW = dict.fromkeys(limits, math.inf)
    try:
        job = a.job(FP16(), lr=0.1)
        train(a, job, 3)
    finally:
        fp16_reduction.SLOW = limits
    assert job.optimizer.exchange.communicator.native_fp16_allreduce
    assert_equal_ranks(a, job)
    wanted = {n: -0.1 * sum(mean(everybody(a), t)[n] for t in range(3)) for n in SHAPES}
    assert_close(job.weights(), wanted, atol=2e-3)


def check_stats_count_what_travels(a: Adapter) -> None:
    job = a.job(PowerSGD(2))
    train(a, job, 3)
    stats, ranks = job.optimizer.exchange.stats(), a.hvd.size()
    factors, flags = 2 * (32 + 40) + 2 * (40 + 32) + 40, 2
    assert stats["steps"] == 3
    assert stats["dense"] == 3 * 4 * sum(math.prod(shape) for shape in SHAPES.values())
    assert stats["payload"] == 3 * 4 * (factors + flags), stats
    assert np.isclose(stats["sent"], stats["payload"] * 2 * (ranks - 1) / ranks)
    assert np.isclose(stats["ratio"], stats["dense"] / stats["payload"])


@eagerly
def check_a_pattern_that_matches_nothing_is_refused(a: Adapter) -> None:
    """A string is one pattern; each pattern matches some name."""
    job = a.job(TopK(0.01), skip="sec*")
    train(a, job, 1)
    levels = job.optimizer.exchange.levels()
    assert {name for name, level in levels.items() if level != "Dense()"} == {"first"}, levels
    for compression, skip, argument in (
        (TopK(0.01), ["sec*", "haed*"], "skip"),
        (TopK(0.01), "haed*", "skip"),
        (Fixed(TopK(0.01), overrides={"haed*": Dense()}), (), "overrides"),
    ):
        with refused(ValueError, f"{argument} is 'haed*'", "first"):
            train(a, a.job(compression, skip=skip), 1)


def check_windows_count_backward_passes(a: Adapter) -> None:
    """`window=len(loader)` is an epoch if an exchange averages several passes, too."""
    policy = Accordion(low=Dense(), high=TopK(0.05), window=4, interval=1, threshold=9.0)
    job = a.job(policy, backward_passes_per_step=2)
    for step in range(4):
        job.accumulate([gradients(a.hvd.rank(), step)] * 2)
    assert {row["window"] for row in policy.history} == {0}, policy.history


def check_learning_rates_that_differ_are_reported(a: Adapter) -> None:
    job = a.job(TopK(0.05), guard_every=4)
    train(a, job, 2)
    if a.hvd.rank() == a.hvd.size() - 1:
        job.set_lr(0.5)
    with refused((ReplicasDiffer, *a.failed), "learning rates"):
        for _ in range(4):
            job.step(ZEROS)


@eagerly
def check_sums_do_not_suit_displacement(a: Adapter) -> None:
    policy = Displacement(Dense(), TopK(0.1), window=3)
    with refused(ValueError, "op is 'hvd.Sum'", "Displacement"):
        a.job(policy, op=a.hvd.Sum)


def check_skip_patterns_travel_dense(a: Adapter) -> None:
    job = a.job(TopK(0.01), skip=["sec*"])
    train(a, job, 1)
    levels = job.optimizer.exchange.levels()
    assert {name for name, level in levels.items() if level != "Dense()"} == {"first"}, levels


# ------------------------------------------------------------------------------ who takes part
def check_one_rank_equals_plain_training(a: Adapter) -> None:
    """The only rank of a process set, and ranks outside of it, train like plain SGD."""
    with process_set(a, [a.hvd.size() - 1]) as alone:
        job = a.job(TopK(0.01), lr=0.1, momentum=0.9, process_set=alone)
        weights, velocity = dict(ZEROS), dict(ZEROS)
        for step in range(4):
            mine = gradients(a.hvd.rank(), step)
            job.step(mine)
            velocity = {name: 0.9 * v + mine[name] for name, v in velocity.items()}
            weights = {name: w - 0.1 * velocity[name] for name, w in weights.items()}
        assert_close(job.weights(), weights)
        assert job.optimizer.exchange.stats()["sent"] == 0


def check_process_set_averages_within(a: Adapter) -> None:
    """Ranks outside of the process set train on their own."""
    evens = list(range(0, a.hvd.size(), 2))
    with process_set(a, evens) as half:
        job = a.job(TopK(1.0), process_set=half, guard="off")
        train(a, job, 3)
        members = evens if a.hvd.rank() in evens else [a.hvd.rank()]
        wanted = {n: -sum(mean(members, t)[n] for t in range(3)) for n in SHAPES}
        assert_close(job.weights(), wanted)


def check_two_optimizers_side_by_side(a: Adapter) -> None:
    choices = (TopK(0.1), PowerSGD(1))
    jobs = [a.job(compression) for compression in choices]
    oracles = [Simulated(a, compression) for compression in choices]
    for step in range(4):
        rows = [gradients(rank, step) for rank in everybody(a)]
        for job in jobs:
            job.step(rows[a.hvd.rank()])
        for job, oracle in zip(jobs, oracles, strict=True):
            oracle.step(names_of(job), rows)
    for job, oracle in zip(jobs, oracles, strict=True):
        oracle.assert_same_weights(job)
        assert_equal_ranks(a, job)


# ---------------------------------------------------------------------------------- gradients
def check_gradients_of_several_passes_add_up(a: Adapter) -> None:
    job, wanted = a.job(TopK(1.0), backward_passes_per_step=2), dict(ZEROS)
    for step in (0, 2, 4):
        job.accumulate([gradients(a.hvd.rank(), step), gradients(a.hvd.rank(), step + 1)])
        one, two = mean(everybody(a), step), mean(everybody(a), step + 1)
        wanted = {name: x - one[name] - two[name] for name, x in wanted.items()}
    assert_close(job.weights(), wanted)
    assert job.optimizer.exchange.stats()["steps"] == 3


def check_missing_gradients_count_as_zeros(a: Adapter) -> None:
    """A gradient that one rank lacks in a step is averaged as zeros."""
    job, wanted = a.job(TopK(1.0)), dict(ZEROS)
    for step in range(4):
        rows = [gradients(rank, step) for rank in everybody(a)]
        lacking = step % a.hvd.size()
        mine = dict(rows[a.hvd.rank()])
        rows[lacking]["second"] = np.zeros_like(rows[lacking]["second"])
        if a.hvd.rank() == lacking:
            del mine["second"]
        job.step(mine)
        average = {name: np.mean([row[name] for row in rows], 0) for name in SHAPES}
        wanted = {name: x - average[name] for name, x in wanted.items()}
    assert_close(job.weights(), wanted)
    assert_equal_ranks(a, job)


def check_a_bad_gradient_on_one_rank(a: Adapter) -> None:
    """An infinite gradient gives all ranks NaN, but changes no residual and no later step."""
    for compression in (TopK(0.1), PowerSGD(2), Accordion(PowerSGD(2), TopK(0.1), window=100)):
        job = a.job(compression, guard="off")
        for step in range(3):
            job.averages(gradients(a.hvd.rank(), step))
        before, bad = residuals(a, job), gradients(a.hvd.rank(), 3)
        if a.hvd.rank() == a.hvd.size() - 1:
            bad["first"][3, 4] = np.inf
        assert all(np.isnan(x).all() for x in job.averages(bad).values()), compression
        assert before
        for mine, was in zip(residuals(a, job), before, strict=True):
            assert np.abs(was).max() > 0
            np.testing.assert_allclose(mine, was, rtol=0, atol=1e-6, err_msg=f"{compression}")
        after = job.averages(gradients(a.hvd.rank(), 4))
        assert all(np.isfinite(x).all() for x in after.values()), compression
        assert job.optimizer.exchange.stats()["steps"] == 5


@dataclass(frozen=True)
class Spoiled(Compressor):
    """A compressor whose payload has all bits set on the rank `odd` while a switch is on."""

    inner: Compressor
    odd: int
    switch: Switch

    def init(self, spec: Any, info: Any) -> Any:
        """Return the initial state of the inner compressor."""
        return self.inner.init(spec, info)

    def exchange(self, grad: Any, state: Any, info: Any) -> Any:
        """Exchange as the inner compressor does, with a spoiled payload if the switch is on."""
        running, xp = Running(self.inner.exchange(grad, state, info)), namespace(grad)
        request = running.asked
        if info.rank == self.odd:
            ones = xp.full(xp.shape(request.tensor), 255.0, "float32", xp.device(grad))
            worst = xp.cast(ones * self.switch.value, "uint8")
            request = replace(request, tensor=xp.maximum(request.tensor, worst))
        running.send((yield request))
        return running.result


def check_a_broken_payload_names_its_sender(a: Adapter) -> None:
    """Every rank names the sender of a broken payload, and can continue to train.

    The failed step changes neither weights nor residuals.
    """
    odd, switch = a.hvd.size() - 1, a.switch()
    job = a.job(Spoiled(TopK(0.05), odd, switch))
    train(a, job, 3)
    weights, carried = job.weights(), residuals(a, job)
    switch.assign(1.0)
    with refused((PayloadError, *a.failed), "not decode", str(odd)):
        train(a, job, 1, start=3)
    switch.assign(0.0)
    a.gather(np.zeros(1))
    assert_close(job.weights(), weights, atol=0)
    for mine, was in zip(residuals(a, job), carried, strict=True):
        np.testing.assert_allclose(mine, was, rtol=0, atol=1e-6)
    train(a, job, 2, start=4)
    assert_equal_ranks(a, job)


def check_gains_are_those_of_the_optimizer(a: Adapter) -> None:
    """The gain of SGD is 1 / (1 - momentum); Adam's is 1 / root mean square of the gradients."""
    for momentum in (0.0, 0.9):
        job = a.job(TopK(0.5), momentum=momentum)
        train(a, job, 2)
        exchange = job.optimizer.exchange
        names = [tensor.name for tensor in exchange.tensors]
        np.testing.assert_allclose(list(exchange.gains(names).values()), 1 / (1 - momentum))
    job, moments = a.job(Dense(), lr=1e-3, adam=True), dict.fromkeys(SHAPES, 0.0)
    for step in range(5):
        train(a, job, 1, start=step)
        squares = {name: float(np.mean(x**2)) for name, x in mean(everybody(a), step).items()}
        moments = {name: 0.999 * moments[name] + 0.001 * squares[name] for name in SHAPES}
    for full in names_of(job):
        name = next(name for name in SHAPES if full.endswith(name))
        gain = job.optimizer.exchange.gains([full])[full]
        np.testing.assert_allclose(gain, np.sqrt((1 - 0.999**5) / moments[name]), rtol=1e-4)


def check_updates_contain_the_momentum(a: Adapter) -> None:
    """DGC that sends all elements equals SGD with momentum, on all ranks and on a single rank."""
    with process_set(a, [0]) as alone:
        for ranks, options in ((list(everybody(a)), {}), ([0], {"process_set": alone})):
            if a.hvd.rank() not in ranks:
                continue
            job = a.job(DGC(1.0, momentum=0.9), lr=0.1, **options)
            weights, velocity = dict(ZEROS), dict(ZEROS)
            for step in range(4):
                job.step(gradients(a.hvd.rank(), step))
                average = mean(ranks, step)
                velocity = {name: 0.9 * v + average[name] for name, v in velocity.items()}
                weights = {name: w - 0.1 * velocity[name] for name, w in weights.items()}
            assert_close(job.weights(), weights, options)
    with refused(ValueError, "DGC(ratio=0.001)", "returns finished updates", "plain SGD"):
        a.job(DGC(), momentum=0.9)


# ------------------------------------------------------------------------------------ policies
@once
def check_decisions_equal_simulation(a: Adapter) -> None:
    """All ranks decide as simulated ranks do, and a replay of the decisions gives equal weights."""

    def decided(history: Sequence[Mapping[str, Any]]) -> list[Any]:
        rows = [[row[key] for key in ("step", "window", "name", "level")] for row in history]
        return sorted(rows)

    low, high = PowerSGD(2), TopK(0.05)
    policies = (
        Accordion(low, high, window=3, interval=1),
        Displacement(low, high, window=3, bound=1.75, release=0.95),
    )
    for policy in some(policies, policies[:1] if a.traced else policies):
        job, oracle = a.job(copy.deepcopy(policy), lr=0.1), Simulated(a, policy, 0.1)
        scales = [1 + step // 6 * 3 for step in range(12)]
        for step, scale in enumerate(scales):
            rows = [gradients(rank, step, scale) for rank in everybody(a)]
            job.step(rows[a.hvd.rank()])
            oracle.step(names_of(job), rows)
        found = job.optimizer.exchange.policy.history
        assert {row.level for row in found} == {0, 1}, found
        if oracle.here:
            wanted = oracle.world.exchanges[0].policy.history
            assert decided(found) == decided(wanted), (found, wanted)
            norms = [{(row.name, row.step): row.norm for row in h} for h in (found, wanted)]
            for key, norm in norms[1].items():
                np.testing.assert_allclose(norms[0][key], norm, rtol=1e-4)
        assert_alike(a, repr(found))
        oracle.assert_same_weights(job, atol=1e-3)
        again = a.job(Replay(found), lr=0.1)
        for step, scale in enumerate(scales):
            again.step(gradients(a.hvd.rank(), step, scale))
        assert_close(again.weights(), job.weights(), "the replay")


@once
def check_goodput_on_real_ranks(a: Adapter) -> None:
    """Ranks decide alike although they measure different times and residuals.

    Goodput chooses level 0 at the high learning rate, and also level 1 at the low one.
    """
    policy = Goodput([TopK(0.5), TopK(0.05)], bound=0.02, window=5)
    job, served = a.job(policy, lr=0.1), set()
    for step in range(80):
        if step == 40:
            job.set_lr(1e-4)
        job.step({n: x + 0.5 for n, x in gradients(a.hvd.rank(), step).items()})
        served |= set(job.optimizer.exchange.levels().values())
    found = job.optimizer.exchange.policy
    state = found.state_dict()
    for alike in (found.history, found.gate.verdict, state["_ratios"], state["_progress"]):
        assert_alike(a, repr(alike))
    assert_alike(a, repr(sorted(served)))
    assert any(0 < row.efficiency <= 1 for row in found.history), found.history
    assert_alike(a, repr({name: array.tobytes() for name, array in job.weights().items()}))
    permitted = {(row.lr > 0.01, row.level) for row in found.history}
    assert permitted >= {(True, 0), (False, 1)}, found.history
    assert "TopK(ratio=0.5)" in served, served


def check_windows_end_by_hand_and_learning_rates_fall(a: Adapter) -> None:
    policy = Accordion(low=Dense(), high=TopK(0.05), threshold=100.0, interval=1)
    job, seen = a.job(policy, lr=0.1), []
    for epoch in range(6):
        train(a, job, 2, start=2 * epoch)
        seen.append("TopK(ratio=0.05)" in job.optimizer.exchange.levels().values())
        if epoch == 2:
            job.set_lr(0.01)
        job.optimizer.end_window()
    fell = {row["window"] for row in policy.history if row["reason"] == "learning rate fell"}
    assert fell == {2}, policy.history
    assert seen == [False, False, True, False, True, True], policy.history
    assert_equal_ranks(a, job)


def check_the_first_window_may_have_any_length(a: Adapter) -> None:
    """A long window without an end gives one warning; `end_window()` then ends it."""
    policy = Accordion(low=Dense(), high=TopK(0.1), threshold=9.0, interval=1)
    job = a.job(policy, guard="off")
    patience, base.PATIENCE = base.PATIENCE, 3
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            train(a, job, 8)
    finally:
        base.PATIENCE = patience
    assert len([w for w in caught if "end_window" in str(w.message)]) == 1, caught
    for _ in range(2):
        job.optimizer.end_window()
        train(a, job, 2)
    assert {row["window"] for row in policy.history} == {0, 1}, policy.history


def check_what_is_owed_is_paid_once(a: Adapter) -> None:
    """TopK hands its residual to Dense, which sends it in its first step and no other."""
    policy = Accordion(low=TopK(0.05), high=Dense(), window=2, interval=1, threshold=9.0)
    job, seen, before = a.job(policy, guard="off"), [], ZEROS
    for step in range(6):
        job.step(gradients(a.hvd.rank(), step))
        after = job.weights()
        seen.append(before["first"] - after["first"])
        before = after
    assert [row["level"] for row in policy.history if row["name"] == "first"] == [0, 1]
    means = [mean(everybody(a), step)["first"] for step in range(6)]
    np.testing.assert_allclose(sum(seen[:5]), sum(means[:5]), atol=1e-4)
    assert np.abs(seen[4] - means[4]).max() > 1e-2  # with the residual
    np.testing.assert_allclose(seen[5], means[5], atol=1e-4)


def check_the_environment_names_a_compression(a: Adapter) -> None:
    for word, wanted in (("topk:0.25", "TopK(ratio=0.25)"), ("none", "Dense()")):
        with environment(COMPRESSION=word):
            assert wanted in a.job().optimizer.exchange.levels().values(), word
            chosen = a.job(Fixed(PowerSGD(3))).optimizer.exchange.levels().values()
            assert "PowerSGD(rank=3)" in chosen, "the argument goes first"
    with environment(COMPRESSION="localsgd:2"):
        assert a.job().optimizer.averaging.method == LocalSGD(2)
    with (
        environment(COMPRESSION="topk:7"),
        refused(ValueError, "ACCORDION_HVD_COMPRESSION is 'topk:7'", "ratio"),
    ):
        a.job()


# ------------------------------------------------------------------------- guards and refusals
def check_arguments_are_refused(a: Adapter) -> None:
    for kind, words, compression, options in (
        (ValueError, ("Adasum", "TopK"), TopK(0.1), {"op": a.adasum}),
        (ValueError, ("backward_passes_per_step", "0"), None, {"backward_passes_per_step": 0}),
        (ValueError, ("guard", "'loud'", "'warn'"), None, {"guard": "loud"}),
        (TypeError, ("3.5", "TopK(0.01)"), 3.5, {}),
        (ValueError, ("nonsense", "allowed", "topk"), "nonsense", {}),
    ):
        with refused(kind, *words):
            a.job(compression, **options)
    policy = Accordion(low=Dense(), high=TopK(0.1), window=1)
    first, second = a.job(policy), a.job(policy)
    train(a, first, 1)
    with refused(ValueError, "another optimizer"):
        train(a, second, 1)


def check_ranks_that_disagree(a: Adapter) -> None:
    odd = a.hvd.rank() == a.hvd.size() - 1
    compression = a.horovod.Compression
    for first, last, options in (
        (TopK(0.2), TopK(0.1), {}),
        (TopK(0.2), PowerSGD(1), {}),
        (compression.none, compression.fp16, {}),
        (compression.none, TopK(0.5), {}),
        (PowerSGD(1), PowerSGD(1), {"skip": ["first"] if odd else []}),
    ):
        job = a.job(last if odd else first, **options)
        culprit = f"[{a.hvd.size() - 1}]" if a.hvd.size() > 2 else "rank"
        with refused(RanksDisagree, culprit):
            train(a, job, 1)
    wider = {"first": np.zeros((32, 48), np.float32)} if odd else {"first": ZEROS["first"]}
    job = a.job(PowerSGD(1), first=wider)
    with refused(RanksDisagree, "first"):
        job.step(wider)


def check_a_replica_that_drifts_is_reported(a: Adapter) -> None:
    job = a.job(PowerSGD(2), guard_every=4)
    train(a, job, 3)
    if a.hvd.rank() == a.hvd.size() - 1:
        job.assign("second", job.weights()["second"] + np.float32(1e-3))
    with refused((ReplicasDiffer, *a.failed), "after step 4", "second"):
        train(a, job, 3, start=3)


def check_weights_that_were_never_broadcast(a: Adapter) -> None:
    """Horovod's own compression warns once, on rank 0, and goes on as Horovod does; ours stops."""

    def warned(compression: Any = None, **options: Any) -> int:
        values = {name: x + np.float32(a.hvd.rank()) for name, x in ZEROS.items()}
        job = a.job(compression, first=values, guard_every=1, **options)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            train(a, job, 5)
        rows = a.gather(job.weights()["first"])
        assert not (rows[0] == rows[1]).all()
        return len([w for w in caught if "replicas differ" in str(w.message)])

    theirs = a.horovod.Compression
    kinds = ({}, {"compression": theirs.none}, {"compression": theirs.fp16})
    for options in some(kinds, kinds[2:] if a.traced else kinds):
        assert warned(**options) == (a.hvd.rank() == 0), options
    assert warned(TopK(0.1), guard="warn") == (a.hvd.rank() == 0)
    assert warned(guard="off") == 0
    stops = ((TopK(0.1), {}), ("fp16", {}), (None, {"guard": "error"}))
    for compression, options in some(stops, stops[:1] if a.traced else stops):
        with refused((ReplicasDiffer, *a.failed), "after step 1", "broadcast"):
            warned(compression, **options)
    for words in ({"COMPRESSION": "topk:0.1"}, {"GUARD": "error"}):
        with environment(**words), refused((ReplicasDiffer, *a.failed), "after step 1"):
            warned()


# --------------------------------------------------------------------------------- checkpoints
OFTEN: dict[str, Any] = {"window": 3, "interval": 1, "threshold": 0.02}
LADDER = [PowerSGD(1), PowerSGD(2)]
SERVER = LGC(0.05, "server", dense=1, training=2, innovation=0.005)
RESUMED: list[tuple[Callable[[], Any], int]] = [
    (lambda: TopK(0.05), 5),
    (lambda: Accordion(PowerSGD(3), TopK(0.05), **OFTEN), 8),  # within a window
    (lambda: Accordion(PowerSGD(3), TopK(0.05), **OFTEN), 9),  # at its end: a decision is due
    (lambda: AdaQS(LADDER, window=5, probes=2, drop=1.0), 7),  # between its looks
    (lambda: StepSchedule({0: PowerSGD(2), 4: TopK(0.05), 7: PowerSGD(1)}, window=1), 5),
    (lambda: Fixed(LGC(0.05, dense=1, training=3)), 3),  # within its training
    (lambda: PowerSGD(2, alternate=True), 5),  # in the second turn
    (lambda: StepSchedule({0: SERVER, 2: Dense(), 4: SERVER}, window=1), 3),
]
"""What is saved and goes on, and after how many steps."""


@once
def check_resuming_equals_not_stopping(a: Adapter) -> None:
    """A resumed training has the weights, decisions and phases of one that does not stop.

    A step taken before the restore does not influence the training.
    """
    for policy, before in some(RESUMED, RESUMED[1:2] if a.traced else RESUMED):
        job = a.job(policy(), lr=0.1)
        train(a, job, before)
        with folder(a) as path:
            a.hvd.save_state(path, only=[job.optimizer])
            saved = job.weights()
            train(a, job, 6, start=before)
            again = a.job(policy(), lr=0.1)
            train(a, again, 1)
            a.hvd.load_state(path, only=[again.optimizer])
            for name, values in saved.items():
                again.assign(name, values)
            train(a, again, 6, start=before)
        assert_equal_ranks(a, again, policy())
        assert_close(again.weights(), job.weights(), policy())
        ours, theirs = again.optimizer.exchange, job.optimizer.exchange
        assert ours.steps == theirs.steps == before + 6
        assert repr(ours.policy.history) == repr(theirs.policy.history)
        assert [ours.phase(s) for s in ours.bucket_states] == [
            theirs.phase(s) for s in theirs.bucket_states
        ]


@eagerly
def check_a_missing_file_is_named(a: Adapter) -> None:
    job = a.job(TopK(0.05))
    train(a, job, 2)
    with folder(a) as path:
        a.hvd.save_state(path, only=[job.optimizer])
        a.gather(np.zeros(1))
        if a.hvd.rank() == 0:
            os.remove(path / "state-00001" / f"rank-00001-of-{a.hvd.size():05d}.npz")
        a.gather(np.zeros(1))
        with refused(RuntimeError, "ranks [1]", "missing"):
            a.hvd.load_state(path, only=[job.optimizer])
        with refused(RuntimeError, "missing"):
            a.hvd.load_state(path / "nowhere", only=[job.optimizer])


@eagerly
def check_damaged_checkpoints_are_skipped_or_named(a: Adapter) -> None:
    """All ranks skip a damaged checkpoint, although only one rank reads the damaged file.

    If no intact checkpoint is left, all ranks name the damaged files.
    """
    job, resumed = a.job(TopK(0.05)), a.job(TopK(0.05))

    def on_rank_0(action: Callable[[], Any]) -> None:
        a.gather(np.zeros(1))
        if a.hvd.rank() == 0:
            action()
        a.gather(np.zeros(1))

    with folder(a) as path:
        train(a, job, 2)
        a.hvd.save_state(path, only=[job.optimizer])
        before = residuals(a, job)
        train(a, job, 1, start=2)
        a.hvd.save_state(path, only=[job.optimizer])
        last = f"rank-{a.hvd.size() - 1:05d}-of-{a.hvd.size():05d}.npz"
        on_rank_0(lambda: os.truncate(path / "state-00002" / last, 100))
        a.hvd.load_state(path, only=[resumed.optimizer])
        assert resumed.optimizer.exchange.steps == 2
        for ours, theirs in zip(residuals(a, resumed), before, strict=True):
            np.testing.assert_array_equal(ours, theirs)
        on_rank_0(lambda: (path / "state-00001" / last).write_bytes(b""))
        with refused(RuntimeError, f"state-00002: {last} has 100", f"state-00001: {last} has 0"):
            a.hvd.load_state(path, only=[resumed.optimizer])


@eagerly
def check_a_rank_that_cannot_write_is_named(a: Adapter) -> None:
    """A checkpoint that a rank cannot write is removed; the previous one can be loaded."""
    job, resumed, last = a.job(TopK(0.05)), a.job(TopK(0.05)), a.hvd.size() - 1
    with folder(a) as path:
        train(a, job, 2)
        a.hvd.save_state(path, only=[job.optimizer])
        train(a, job, 1, start=2)
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        if a.hvd.rank() == last:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, limit[1]))
        try:
            with refused(RuntimeError, f"failed on rank {last}: rank-", "be written: File too"):
                a.hvd.save_state(path, only=[job.optimizer])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        a.gather(np.zeros(1))  # rank 0 has removed the incomplete checkpoint
        assert [found.name for found in path.iterdir() if found.is_dir()] == ["state-00001"]
        a.hvd.load_state(path, only=[resumed.optimizer])
        assert resumed.optimizer.exchange.steps == 2


@eagerly
def check_another_number_of_ranks_goes_on_from_the_shift(a: Adapter) -> None:
    """EF21 resumes on a single rank with the saved mean h, which is also the rank's h_i."""
    job = a.job(EF21(TopK(0.05)))
    train(a, job, 3)

    def shift(owner: Job, key: str) -> np.ndarray:
        entries = [s for s in owner.optimizer.exchange.bucket_states if s.bucket.compress]
        return np.concatenate([np.ravel(a.xp.to_numpy(s.state[key])) for s in entries])

    before = shift(job, "mean")
    np.testing.assert_allclose(a.gather(shift(job, "local")).mean(0), before, atol=1e-6)
    with folder(a) as path:
        a.hvd.save_state(path, only=[job.optimizer])
        with process_set(a, [0]) as alone:
            if a.hvd.rank() == 0:
                resumed = a.job(EF21(TopK(0.05)), process_set=alone)
                a.hvd.load_state(path, only=[resumed.optimizer])
                np.testing.assert_array_equal(shift(resumed, "mean"), before)
                np.testing.assert_array_equal(shift(resumed, "local"), before)


@eagerly
def check_another_number_of_ranks_keeps_the_mean_residual(a: Adapter) -> None:
    job = a.job(TopK(0.05))
    train(a, job, 3)

    def mean(owner: Job | None, ranks: int) -> np.ndarray:
        mine = residuals(a, owner) if owner else [np.zeros_like(x) for x in residuals(a, job)]
        return a.gather(np.concatenate([x.ravel() for x in mine])).sum(0) / ranks

    before = mean(job, a.hvd.size())
    assert np.abs(before).max() > 0
    with folder(a) as path:
        a.hvd.save_state(path, only=[job.optimizer])
        for ranks in ([0], [0, a.hvd.size() - 1], list(everybody(a))):
            with process_set(a, ranks) as some:
                resumed = None
                if a.hvd.rank() in ranks:
                    resumed = a.job(TopK(0.05), process_set=some)
                    a.hvd.load_state(path, only=[resumed.optimizer])
                found = mean(resumed, len(ranks))
                np.testing.assert_allclose(found, before, atol=1e-5, err_msg=f"{ranks}")


# --------------------------------------------------------------------------------------- ledgers
@once
def check_a_ledger_accounts_for_the_time_and_finds_the_slow_rank(a: Any) -> None:
    """The ledger accounts for the elapsed time and names the slowest rank.

    The last rank sleeps in each step, longer than ranks may differ in tracing; others wait.
    """
    slow, pause, steps = a.hvd.size() - 1, 0.06, 60
    with folder(a) as shared:
        ledger = Ledger(price=1.0)
        job = a.job(PowerSGD(2), ledger=ledger, guard_every=20)
        train(a, job, 20)  # graphs are traced in the first steps
        job.optimizer.exchange.account()
        before, began = dict(zip(SUMS, map(ledger.series.total, SUMS), strict=True)), perf_counter()
        for step in range(20, steps):
            if a.hvd.rank() == slow:
                sleep(pause)
            job.step(gradients(a.hvd.rank(), step))
        job.optimizer.exchange.account()
        wall = perf_counter() - began
        spent = {key: ledger.series.total(key) - before[key] for key in SUMS}
        assert ledger.series.steps == steps == job.optimizer.exchange.steps
        assert ledger.series.total("sent") == job.optimizer.exchange.stats()["sent"]
        assert abs(sum(spent[part] for part in PARTS) - wall) < 0.03 * wall + 0.02, (spent, wall)
        other = spent["wait"] + spent["graph"]
        if a.hvd.rank() == slow:
            assert spent["compute"] > (steps - 20) * pause
        else:
            assert other > 0.7 * (steps - 20) * pause, spent
        if a.hvd.rank() == 0:
            path = ledger.write(shared)
            assert path is not None and "<h2>Ranks</h2>" in path.read_text()
            summary = summarize(files.load(files.ledgers(shared)[0]))
            assert summary.slowest is not None and summary.slowest.number == slow, summary.ranks
            assert summary.rates
            if summary.estimates:  # none where a graph contains the whole step
                assert summary.estimates["Dense()"].low < pause
        else:
            assert ledger.write(shared) is None
    unrecorded = a.job(PowerSGD(2), ledger=False)
    train(a, unrecorded, 2)
    assert not unrecorded.optimizer.exchange.ledger.series.rows
    with refused(TypeError, "ledger is 3"):
        a.job(PowerSGD(2), ledger=3)
