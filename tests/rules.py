"""The table of optimizers: one row each, with an independent implementation of what it computes.

A new optimizer is one row here; `test_optimizers.py` does the rest. The oracles know one tensor,
as a vector in fp64, and all ranks at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from accordion_hvd.optimizers import (
    Adam,
    AMSGrad,
    Lamb,
    OnebitAdam,
    OnebitLamb,
    Rule,
    ZeroOneAdam,
)

Array = np.ndarray
Rounds = list[tuple[str, int]]


@dataclass(frozen=True)
class Row:
    """What is claimed of a rule, in the stage that it is itself.

    Attributes:
        rule: the configuration.
        oracle: given the number of ranks and of elements, something with
            `step(gradients (ranks, elements), lr) -> direction (elements,)`; of rules that read
            weights, it is told these (`weights`, (ranks, elements)) before; of rules that assign
            them, it gives the new ones instead.
        rounds: of elements, ranks and an item's size in bytes: what a rank hands over in a step,
            as (collective, bytes).
        discrete: rounding may turn a sign, so that fp32 trajectories part after some steps.
        moments: keys of the state that go along when the stage changes.
    """

    rule: Rule
    oracle: Callable[[int, int], Any]
    rounds: Callable[[int, int, int], Rounds]
    discrete: bool = False
    moments: tuple[str, ...] = ("m", "v", "count")

    @property
    def name(self) -> str:
        return repr(self.rule)


@dataclass
class AdamOracle:
    """Adam and AMSGrad, of the ranks' mean."""

    ranks: int
    size: int
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    correct: bool = True
    amsgrad: bool = False
    steps: int = 0
    m: Any = 0.0
    v: Any = 0.0
    vmax: Any = 0.0
    frozen: int = field(default=0)  # steps after which v stays

    def step(self, gradients: Array, lr: float) -> Array:
        self.steps += 1
        mean = gradients.mean(0)
        self.m = self.betas[0] * self.m + (1 - self.betas[0]) * mean
        self.v = self.betas[1] * self.v + (1 - self.betas[1]) * mean**2
        self.frozen = self.steps
        self.vmax = np.maximum(self.vmax, self.v)
        return self.direction(self.vmax if self.amsgrad else self.v)

    def direction(self, v: Array) -> Array:
        first = 1 - self.betas[0] ** self.steps if self.correct else 1.0
        second = 1 - self.betas[1] ** self.frozen if self.correct else 1.0
        return (self.m / first) / (np.sqrt(v / second) + self.eps)


@dataclass
class OnebitOracle(AdamOracle):
    """Adam for three steps, then 1-bit Adam, with the server's chunks one after the other."""

    scale: str = "l2"
    dense: int = 3

    def __post_init__(self) -> None:
        self.length = 8 * math.ceil(self.size / (8 * self.ranks))
        self.workers = np.zeros((self.ranks, self.size))
        self.servers = np.zeros(self.size)

    def step(self, gradients: Array, lr: float) -> Array:
        if self.steps < self.dense:
            return super().step(gradients, lr)
        self.steps += 1
        fresh = self.betas[0] * self.m + (1 - self.betas[0]) * gradients
        self.m = self.average(fresh) if self.ranks > 1 else fresh[0]
        return np.where(self.v > 0, self.direction(self.v), 0.0)

    def average(self, fresh: Array) -> Array:
        total = fresh + self.workers
        sent = np.array([signed(x, self.scale) for x in total])
        self.workers = total - sent
        mine = sent.mean(0) + self.servers
        pieces = [mine[i : i + self.length] for i in range(0, self.size, self.length)]
        out = np.concatenate([signed(x, self.scale) for x in pieces])
        self.servers = mine - out
        return out


@dataclass
class LambOracle(OnebitOracle):
    """LAMB for `dense` steps; then 1-bit LAMB, equalised by a factor that must not matter."""

    decay: float = 0.0
    weights: Any = None
    k: float = 0.0
    known: float = 0.0
    last: float = 1.0
    equal: float = 3.7
    fresh: Any = None

    def step(self, gradients: Array, lr: float) -> Array:
        x, before = self.weights[0], self.m
        if self.steps < self.dense:
            whole = AdamOracle.step(self, gradients, lr) + self.decay * x
            norms = np.linalg.norm(x), np.linalg.norm(whole)
            c = min(max(norms[0] / norms[1], 0.01), 10.0) if min(norms) > 0 else 1.0
            if c != 1.0:
                self.k, self.known = 0.9 * self.k + 0.1 * c, 0.9 * self.known + 0.1
            return c * whole
        if self.fresh is None:
            self.fresh = self.v.copy()
        self.steps += 1
        local = (self.betas[0] * self.m + (1 - self.betas[0]) * gradients) * self.equal
        self.m = (self.average(local) if self.ranks > 1 else local[0]) / self.equal
        guess = (self.m - self.betas[0] * before) / (1 - self.betas[0])
        self.fresh = self.betas[1] * self.fresh + (1 - self.betas[1]) * guess**2
        part = np.where(self.v > 0, self.direction(self.v), 0.0)
        whole = part + self.decay * x
        share = min(1.0, np.linalg.norm(part) / np.linalg.norm(whole)) if self.decay else 1.0
        r = self.largest() * share + 1 - share
        r = min(max(r, 0.5), 4.0)
        self.last = min(max(r, 0.9 * self.last), 1.1 * self.last)
        return (self.k / self.known if self.correct else self.k) * self.last * whole

    def largest(self) -> float:
        old, new = self.v, self.fresh
        if self.correct:
            old = old / (1 - self.betas[1] ** self.frozen)
            new = new / (1 - self.betas[1] ** self.steps)
        return float(np.max(((np.sqrt(old) + self.eps) / (np.sqrt(new) + self.eps))[self.v > 0]))


@dataclass
class ZeroOneOracle(OnebitOracle):
    """0/1 Adam as the paper has it, with the schedules' counters of the reference."""

    freeze: int = 3
    kappa: int = 16
    scaler: int = 10**9
    clipper: int = 16
    decay: float = 0.0
    weights: Any = None
    anchor: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.interval, self.updates, self.local, self.counter = 1, 0, 1, 0
        self.u = np.zeros((self.ranks, self.size))
        self.span, self.updated, self.kept = 0.0, 0, 1.0
        self.log: list[str] = []

    def rest(self, lr: float) -> tuple[float, float, Array]:
        """The first correction, what weight decay leaves, and the denominator."""
        first = 1 / (1 - self.betas[0] ** self.steps) if self.correct else 1.0
        v = self.v / (1 - self.betas[1] ** self.updated) if self.correct else self.v
        return first, 1 - lr * self.decay, np.sqrt(v) + self.eps

    def step(self, gradients: Array, lr: float) -> Array:
        self.steps += 1
        if self.steps <= self.freeze:
            return self.together(gradients, lr)
        if self.steps == self.freeze + 1:
            self.workers[:], self.servers[:], self.anchor = 0, 0, self.weights[0]
            self.m = np.tile(self.m, (self.ranks, 1))
        self.m = self.betas[0] * self.m + (1 - self.betas[0]) * gradients
        first, left, root = self.rest(lr)
        x = left * self.weights - lr * first * self.m / root
        self.u = left * self.u + lr * first * self.m
        self.span, self.kept = left * self.span + lr * first, left * self.kept
        sync = (self.steps - self.freeze) % self.local == 0
        self.log.append("sync" if sync else "local")
        self.counter += 1
        if self.counter == self.scaler:
            self.counter, self.local = 0, min(2 * self.local, self.clipper)
        if sync and self.ranks > 1:
            total = self.average(self.u)
            self.anchor = self.kept * self.anchor - total / root
            x = np.tile(self.anchor, (self.ranks, 1))
            self.m = np.tile(total / self.span, (self.ranks, 1))
            self.u, self.span, self.kept = 0 * self.u, 0.0, 1.0
        return x

    def together(self, gradients: Array, lr: float) -> Array:
        exact = self.steps % self.interval == 0
        if exact or self.ranks == 1:
            mean = gradients.mean(0)
        else:
            mean = self.average(gradients)
        self.m = self.betas[0] * self.m + (1 - self.betas[0]) * mean
        if exact:
            self.v = self.betas[1] * self.v + (1 - self.betas[1]) * mean**2
            self.updated += 1
            self.updates += 1
            if self.updates == self.kappa:
                self.updates, self.interval = 0, 2 * self.interval
        self.log.append("exact" if exact else "signs")
        first, left, root = self.rest(lr)
        return left * self.weights - lr * first * self.m / root


def signed(x: Array, scale: str) -> Array:
    """The vector's signs times its scale."""
    size = np.linalg.norm(x) / math.sqrt(x.size) if scale == "l2" else np.abs(x).mean()
    return size * np.where(x >= 0, 1.0, -1.0)


def signs_rounds(size: int, ranks: int, itemsize: int) -> Rounds:
    """An alltoall and an allgather of packed signs, and a scale with each."""
    if ranks == 1:
        return []
    chunk = math.ceil(size / (8 * ranks))
    return [
        ("alltoall", ranks * chunk),
        ("allgather", itemsize),
        ("allgather", chunk),
        ("allgather", itemsize),
    ]


def dense_rounds(size: int, ranks: int, itemsize: int) -> Rounds:
    return [("allreduce", itemsize * size)]


def onebit(**options: Any) -> Row:
    def oracle(ranks: int, size: int) -> Any:
        made = OnebitOracle(ranks, size, correct=options.get("bias_correction", True))
        made.scale = options.get("scale", "l2")
        return made

    return Row(OnebitAdam(warmup_steps=3, **options), oracle, signs_rounds, discrete=True)


def lamb(**options: Any) -> Row:
    def oracle(ranks: int, size: int) -> Any:
        made = LambOracle(ranks, size, correct=options.get("bias_correction", True))
        made.scale = options.get("scale", "l2")
        return made

    moments = ("m", "v", "count", "coeff", "weight")
    rule = OnebitLamb(warmup_steps=3, **options)
    return Row(rule, oracle, signs_rounds, discrete=True, moments=moments)


def zero_one(**options: Any) -> Row:
    """The stage in which ranks step alike; `test_zero_one_adam.py` has the others."""

    def oracle(ranks: int, size: int) -> Any:
        made = ZeroOneOracle(ranks, size, correct=options.get("bias_correction", True))
        made.scale = options.get("scale", "l2")
        return made

    return Row(ZeroOneAdam(var_freeze_step=3, **options), oracle, signs_rounds, discrete=True)


ROWS = [
    Row(Adam(), AdamOracle, dense_rounds),
    Row(
        AMSGrad((0.8, 0.99), 1e-6, bias_correction=False),
        lambda *n: AdamOracle(*n, (0.8, 0.99), 1e-6, correct=False, amsgrad=True),
        dense_rounds,
        moments=("m", "v", "count", "vmax"),
    ),
    Row(AMSGrad(), lambda *n: AdamOracle(*n, amsgrad=True), dense_rounds),
    onebit(),
    onebit(bias_correction=False, scale="l1"),
    Row(
        Lamb(),
        lambda *n: LambOracle(*n, dense=10**9),
        dense_rounds,
        moments=("m", "v", "count", "coeff", "weight"),
    ),
    lamb(),
    lamb(bias_correction=False, scale="l1"),
    zero_one(),
    zero_one(bias_correction=False, scale="l1"),
]
"""Every law of `test_optimizers.py` is checked for every row."""

REFUSED = [
    *[(Adam, "betas", bad) for bad in ((0.9,), (1, 0.9), (0.9, -0.1), 0.9, None, ("a", 0.9))],
    *[(AMSGrad, "eps", bad) for bad in (-1e-8, math.nan, "a", None, True)],
    *[(OnebitAdam, "warmup_steps", bad) for bad in (-1, 1.5, "soon", None, True)],
    *[(OnebitAdam, "scale", bad) for bad in ("max", 1, None)],
    *[(Lamb, "min_coeff", bad) for bad in (0, -1.0, math.inf, "a", None, True)],
    *[(Lamb, "max_coeff", bad) for bad in (0, 0.001, math.inf, "a", None)],
    *[(Lamb, "coeff_beta", bad) for bad in (1, -0.1, "a", None)],
    *[(OnebitLamb, "warmup_steps", bad) for bad in (0, -1, 1.5, "soon", None, True)],
    *[(OnebitLamb, "factor_min", bad) for bad in (0, -1, None)],
    *[(OnebitLamb, "factor_max", bad) for bad in (0.1, "a")],
    *[(OnebitLamb, "factor_threshold", bad) for bad in (0, 1, -0.1, None)],
    *[(OnebitLamb, "scale", bad) for bad in ("max", None)],
    *[
        (ZeroOneAdam, name, bad)
        for name in ("var_freeze_step", "var_update_scaler")
        for bad in (0, -1, 1.5, "auto", None, True)
    ],
    *[
        (ZeroOneAdam, name, bad)
        for name in ("local_step_scaler", "local_step_clipper")
        for bad in (0, 1.5, None)
    ],
    *[(ZeroOneAdam, "scale", bad) for bad in ("max", None)],
]
"""Hyper-parameters that must be refused: class, argument, value."""
