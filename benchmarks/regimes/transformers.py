"""Trainings of Transformers with AdamW on ranks that are simulated in one process.

They are for docs/transformers.md (`make bench-transformers`). The text is WikiText-2's validation
and test part, byte by byte, of which every tenth block of 8 KiB is held out.
"""

from __future__ import annotations

import copy
import functools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from accordion_hvd import (
    DGC,
    FP16,
    QSGD,
    Accordion,
    Dense,
    DiLoCo,
    Displacement,
    DoubleSqueeze,
    EFSignSGD,
    Fixed,
    Int8,
    LocalSGD,
    PowerSGD,
    TopK,
    simulate,
)
from accordion_hvd.averaging.base import Averaging
from accordion_hvd.core.base import Compressor, Info
from accordion_hvd.ops import torch as xp
from accordion_hvd.optimizers import Birder, OnebitAdam, UpdateRule
from accordion_hvd.policies import Policy
from accordion_hvd.policies.cost_model import bytes_sent
from accordion_hvd.simulation.one_process import Hub, SimulatedCommunicator, lockstep
from accordion_hvd.torch.reducer import gain_of
from benchmarks.optbench.tasks import LENGTH, Characters
from examples.data.text import load_tinyshakespeare, load_wikitext2
from examples.schedule import cosine

RANKS = 4
BATCH = 8
"""Pieces of `LENGTH` bytes per rank and step."""

BETAS, DECAY, WARMUP, CLIP = (0.9, 0.95), 0.1, 1 / 6, 1.0
"""Settings of AdamW; the fraction of all steps in which the rate rises; the largest norm."""

BLOCK, HELD = 8192, 10
"""Bytes of a block of text; number of blocks of which the last one is held out."""

JUDGED = 256
"""Pieces of the text that is held out on which the loss is measured."""

WINDOWS = 20
"""Windows of a training in which policies decide."""

AFTER = 4
"""Part of the steps of a training that its model is then trained on a second text."""

Batch = tuple[torch.Tensor, torch.Tensor]


# --- methods ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Method:
    """A kind of exchange, and how its tuning begins.

    Attributes:
        make: returns a compressor or policy (ranks exchange gradients for AdamW), an update rule
            (which takes the place of AdamW), or a model averaging (AdamW is local), given the
            number of steps of the training and the shapes of the tensors by name.
        rate: learning rate at which tuning starts.
        skip: name patterns of tensors that are exchanged without compression.
    """

    make: Callable[[int, Mapping[str, tuple[int, ...]]], Any]
    rate: float = 8e-3
    skip: tuple[str, ...] = ()


def _fixed(compressor: Compressor, **more: Any) -> Method:
    return Method(lambda steps, shapes: Fixed(compressor), **more)


def _local(method: Averaging) -> Method:
    return Method(lambda steps, shapes: method, 2e-3)


def _between(policy: Any, low: Compressor, high: Compressor, **more: Any) -> Method:
    return Method(lambda steps, shapes: policy(low=low, high=high, window=steps // WINDOWS, **more))


def _by_layer(fraction: float) -> Method:
    """Return PowerSGD whose ranks compress all matrices alike: a fraction of nm / (n + m)."""

    def make(steps: int, shapes: Mapping[str, tuple[int, ...]]) -> Policy:
        matrices = {name: shape for name, shape in shapes.items() if len(shape) == 2}
        ranks = {name: fraction * n * m / (n + m) for name, (n, m) in matrices.items()}
        chosen = {name: _half(max(1, round(rank))) for name, rank in ranks.items()}
        return Fixed(Dense(), overrides=chosen)

    return Method(make)


def _half(rank: int) -> PowerSGD:
    return PowerSGD(rank, wire="float16")


_RANKS = (4, 8, 16, 32, 64)
_MATRICES_ALONE = ("letters*", "places*", "head*")

METHODS: dict[str, Method] = {
    "Dense": _fixed(Dense()),
    "FP16": _fixed(FP16()),
    **{f"QSGD({bits}), gathered": _fixed(QSGD(bits)) for bits in (2, 3, 4, 8)},
    **{f"QSGD({bits}) in parts": _fixed(DoubleSqueeze(QSGD(bits))) for bits in (2, 3, 4, 8)},
    "QSGD(2) up, QSGD(4) down": _fixed(DoubleSqueeze(QSGD(2), mean=QSGD(4))),
    "Int8 in parts": _fixed(DoubleSqueeze(Int8())),
    "EFSignSGD in parts": _fixed(DoubleSqueeze(EFSignSGD()), rate=2e-3),
    **{f"PowerSGD({rank})": _fixed(PowerSGD(rank)) for rank in _RANKS},
    **{f"PowerSGD({rank}), fp16 factors": _fixed(_half(rank)) for rank in _RANKS},
    "PowerSGD(8), fp16 factors, embeddings and head left out": _fixed(
        _half(8), skip=_MATRICES_ALONE
    ),
    **{f"PowerSGD(nm / {x}(n + m)), fp16 factors": _by_layer(1 / x) for x in (8, 32)},
    "TopK(0.01)": _fixed(TopK(0.01), rate=1e-3),
    "DGC(0.01)": _fixed(DGC(0.01), rate=1e-3),
    "Accordion(16, 4)": _between(Accordion, PowerSGD(16), PowerSGD(4), interval=1),
    "Accordion(4, 1)": _between(Accordion, PowerSGD(4), PowerSGD(1), interval=1),
    "Accordion(16, 4), fp16 factors": _between(Accordion, _half(16), _half(4), interval=1),
    "Displacement(16, 4), fp16 factors": _between(Displacement, _half(16), _half(4)),
    "OnebitAdam": Method(lambda steps, shapes: OnebitAdam(BETAS), 2e-3),
    "Birder": Method(lambda steps, shapes: Birder(), 1e-3),
    **{f"LocalSGD({period})": _local(LocalSGD(period)) for period in (2, 5, 10)},
    **{f"DiLoCo({period})": _local(DiLoCo(period)) for period in (10, 30, 100)},
    "DiLoCo(30), QSGD(2)": _local(DiLoCo(30, compressor=DoubleSqueeze(QSGD(2)))),
    "DiLoCo(30), QSGD(4)": _local(DiLoCo(30, compressor=DoubleSqueeze(QSGD(4)))),
    "DiLoCo(30), PowerSGD(32)": _local(DiLoCo(30, compressor=PowerSGD(32))),
}
"""Methods by their name on the page."""


# --- bytes ------------------------------------------------------------------------------


@functools.cache
def _sent(compressor: Compressor, shape: tuple[int, ...], ranks: int) -> float:
    return bytes_sent(compressor, shape, "float32", ranks)


@dataclass
class Bytes:
    """The bytes that a rank sends, for any number of ranks.

    Attributes:
        uses: compressor and shape -> number of steps.
    """

    uses: Counter[tuple[Compressor, tuple[int, ...]]] = field(default_factory=Counter)

    def on(self, ranks: int) -> float:
        """Return the bytes that a rank sends if `ranks` ranks take part."""
        return sum(_sent(*use, ranks) * steps for use, steps in self.uses.items())


# --- teams of ranks ---------------------------------------------------------------------


def adamw(model: nn.Module, lr: float) -> torch.optim.AdamW:
    """Return AdamW, with weight decay for matrices only."""
    matrices = [x for x in model.parameters() if x.ndim > 1]
    others = [x for x in model.parameters() if x.ndim < 2]
    groups = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr, BETAS, weight_decay=DECAY)


def _set(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


class Gradients:
    """Ranks that exchange gradients, for AdamW or for an update rule that takes its place."""

    def __init__(self, method: Method, steps: int, model: nn.Module) -> None:
        self.model, self.optimizer = model, adamw(model, 0.0)
        self.group = {x: g for g in self.optimizer.param_groups for x in g["params"]}
        shapes = {name: tuple(x.shape) for name, x in model.named_parameters()}
        chosen = method.make(steps, shapes)
        self.rule = chosen if isinstance(chosen, UpdateRule) else None
        self.world = simulate(chosen, RANKS, skip=method.skip, gain=self._gain)
        self.bytes = Bytes()

    def step(self, batches: Sequence[Batch], lr: float) -> None:
        """Take one step."""
        gradients = [_gradients(self.model, batch) for batch in batches]
        weights = {name: x.detach() for name, x in self.model.named_parameters()}
        mean = self.world.step(gradients, lr, [weights] * RANKS)[0]
        for entry in self.world.exchanges[0].bucket_states:
            self.bytes.uses[entry.compressor, tuple(entry.bucket.shape)] += 1
        if mean is None:
            return
        for name, x in self.model.named_parameters():
            x.grad = mean[name]
        if self.rule is None:
            nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
            _set(self.optimizer, lr)
            self.optimizer.step()
            return
        with torch.no_grad():
            for x, group in self.group.items():
                x.mul_(1 - lr * group["weight_decay"])
                x.copy_(x.grad) if self.rule.returns_weights else x.sub_(x.grad, alpha=lr)

    def _gain(self, name: str) -> float:
        x = self.model.get_parameter(name)
        return gain_of(self.group[x], self.optimizer.state.get(x, {}))


class Models:
    """Ranks that train models of their own and average these."""

    def __init__(self, method: Method, steps: int, model: nn.Module) -> None:
        self.averaging: Averaging = method.make(steps, {})
        self.models = [model, *(copy.deepcopy(model) for _ in range(1, RANKS))]
        self.optimizers = [adamw(each, 0.0) for each in self.models]
        hub = Hub(RANKS)
        self.ranks = [SimulatedCommunicator(hub, rank, xp) for rank in range(RANKS)]
        self.model, self.taken, self.bytes = model, 0, Bytes()
        self.states = {
            name: [self.averaging.start(x.detach().clone(), self._info(name))] * RANKS
            for name, x in model.named_parameters()
        }

    def step(self, batches: Sequence[Batch], lr: float) -> None:
        """Take one local step on each rank, and average if it is time."""
        for model, optimizer, batch in zip(self.models, self.optimizers, batches, strict=True):
            for x, grad in zip(model.parameters(), _gradients(model, batch).values(), strict=True):
                x.grad = grad
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            _set(optimizer, lr)
            optimizer.step()
        if self.averaging.equal(self.taken):
            for name in self.states:
                self._average(name)
        self.taken += 1

    @torch.no_grad()
    def _average(self, name: str) -> None:
        mine = [model.get_parameter(name) for model in self.models]
        pairs = zip(mine, self.states[name], strict=True)
        found = lockstep(
            self.ranks,
            [self.averaging.exchange(x.clone(), s, self._info(name)) for x, s in pairs],
        )
        self.states[name] = [state for _, state in found]
        for x, (new, _) in zip(mine, found, strict=True):
            x.copy_(new)
        sent = getattr(self.averaging, "compressor", None) or Dense()
        self.bytes.uses[sent, tuple(mine[0].shape)] += 1

    def _info(self, name: str) -> Info:
        return Info(step=self.taken, size=RANKS, name=name)


def _gradients(model: nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
    model.zero_grad(set_to_none=True)
    F.cross_entropy(model(batch[0]), batch[1]).backward()
    return {name: x.grad for name, x in model.named_parameters() if x.grad is not None}


# --- text -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Corpus:
    """Bytes of text: for training, and held out."""

    train: torch.Tensor
    held: torch.Tensor

    @classmethod
    def of(cls, text: np.ndarray) -> Corpus:
        """Hold out every tenth block."""
        blocks = [text[i : i + BLOCK] for i in range(0, len(text), BLOCK)]
        parts = [
            np.concatenate([b for i, b in enumerate(blocks) if (i % HELD == HELD - 1) == held])
            for held in (False, True)
        ]
        return cls(*(torch.from_numpy(part.astype(np.int64)) for part in parts))

    def draw(self, *seed: int) -> Batch:
        """Return a rank's batch of a step."""
        draw = np.random.default_rng(seed)
        return _pieces(self.train, draw.integers(0, len(self.train) - LENGTH, BATCH))

    @torch.no_grad()
    def loss(self, model: nn.Module) -> float:
        """Return the loss on what is held out, in nats per byte."""
        places = np.linspace(0, len(self.held) - LENGTH - 1, JUDGED).astype(int)
        inputs, wanted = _pieces(self.held, places)
        return float(F.cross_entropy(model(inputs), wanted))


def _pieces(text: torch.Tensor, places: Any) -> Batch:
    rows = torch.stack([text[i : i + LENGTH + 1] for i in places])
    return rows[:, :-1], rows[:, 1:]


@functools.cache
def corpora() -> tuple[Corpus, Corpus]:
    """Return the text of trainings, and the second text for their models."""
    second = load_tinyshakespeare()
    letters = np.frombuffer(second.alphabet.encode(), np.uint8)
    plays = np.concatenate([letters[second.train], letters[second.test]])
    return Corpus.of(load_wikitext2()), Corpus.of(plays)


# --- trainings --------------------------------------------------------------------------


@dataclass(frozen=True)
class Study:
    """A size of the network, and the length of a training.

    Attributes:
        width: width of the layers.
        depth: number of layers.
        steps: optimizer steps.
    """

    width: int
    depth: int
    steps: int

    def network(self) -> nn.Module:
        """Return a new network."""
        return Characters(256, self.width, self.depth)


STUDIES = {
    "small": Study(128, 2, 600),
    "small, longer": Study(128, 2, 2400),
    "larger": Study(256, 2, 600),
}
"""Studies by name; `small` has half a million parameters, `larger` two million."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result of a training; columns of docs/data/transformers.csv.

    Attributes:
        study: name of the study; with ", then plays", after training on a second text.
        optimizer: the optimizer that uses what the ranks exchange.
        method: name of the method.
        lr: the highest learning rate.
        seed: seed of weights and batches.
        steps: optimizer steps.
        held_out: loss on text that is held out, in nats per byte; infinite if it is not finite.
        fewer_4: bytes that Dense sends on 4 ranks, divided by the method's.
        fewer_64: the same on 64 ranks.
    """

    study: str
    optimizer: str
    method: str
    lr: float
    seed: int
    steps: int
    held_out: float
    fewer_4: float
    fewer_64: float


def train(study: str, method: str, lr: float, seed: int, steps: int) -> list[Outcome]:
    """Train on the first text, then on the second without compression; return both results."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    chosen, (first, second) = METHODS[method], corpora()
    model = STUDIES[study].network()
    averages = isinstance(chosen.make(steps, {}), Averaging)
    team = (Models if averages else Gradients)(chosen, steps, model)
    for step in range(steps):
        batches = [first.draw(seed, step, rank) for rank in range(RANKS)]
        team.step(batches, cosine(lr, step, steps, round(WARMUP * steps)))
    rule = getattr(team, "rule", None)
    dense = sum(_sent(Dense(), tuple(x.shape), 4) for x in model.parameters()) * steps
    many = sum(_sent(Dense(), tuple(x.shape), 64) for x in model.parameters()) * steps
    common: dict[str, Any] = {
        "optimizer": type(rule).__name__ if rule else "AdamW", "method": method, "lr": lr,
        "seed": seed, "fewer_4": dense / team.bytes.on(4), "fewer_64": many / team.bytes.on(64),
    }  # fmt: skip
    found = [Outcome(study=study, steps=steps, held_out=_finite(first.loss(model)), **common)]
    found.append(_after(study, second, model, seed, steps // AFTER, common))
    return found


def _after(
    study: str, text: Corpus, model: nn.Module, seed: int, steps: int, common: Mapping[str, Any]
) -> Outcome:
    """Train a model on another text, without compression and at one rate."""
    team = Gradients(METHODS["Dense"], steps, model)
    for step in range(steps):
        batches = [text.draw(seed, step, rank) for rank in range(RANKS)]
        team.step(batches, cosine(1e-3, step, steps, round(WARMUP * steps)))
    loss = _finite(text.loss(model))
    return Outcome(study=f"{study}, then plays", steps=steps, held_out=loss, **common)


def _finite(loss: float) -> float:
    return loss if math.isfinite(loss) else math.inf
