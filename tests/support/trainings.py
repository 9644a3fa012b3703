"""Trainings in one process, of each kind of state, that save a checkpoint and go on."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
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
from accordion_hvd.engine import checkpoint
from accordion_hvd.engine.averages import ModelParameters
from accordion_hvd.engine.checkpoint import save_state
from accordion_hvd.engine.guard import Guard
from accordion_hvd.engine.layout import TensorInfo
from accordion_hvd.engine.model_averager import ModelAverager
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
from accordion_hvd.policies import Policy
from accordion_hvd.simulation import one_process
from accordion_hvd.simulation.one_process import Hub, World

LR = 0.1
MORE = 6
"""Steps after a checkpoint."""

SHAPES = {"w": (32, 32), "small": (3, 3), "b": (4,)}
TWO = {"w": (32, 32), "v": (32, 32), "b": (4,)}
STOP = 4
"""Steps of trainings whose models were averaged, before they were saved."""

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Kind:
    """Configuration of a training.

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
    "powersgd_fp16": Kind(lambda: PowerSGD(2, wire="float16"), bad=2, unused=("/norm",)),
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

PRIVATE = Kind(lambda: TopAgg(7, None, 30.0, budget=PrivacyBudget(8.0, 1e-5)), stop=4)

METHODS = {
    "cold": lambda: COLD("ring", 0.5, TopK(0.5)),
    "diloco": lambda: DiLoCo(3, Nesterov(0.7, 0.9), TopK(0.2)),
    "dpsgd": lambda: DPSGD("ring"),
    "dyna_cold": lambda: DynaCOLD("ring", theta=0.6),
    "local_sgd": lambda: LocalSGD(3),
    "wagma": lambda: WAGMA(2, 4, wait_avoiding=False),
}


# ----------------------------------------------------------------------------- what ranks are given
def values(name: str, shape: tuple[int, ...], rank: int, step: int) -> np.ndarray:
    """Return values for a tensor; most rows of large matrices are zeros."""
    size = int(np.prod(shape))
    numbers = np.arange(size) + 31 * rank + 17 * step + 7 * len(name) + ord(name[0])
    found = ((numbers**3 + 5 * numbers) % 97 / 48.5 - 1).astype(np.float32).reshape(shape)
    if size >= 1024:
        found[np.arange(shape[0]) % 6 > 0] = 0
    return found * np.float32({"v": 2 ** (step // 2), "w": 4 if step > 8 else 1}.get(name, 1))


def digest(arrays: Mapping[str, np.ndarray] | None) -> np.ndarray:
    """Return 60 numbers that distinguish results from each other; NaN if there is no result."""
    if arrays is None:
        return np.full(60, np.nan)
    flat = np.concatenate([arrays[name].reshape(-1) for name in sorted(arrays)]).astype(float)
    weighed = flat * np.cos(np.arange(flat.size))
    return np.concatenate([[np.linalg.norm(flat), weighed.sum()], np.resize(flat, 58 * 5)[::5]])


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


# ------------------------------------------------------------------------------------------ gradien
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


def held(exchange: Any) -> str:
    """Return all that an exchange holds, as text that shows any change."""
    snapshot = checkpoint.snapshot(exchange)
    tensors = {k: hashlib.blake2b(x.tobytes()).hexdigest() for k, x in snapshot["tensors"].items()}
    levels = [(s.level, s.name, s.served_from, sorted(s.inactive)) for s in exchange.bucket_states]
    return repr((snapshot["about"], exchange.policy.observers.weight, tensors, levels))


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
    kinds = ("norm", "ratio", "level", "step", "window", "lr", "previous_lr")
    return [len(history), *(sum(_number(row.get(kind)) for row in history) for kind in kinds)]


def _number(x: float | None) -> float:
    return 0.0 if x is None or math.isnan(x) else x


def save_gradients(kind: Kind, folder: Path) -> World:
    """Train, save a checkpoint and return the ranks, which may go on."""
    world = new_world(kind)
    go_on(world, kind, 0, kind.stop)
    on_all(owners(world), lambda owner: save_state(folder, only=[owner]))
    return world


# ------------------------------------------------------------------------------------------- models
class Model(ModelParameters):
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
        found.append(
            ModelAverager(METHODS[name](), Model(), lambda _, link=link: link, Guard("off"))
        )
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


def save_models(name: str, folder: Path) -> list[ModelAverager]:
    """Train, save a checkpoint of the averaged model and return the ranks, which may go on."""
    ranks = averagers(name)
    on_all(ranks, lambda averager: train(averager, 0, STOP))
    on_all(ranks, lambda averager: averager.average_now())
    on_all(ranks, lambda averager: save_state(folder, only=[averager]))
    return ranks


def on_all(ranks: Sequence[Any], action: Callable[[Any], Any]) -> list[Any]:
    """Run an action on all ranks, which are threads; return its results."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(action, ranks))
