"""Tests that training continues from checkpoints of older versions as if it had not stopped.

`saved/README.md` describes how the files were made. Each checkpoint has a file with the results of
the steps after it in a training that did not stop.
"""

from __future__ import annotations

import copy
import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from saved import LR, MORE, SAVED, digest, results, values
from threads import Threaded

from accordion_hvd import (
    COLD,
    DGC,
    DPSGD,
    QSGD,
    WAGMA,
    Accordion,
    AdaComp,
    AdaQS,
    Dense,
    DiLoCo,
    DynaCOLD,
    EFSignSGD,
    Fixed,
    LocalSGD,
    Nesterov,
    OneBit,
    PowerSGD,
    PrivacyBudget,
    ScaleCom,
    SignSGD,
    SketchedSGD,
    StepSchedule,
    Threshold,
    TopAgg,
    TopK,
    TwoLevel,
    simulate,
)
from accordion_hvd.core.base import Info
from accordion_hvd.engine.buckets import TensorInfo
from accordion_hvd.engine.checkpoint import load_state, save_state
from accordion_hvd.engine.guard import Guard
from accordion_hvd.engine.model_averager import ModelAverager, Parameters
from accordion_hvd.ops import numpy as xp
from accordion_hvd.optimizers import (
    Adam,
    Birder,
    CDAdam,
    OnebitAdam,
    OnebitLamb,
    SketchedAMSGrad,
    ZeroOneAdam,
)
from accordion_hvd.optimizers.birder import Draw
from accordion_hvd.policies import Policy
from accordion_hvd.policies.warmup import WarmUp
from accordion_hvd.simulation import one_process
from accordion_hvd.simulation.one_process import Hub, World

SHAPES = {"w": (32, 32), "small": (3, 3), "b": (4,)}
TWO = {"w": (32, 32), "v": (32, 32), "b": (4,)}
STOP = 4
"""Steps of trainings whose models were averaged, before they were saved."""

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Kind:
    """Configuration of a training that wrote a checkpoint.

    Attributes:
        make: function that returns a new compression.
        stop: number of steps before the checkpoint.
        bad: step in which a gradient of rank 1 was not finite.
        unused: ends of arrays' names and keys of rows that do not affect the next steps.
        within: prefix of names.
    """

    make: Callable[[], Any]
    stop: int = 5
    bad: int = -1
    ranks: int = 2
    local_size: int = 1
    skip: Sequence[str] = ()
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=lambda: SHAPES)
    unused: tuple[str, ...] = ()
    within: str = ""


def accordion(**more: Any) -> Accordion:
    return Accordion(PowerSGD(2), PowerSGD(1), **{"window": 2, "interval": 1, **more})


KINDS = {
    "accordion": Kind(accordion, shapes=TWO, stop=7),
    "accordion_reduced": Kind(lambda: accordion(signal="reduced"), shapes=TWO, stop=7),
    "accordion_batches": Kind(lambda: accordion(window=4, batch_size=(4, 8)), stop=6),
    "adacomp": Kind(lambda: AdaComp(50)),
    "adaqs": Kind(lambda: AdaQS([PowerSGD(1), PowerSGD(2)], window=4, probes=1), stop=6),
    "dgc": Kind(lambda: DGC(0.1, warmup=4), stop=2),
    "ef_signsgd": Kind(EFSignSGD),
    "fixed": Kind(
        lambda: Fixed(TopK(0.1), overrides={"v": PowerSGD(1)}), skip=["w"], shapes=TWO
    ),
    "onebit": Kind(OneBit),
    "owed": Kind(lambda: StepSchedule({0: TopK(0.1), 4: Dense()}, window=1), bad=4),
    "qsgd": Kind(lambda: StepSchedule({0: TopK(0.1), 2: QSGD(4), 7: TopK(0.1)}, window=1)),
    "powersgd": Kind(lambda: PowerSGD(2), bad=2),
    "scalecom": Kind(lambda: ScaleCom(0.1, beta=0.3)),
    "signsgd": Kind(lambda: SignSGD(0.9)),
    "sketched_sgd": Kind(lambda: SketchedSGD(0.05, columns=5)),
    "threshold": Kind(lambda: Threshold(1.5)),
    "topk": Kind(lambda: TopK(0.1)),
    "two_level": Kind(lambda: TwoLevel(PowerSGD(1)), ranks=4, local_size=2),
    "two_level_owed": Kind(
        lambda: StepSchedule({0: TwoLevel(TopK(0.1)), 4: Dense()}, window=1),
        bad=4, ranks=4, local_size=2, unused=("served", "turns"),
    ),
    "adam": Kind(Adam),
    "birder": Kind(Birder),
    "cd_adam": Kind(CDAdam),
    "onebit_adam": Kind(lambda: OnebitAdam(warmup_steps=3)),
    "onebit_adam_auto": Kind(lambda: OnebitAdam(betas=(0.8, 0.9)), stop=19),
    "onebit_adam_begun": Kind(lambda: OnebitAdam(warmup_steps=4), stop=2),
    "onebit_lamb": Kind(
        lambda: OnebitLamb(warmup_steps=3),
        unused=("0/1/state/count", "0/1/state/coeff", "0/1/state/weight"),
    ),
    "sketched_amsgrad": Kind(
        lambda: SketchedAMSGrad(ratio=0.02, warmup_steps=3), unused=("/count", "0/0/state/apart")
    ),
    "zero_one_adam": Kind(
        lambda: ZeroOneAdam(var_freeze_step=3, local_step_scaler=3, local_step_clipper=4),
        stop=8,
    ),
}  # fmt: skip

METHODS = {
    "cold": lambda: COLD("ring", 0.5, TopK(0.5)),
    "diloco": lambda: DiLoCo(3, Nesterov(0.7, 0.9), TopK(0.2)),
    "dpsgd": lambda: DPSGD("ring"),
    "dyna_cold": lambda: DynaCOLD("ring", theta=0.6),
    "local_sgd": lambda: LocalSGD(3),
    "wagma": lambda: WAGMA(2, 4, wait_avoiding=False),
}

by_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
by_method = pytest.mark.parametrize("name", METHODS)


# ----------------------------------------------------------------------------- what ranks are given
def gradients(kind: Kind, ranks: int, step: int) -> list[Arrays]:
    found = [
        {kind.within + k: values(k, shape, rank, step) for k, shape in kind.shapes.items()}
        for rank in range(ranks)
    ]
    if step == kind.bad:
        found[1]["w"][0, 0] = np.inf
    return found


def weights(kind: Kind, ranks: int) -> list[Arrays]:
    """Return weights for compressors that need them."""
    one = {kind.within + k: values(k, shape, 9, 9) for k, shape in kind.shapes.items()}
    return [one for _ in range(ranks)]


def go_on(world: World, kind: Kind, first: int, count: int) -> np.ndarray:
    """Return an array (steps, ranks, ...) with the results of `count` steps."""
    rows = []
    for step in range(first, first + count):
        ranks = len(world._policies)
        batches = world.micro_batches(LR)
        means = world.step(gradients(kind, ranks, step), LR, weights(kind, ranks))
        decided = [decisions(exchange.policy) for exchange in world.exchanges]
        rows.append(
            [np.append(digest(x), [batches, *d]) for x, d in zip(means, decided, strict=True)]
        )
    return np.array(rows)


def decisions(policy: Policy) -> list[float]:
    """Return the number of decisions, and the sums of their evidence."""
    history = policy.history
    kinds = ("norm", "ratio", "sum", "level", "step", "window", "lr", "previous_lr")
    sums = {kind: sum(_number(row.get(kind)) for row in history) for kind in kinds}
    if isinstance(policy, WarmUp):  # once each row had the sum of its step's norms
        sums["sum"] = sum(one.norm for row in history for one in history if one.step == row.step)
    return [len(history), *sums.values()]


def _number(x: float | None) -> float:
    return 0.0 if x is None or math.isnan(x) else x


# ------------------------------------------------------------------------ what knows the internals
def new_world(kind: Kind, ranks: int = 0) -> World:
    """Return ranks that have not taken a step, as before a checkpoint is loaded."""
    count = ranks or kind.ranks
    plain = one_process.SimulatedCommunicator
    one_process.SimulatedCommunicator = Threaded  # ranks wait for each other when they load
    try:
        local_size = kind.local_size if count == kind.ranks else 1
        world = simulate(kind.make(), count, skip=kind.skip, local_size=local_size)
        world._build(gradients(kind, count, 0)[0])
    finally:
        one_process.SimulatedCommunicator = plain
    return world


def owners(world: World) -> list[Any]:
    """Return the objects that each rank passes to `save_state` and `load_state`."""
    return [
        SimpleNamespace(exchange=x, communicator=x.communicator, expect=lambda names: None)
        for x in world.exchanges
    ]


def residuals(world: World) -> np.ndarray:
    """Return the sum of all ranks' residuals of the first tensor."""
    return np.sum([exchange.bucket_states[0].state["error"] for exchange in world.exchanges], 0)


class Model(Parameters):
    """Model of one rank."""

    def __init__(self) -> None:
        self.arrays = {name: np.ones(shape, np.float32) for name, shape in SHAPES.items()}

    def tensors(self) -> Sequence[TensorInfo]:
        return [TensorInfo(name, x.shape, "float32") for name, x in self.arrays.items()]

    def read(self) -> list[np.ndarray]:
        return list(self.arrays.values())

    def write(self, values: Sequence[np.ndarray]) -> None:
        self.arrays = dict(zip(self.arrays, values, strict=True))


def averagers(name: str, ranks: int = 2) -> list[ModelAverager]:
    """Return an averager per rank, each of one model."""
    hub, found = Hub(ranks), []
    for rank in range(ranks):
        link = Threaded(hub, rank, xp)
        found.append(ModelAverager(METHODS[name](), Model(), link, Guard("off")))
        found[-1]._name = "same"  # as in processes of their own
    return found


def train(averager: ModelAverager, first: int, count: int) -> np.ndarray:
    """Train; return digests of this rank's model after each step."""
    rows, rank, model = [], averager.communicator.rank, averager.parameters
    averager.prepare()
    for step in range(first, first + count):
        for name, x in model.arrays.items():
            pull = values(name, x.shape, rank, step)
            model.arrays[name] = x - np.float32(LR) * (x - pull)
        averager.average(LR)
        rows.append(digest(model.arrays))
    return np.array(rows)


def on_all(ranks: Sequence[Any], action: Callable[[Any], Any]) -> list[Any]:
    """Run an action on all ranks, which are threads; return its results."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(action, ranks))


# -------------------------------------------------------------------------------------------- tests
class Mirrored(Draw):
    """Random generator that returns 1 - r for each random number r."""

    def of(self, u: Any, state: Any = None, key: str = "") -> Any:
        signs, errors = super().of(-u, state, key)
        return [~packed for packed in signs], errors


@pytest.fixture(autouse=True)
def draws_in_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw as version 0.1.0, which used each random number r in two steps, as r and 1 - r."""
    draw = Birder._draw

    def old(self: Birder, info: Info, *stage: Any) -> Draw:
        found = draw(self, replace(info, step=info.step // 2), *stage)
        return Mirrored(found.seed, found.inner) if info.step % 2 else found

    monkeypatch.setattr(Birder, "_draw", old)


def folder_of(kind: Kind) -> Path:
    return SAVED / next(name for name, other in KINDS.items() if other is kind)


def resumed(kind: Kind, folder: Path, ranks: int = 0) -> World:
    world = new_world(kind, ranks)
    on_all(owners(world), lambda owner: load_state(folder, only=[owner]))
    return world


def ranks_files(folder: Path) -> list[Arrays]:
    """Return the files that each rank has saved."""
    found = []
    for path in sorted(folder.rglob("rank-*.npz")):
        with np.load(path) as file:
            found.append({key: file[key] for key in file})
    return found


CLOSE = {"rtol": 1e-4, "atol": 1e-5}
"""Results were saved on another processor, whose matrix products round differently."""


def same(found: np.ndarray, wanted: np.ndarray) -> bool:
    return np.allclose(found, wanted, equal_nan=True, **CLOSE)


@by_kind
def test_gradients_go_on_as_if_never_stopped(kind: Kind) -> None:
    found = go_on(resumed(kind, folder_of(kind)), kind, kind.stop, MORE)
    np.testing.assert_allclose(found, results(folder_of(kind)), **CLOSE)


@pytest.mark.parametrize("name", ["accordion", "qsgd", "birder"])
def test_tensors_may_have_other_names_now(name: str) -> None:
    """A loaded Keras model may have new names of variables; random numbers depend on the old."""
    kind = replace(KINDS[name], within="net/")
    found = go_on(resumed(kind, SAVED / name), kind, kind.stop, MORE)
    np.testing.assert_allclose(found, results(SAVED / name), **CLOSE)


def altered(folder: Path, rank: int, key: str, into: Path) -> None:
    """Copy a checkpoint and change one of its arrays."""
    shutil.copytree(folder, into, dirs_exist_ok=True)
    arrays, path = ranks_files(folder)[rank], sorted(into.glob("rank-*.npz"))[rank]
    x = arrays[key]
    other = x + 1 + np.cos(np.arange(x.size)).reshape(x.shape)
    np.savez(path, **arrays | {key: other.astype(x.dtype)})


@by_kind
def test_nothing_is_lost_when_it_is_saved_again(kind: Kind, tmp_path: Path) -> None:
    folder, world = folder_of(kind), resumed(kind, folder_of(kind))
    on_all(owners(world), lambda owner: save_state(tmp_path, only=[owner]))
    for ours, theirs in zip(ranks_files(tmp_path), ranks_files(folder), strict=True):
        for key, x in theirs.items():
            name = key.replace("/seen", "/kept/gradients")
            np.testing.assert_array_equal(ours[name], x, err_msg=key)
    ours, theirs = (
        json.loads((at / "manifest.json").read_text())["exchanges"]
        for at in (tmp_path / "state-00001", folder)
    )
    assert known(ours, theirs, kind.unused) == known(theirs, theirs, kind.unused)


def known(found: Any, old: Any, unused: Sequence[str]) -> Any:
    """Return `found` without keys in `unused` and those that `old`, of an older version, lacks.

    The "sum" of a row about the end of a warm-up is the sum of that step's norms. It is no longer
    saved.
    """
    if isinstance(old, dict):
        unused = (*unused, "sum")
        return {key: known(found[key], x, unused) for key, x in old.items() if key not in unused}
    if isinstance(old, list):
        return [known(one, x, unused) for one, x in zip(found, old, strict=True)]
    return found


@by_kind
def test_every_array_matters(kind: Kind, tmp_path: Path) -> None:
    """A change of any array of a checkpoint changes the next steps, so all arrays are loaded."""
    folder = folder_of(kind)
    for rank, arrays in enumerate(ranks_files(folder)):
        for key in arrays:
            altered(folder, rank, key, tmp_path)
            found = go_on(resumed(kind, tmp_path), kind, kind.stop, MORE)
            noticed = not same(found, results(folder))
            assert noticed != key.endswith(kind.unused or "never"), (rank, key)


# ------------------------------------------------------------------------- another number of ranks
@pytest.mark.parametrize("ranks", [1, 3, 4])
@pytest.mark.parametrize("name", ["owed", "two_level_owed"])
def test_others_pay_what_all_have_owed(name: str, ranks: int) -> None:
    """With another number of ranks and gradients of zero, the next mean contains all residuals."""
    kind, folder = KINDS[name], SAVED / name
    world = resumed(kind, folder, ranks)
    carried = np.sum([arrays["0/0/owed"] for arrays in ranks_files(folder)], 0)
    nothing = {name: np.zeros(shape, np.float32) for name, shape in kind.shapes.items()}
    for means in world.step([copy.deepcopy(nothing) for _ in range(ranks)], LR):
        assert means is not None and np.abs(carried).max() > 0.1
        np.testing.assert_allclose(means["w"], carried.reshape(32, 32) / ranks, atol=1e-6)


@pytest.mark.parametrize("ranks", [1, 3, 4])
@pytest.mark.parametrize("name", ["topk", "ef_signsgd", "powersgd", "accordion"])
def test_others_keep_the_sum_of_the_residuals(name: str, ranks: int) -> None:
    """With another number of ranks, means and remaining residuals add up to those loaded."""
    kind, folder = KINDS[name], SAVED / name
    world = resumed(kind, folder, ranks)
    carried = np.sum([arrays["0/0/state/error"] for arrays in ranks_files(folder)], 0)
    nothing = {name: np.zeros(shape, np.float32) for name, shape in kind.shapes.items()}
    came = np.zeros((32, 32))
    for _ in range(30):
        means = world.step([copy.deepcopy(nothing) for _ in range(ranks)], LR)[0]
        assert means is not None and np.abs(carried).max() > 0.1
        came += means["w"]
    found = ranks * came + residuals(world).reshape(32, 32)
    np.testing.assert_allclose(found, carried.reshape(32, 32), atol=1e-4)


# --------------------------------------------------------------------------------- what is averaged
def model_of(folder: Path) -> Arrays:
    """Return the model of all ranks at the time of the checkpoint."""
    with np.load(folder / "expected.npz") as file:
        return {name: file[f"model/{name}"] for name in SHAPES}


def trained(name: str, folder: Path) -> np.ndarray:
    """Return the models of ranks that continue from a checkpoint."""
    ranks = averagers(name)
    for averager in ranks:
        averager.parameters.arrays = model_of(SAVED / name)
    on_all(ranks, lambda averager: load_state(folder, only=[averager]))
    return np.array(on_all(ranks, lambda averager: train(averager, STOP, MORE)))


@by_method
def test_models_go_on_as_if_never_stopped(name: str) -> None:
    wanted = results(SAVED / name)
    np.testing.assert_allclose(trained(name, SAVED / name), wanted, **CLOSE)


@by_method
def test_every_array_of_an_average_matters(name: str, tmp_path: Path) -> None:
    for rank, arrays in enumerate(ranks_files(SAVED / name)):
        for key in arrays:
            altered(SAVED / name, rank, key, tmp_path)
            assert not same(trained(name, tmp_path), results(SAVED / name)), (rank, key)


def test_periods_of_averages_go_on(tmp_path: Path) -> None:
    shutil.copytree(SAVED / "local_sgd", tmp_path, dirs_exist_ok=True)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    manifest["exchanges"][0]["steps"] += 1
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    assert not same(trained("local_sgd", tmp_path), results(SAVED / "local_sgd"))


def test_others_keep_what_ranks_had_in_common() -> None:
    ranks, kept = averagers("diloco", 3), ranks_files(SAVED / "diloco")[0]
    for averager in ranks:
        averager.parameters.arrays = model_of(SAVED / "diloco")
    on_all(ranks, lambda averager: load_state(SAVED / "diloco", only=[averager]))
    on_all(ranks, lambda averager: averager.prepare())
    for averager in ranks:
        (state,) = averager.state()["states"]
        assert np.array_equal(state["velocity"], kept["0/0/velocity"])
        assert not state["compressor/error"].any()


# ------------------------------------------------------------------------------------------ privacy
def private() -> Kind:
    return Kind(lambda: TopAgg(7, None, 30.0, budget=PrivacyBudget(8.0, 1e-5)), stop=4)


@pytest.mark.parametrize("ranks", [2, 3])
def test_budgets_remember_what_was_spent(ranks: int) -> None:
    folder = SAVED / "budget"
    world = resumed(private(), folder, ranks)
    with np.load(folder / "expected.npz") as file:
        for exchange in world.exchanges:
            spent = exchange.stats()["privacy"]
            assert spent["releases"] == 4 and spent["epsilon"] == pytest.approx(file["epsilon"])
