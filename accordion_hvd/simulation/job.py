"""Simulation of the time of whole training jobs on thousands of ranks.

```python
outcome = simulate_job(
    {"weight": (4096, 1024), "bias": (1024,)}, "powersgd:4", ranks=4096, steps=1000,
    link=Link(2e-4, 1.25e9, local_size=8), compute=LogNormal(0.12, 0.05),
)
outcome.median, outcome.parts
```
No model is trained. The bytes, the rounds and the levels are those of a real job: the plan of the
engine, the requests of the real exchange generators, and the decisions of the real policy.
Computation and links are modelled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from accordion_hvd import check
from accordion_hvd.averaging.base import Averaging
from accordion_hvd.core.base import consecutive
from accordion_hvd.engine.layout import TensorInfo
from accordion_hvd.ops.numpy import Array
from accordion_hvd.ops.spec import ITEMSIZE
from accordion_hvd.policies.base import Decision
from accordion_hvd.resolve import resolve
from accordion_hvd.simulation.clocks import PARTS, Clocks, Times
from accordion_hvd.simulation.compute_times import Constant, Throughput
from accordion_hvd.simulation.links import HostLinks, Link
from accordion_hvd.simulation.programs import (
    AveragingPrograms,
    GradientPrograms,
    Gradients,
    NormSeries,
    Program,
    check_policy,
    falling_norms,
)

PATIENCE = 1000
"""Failures without a commit between them after which a job counts as hopeless."""


@dataclass
class JobOutcome:
    """Result of `simulate_job`.

    Attributes:
        seconds: virtual time until the last rank has finished the last step.
        step_seconds: seconds of each step. Steps that a failure lost are not counted.
        median: median seconds per step.
        p99: 99th percentile of the seconds per step.
        parts: mean seconds per step and rank: "compute"; "encode" and "decode", on the training
            thread; "exposed", the wait for operations that computation does not hide; and "idle",
            the wait for slower ranks.
        sent_by_rank: mean bytes that rank 0 sends per step, as `stats()["sent"]` counts them.
        sent_by_host: mean bytes that a host sends to other hosts per step.
        levels: (step, bucket -> compressor) for each step before which compressors changed.
        decisions: all decisions of the policy.
        failures: the failures during the job.
        commit_seconds: seconds spent in commits.
        goodput: part of `seconds` spent in steps that were not lost.
    """

    seconds: float = 0.0
    step_seconds: Array = field(default_factory=lambda: np.zeros(0))
    median: float = 0.0
    p99: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)
    sent_by_rank: float = 0.0
    sent_by_host: float = 0.0
    levels: list[tuple[int, dict[str, str]]] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    commit_seconds: float = 0.0
    goodput: float = 1.0


def simulate_job(
    model: Mapping[str, tuple[int, ...]],
    compression: Any,
    ranks: int,
    steps: int,
    *,
    link: Link | None = None,
    compute: Any = None,
    speeds: Sequence[float] | None = None,
    encoding: Throughput | None = None,
    failures: Failures | None = None,
    evidence: NormSeries | None = None,
    lr: float | Callable[[int], float] = 0.1,
    skip: Sequence[str] = (),
    dtype: str = "float32",
    ready: Mapping[str, float] | None = None,
    backward: float = 2 / 3,
    overlap: bool = True,
    seed: int = 0,
) -> JobOutcome:
    """Simulate the time of a training job.

    Args:
        model: shape of each parameter by name, in the order of the layers. Gradients become ready
            in reverse order.
        compression: compressor, policy, averaging method or spec string, as in
            `DistributedOptimizer(compression=)`. Groups of `WAGMA` wait for late ranks. Gates
            are refused, since they measure real time.
        ranks: number of ranks.
        steps: number of optimizer steps.
        link: the link of each host; by default `Link()`, with one rank per host.
        compute: seconds that each rank computes for a batch, from `simulation.compute_times`; by
            default `Constant(0.1)`.
        speeds: relative speed of each rank, by which its compute, encode and decode times are
            divided; by default 1.
        encoding: the time of encoding and decoding; by default they take no time.
        failures: failures; by default there are none.
        evidence: (bucket, step) -> the number by which the policy decides, such as the norm of the
            sum of a window's gradients; by default norms that fall and then stay.
        lr: learning rate of all steps, or a function of the step.
        skip: patterns of the names of parameters that are sent uncompressed.
        dtype: dtype of the gradients.
        ready: parameter -> part of the backward pass after which its gradient is ready; by default
            the part of the model's elements whose gradients are ready then.
        backward: part of the compute time that is the backward pass.
        overlap: whether gradients are sent during the backward pass, as in PyTorch.
        seed: seed of all random numbers.

    Raises:
        ValueError: if an argument is not allowed.
        RuntimeError: if all hosts of an elastic job have failed, or if failures are too frequent
            for the job to proceed.
    """
    check.integer("simulate_job", "ranks", ranks, least=1)
    check.integer("simulate_job", "steps", steps, least=1)
    if not (check.is_number(backward) and 0 <= backward <= 1):
        check.refuse("simulate_job", "backward", backward, "a number from 0 to 1")
    if speeds is not None and (len(speeds) != ranks or min(speeds) <= 0):
        check.refuse("simulate_job", "speeds", speeds, f"{ranks} numbers above 0, one per rank")
    method = resolve(compression).serving
    if not isinstance(method, Averaging):
        check_policy(method)
    settings = _Settings(
        method,
        _gradients(model, dtype, ready, skip),
        link or Link(),
        np.ones(ranks) if speeds is None else np.asarray(speeds, float),
        encoding or Throughput(),
        evidence or falling_norms(steps),
        lr if callable(lr) else lambda step: lr,
        backward,
        overlap,
    )
    times = (compute or Constant()).draw(ranks, steps, seed)
    return JobRun(settings, times, failures or Failures(), seed).run()


def _gradients(
    model: Mapping[str, tuple[int, ...]],
    dtype: str,
    ready: Mapping[str, float] | None,
    skip: Sequence[str],
) -> Gradients:
    if not model:
        check.refuse("simulate_job", "model", model, "a mapping with at least one shape")
    tensors = tuple(
        TensorInfo(k, tuple(shape), dtype) for k, shape in reversed(list(model.items()))
    )
    sizes = np.cumsum([tensor.size for tensor in tensors])
    parts = dict(zip([x.name for x in tensors], sizes / max(sizes[-1], 1), strict=True))
    for name, part in (ready or {}).items():
        if name not in parts or not 0 <= part <= 1:
            allowed = f"from 0 to 1, for one of {', '.join(parts)}"
            check.refuse("simulate_job", f"ready[{name!r}]", part, allowed)
        parts[name] = part
    return Gradients(tensors, tuple(float(parts[x.name]) for x in tensors), tuple(skip))


@dataclass(frozen=True)
class _Settings:
    """Settings of a job that do not change when ranks leave; see `simulate_job`."""

    method: Any
    gradients: Gradients
    link: Link
    speeds: Array
    encoding: Throughput
    evidence: NormSeries
    lr: Callable[[int], float]
    backward: float
    overlap: bool


class JobWorld:
    """The ranks that take part, and what they do in each step.

    Args:
        settings: the settings of the job.
        hosts: numbers of the hosts that take part.

    Attributes:
        ranks: numbers of the ranks that take part.
        network: the links between them.
        clocks: their clocks.
        source: the source of their programs.
    """

    def __init__(self, settings: _Settings, hosts: Sequence[int]) -> None:
        local, total = settings.link.local_size, len(settings.speeds)
        ranks = [np.arange(host * local, min((host + 1) * local, total)) for host in hosts]
        self.ranks = np.concatenate(ranks)
        self.network = HostLinks(settings.link.of_hosts(hosts), len(self.ranks))
        slowness = 1 / settings.speeds[self.ranks]
        self.clocks = Clocks(self.network, slowness, settings.backward, settings.overlap)
        self.source = _programs(settings, len(self.ranks))
        self._steps, self._programs = iter(self.source), list[Program]()

    def restart(self, now: float) -> None:
        """Set all clocks; no operation is under way."""
        self.clocks.now = np.full(len(self.ranks), now)
        self.network.restart()

    def program(self, step: int) -> Program:
        """Return what the ranks do in a step."""
        while len(self._programs) <= step:
            self._programs.append(next(self._steps))
        return self._programs[step]


def _programs(settings: _Settings, ranks: int) -> GradientPrograms | AveragingPrograms:
    gradients, encoding, lr = settings.gradients, settings.encoding, settings.lr
    if isinstance(settings.method, Averaging):
        size = sum(x.size * ITEMSIZE[x.dtype] for x in gradients.tensors)
        return AveragingPrograms(settings.method, size, ranks, encoding, lr)
    hosts = consecutive(ranks, settings.link.local_size)
    return GradientPrograms(
        settings.method, gradients, ranks, hosts, encoding, settings.evidence, lr
    )


@dataclass
class _Kept:
    """A step that was not lost; `sent` is the bytes that a host sent to others, on average."""

    times: Times
    program: Program
    sent: float


class JobRun:
    """A run of all steps, with failures; `times` are compute times in seconds, (steps, ranks)."""

    def __init__(self, settings: _Settings, times: Array, failures: Failures, seed: int) -> None:
        self._settings, self._times, self._failures = settings, times, failures
        self._hosts = list(range(settings.link.hosts(times.shape[1])))
        self._world = JobWorld(settings, self._hosts)
        self._events = failures.draw(seed)
        self._next, self._place = next(self._events)
        self._kept: list[_Kept] = []
        self._resumed = 0.0  # time of the last commit or restart
        self._committed = 0  # steps before the last commit
        self._in_vain = 0  # failures since the last commit
        self._happened: list[Failure] = []

    def run(self) -> JobOutcome:
        while len(self._kept) < len(self._times):
            step, world = len(self._kept), self._world
            program = world.program(step)
            times = world.clocks.advance(program, self._times[step, world.ranks])
            commits = (step + 1) % self._failures.commit_every == 0
            if commits:
                world.clocks.wait(world.clocks.now + self._failures.commit)
            if self._next <= world.clocks.latest:
                self._fail()
                continue
            sent = sum(map(world.network.sent, program.operations))
            self._kept.append(_Kept(times, program, sent))
            if commits:
                self._resumed, self._committed = world.clocks.latest, step + 1
                self._in_vain = 0
        return self._outcome()

    def _fail(self) -> None:
        """Return to the last commit, with the cost of a failure."""
        failed, lost_steps = self._next, len(self._kept) - self._committed
        down = failed
        hosts: list[int] = []
        while self._next <= down:
            hosts.append(self._hosts[math.floor(self._place * len(self._hosts))])
            if self._failures.elastic:
                self._hosts.remove(hosts[-1])
                if not self._hosts:
                    raise RuntimeError(f"all hosts have failed after {down:g} s.")
            self._in_vain += 1
            if self._in_vain > PATIENCE:
                raise RuntimeError(
                    f"the job does not proceed: {PATIENCE} failures without a commit between them; "
                    "failures are too frequent for commit_every, detection and restart."
                )
            down = self._next + self._failures.detection + self._failures.restart
            self._next, self._place = next(self._events)
        if self._failures.elastic:
            self._world = JobWorld(self._settings, self._hosts)
        self._world.restart(down)
        del self._kept[self._committed :]
        lost, ranks = failed - self._resumed, len(self._world.ranks)
        self._happened.append(Failure(failed, tuple(hosts), lost_steps, lost, down - failed, ranks))
        self._resumed = down

    def _outcome(self) -> JobOutcome:
        seconds = np.array([kept.times.seconds for kept in self._kept])
        total, traffic = self._world.clocks.latest, [x.program.traffic.sent for x in self._kept]
        parts = {k: float(np.mean([x.times.parts[k] for x in self._kept])) for k in PARTS}
        return JobOutcome(
            seconds=total,
            step_seconds=seconds,
            median=float(np.median(seconds)),
            p99=float(np.percentile(seconds, 99)),
            parts=parts,
            sent_by_rank=float(np.mean(traffic)),
            sent_by_host=float(np.mean([kept.sent for kept in self._kept])),
            levels=_changes([kept.program.levels for kept in self._kept]),
            decisions=list(self._world.source.decisions),
            failures=self._happened,
            commit_seconds=self._failures.commit * (len(seconds) // self._failures.commit_every),
            goodput=float(seconds.sum() / total) if total else 1.0,
        )


def _changes(levels: Sequence[dict[str, str]]) -> list[tuple[int, dict[str, str]]]:
    pairs = zip([None, *levels[:-1]], levels, strict=True)
    return [(step, new) for step, (old, new) in enumerate(pairs) if new != old]


# ----------------------------------------------------------------------------------------- failures
@dataclass(frozen=True)
class Failures:
    """When hosts fail, and the cost of a failure.

    A failure ends all ranks' current step. The job detects it, starts again after the restart, and
    repeats the steps since the last commit (a checkpoint, or `state.commit()` of an elastic job).
    A failure during detection or restart begins both anew.

    Args:
        mean: mean seconds between failures of the job, which are exponentially distributed; None
            for no random failures.
        times: seconds at which the job fails, if `mean` is None.
        detection: seconds until the job notices a failure.
        restart: seconds until training continues after that.
        commit_every: steps between commits, at least 1.
        commit: seconds that a commit takes.
        elastic: whether the job continues without the ranks of the host that failed. Otherwise it
            continues with as many ranks as before.
    """

    mean: float | None = None
    times: Sequence[float] = ()
    detection: float = 30.0
    restart: float = 120.0
    commit_every: int = 100
    commit: float = 0.0
    elastic: bool = False

    def __post_init__(self) -> None:
        for name in ("detection", "restart", "commit"):
            check.at_least(self, name, getattr(self, name), least=0)
        check.integer(self, "commit_every", self.commit_every, least=1)
        if self.mean is not None and not (check.is_number(self.mean) and self.mean > 0):
            check.refuse(self, "mean", self.mean, "a number above 0, or None")
        if self.mean is not None and self.times:
            check.refuse(self, "times", self.times, "() if mean is given")
        if list(self.times) != sorted(self.times):
            check.refuse(self, "times", self.times, "in ascending order")

    def draw(self, seed: int) -> Iterator[tuple[float, float]]:
        """Yield (time, place) of each failure; the host is number floor(place * hosts)."""
        rng, now = np.random.default_rng([seed, 1]), 0.0
        if self.mean is None:
            for time in self.times:
                yield float(time), rng.random()
        while self.mean is not None:
            now += rng.exponential(self.mean)
            yield now, rng.random()
        yield math.inf, 0.0


@dataclass(frozen=True)
class Failure:
    """A failure that has happened.

    Attributes:
        time: seconds since the start of the job.
        hosts: numbers of the hosts that failed; several if one failed during the restart.
        lost_steps: complete steps that were lost.
        lost: seconds since the last commit, whose work was lost.
        down: seconds from the failure to the first step after it.
        ranks: number of ranks afterwards.
    """

    time: float
    hosts: tuple[int, ...]
    lost_steps: int
    lost: float
    down: float
    ranks: int
