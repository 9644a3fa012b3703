"""The table of optimizers: one row for each configuration, with an independent implementation.

A new optimizer is one row here; `test_optimizers.py` does the rest. The independent implementation,
the oracle, computes one tensor, as a vector in fp64, for all ranks at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from accordion_hvd import DGC, FP16, Dense, ScaleCom, Threshold, TopK, TwoLevel
from accordion_hvd.ops import count_sketch, indices, namespace, quantization, random
from accordion_hvd.ops import numpy as xp
from accordion_hvd.optimizers import (
    Adam,
    AMSGrad,
    Birder,
    CDAdam,
    Lamb,
    OnebitAdam,
    OnebitLamb,
    SketchedAMSGrad,
    UpdateRule,
    ZeroOneAdam,
)
from accordion_hvd.resolve import as_policy

Array = np.ndarray
Rounds = list[tuple[str, int]]


@dataclass(frozen=True)
class Row:
    """The claims about one configuration of an update rule, in the rule's own stage.

    Attributes:
        rule: the configuration.
        oracle: function of the number of ranks and of elements that returns an object with
            `step(gradients (ranks, elements), lr) -> direction (elements,)`. If the rule reads
            weights, tests set its attribute `weights`, (ranks, elements), before each step. If the
            rule returns weights, `step` returns the new weights instead of a direction.
        rounds: function of the number of elements, the number of ranks and the item size in bytes
            that returns the collectives of a step as (name, bytes of one rank's tensor).
        discrete: rounding may flip a sign, so that fp32 trajectories diverge after some steps.
        moments: keys of the state that are copied when the stage changes.
        anew: the moments are set to zero when the dense stage ends.
        narrow: keys of the state that are fp32 for weights of every dtype.
        random: a tensor's random numbers depend on its name or on the tensors that share its call.
    """

    rule: UpdateRule
    oracle: Callable[[int, int], Any]
    rounds: Callable[[int, int, int], Rounds]
    discrete: bool = False
    moments: tuple[str, ...] = ("m", "v", "count")
    anew: bool = False
    narrow: tuple[str, ...] = ()
    random: bool = False

    @property
    def name(self) -> str:
        return repr(self.rule)

    @property
    def stage(self) -> int:
        """Return the rule's number among the stages of its own policy."""
        return as_policy(self.rule).levels("w").index(self.rule)


@dataclass
class AdamOracle:
    """Adam and AMSGrad on the mean of the ranks' gradients."""

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
    frozen: int = field(default=0)  # steps until the last update of v

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
    """Adam for `dense` steps, then 1-bit Adam with one server, which encodes chunk after chunk."""

    scale: str = "l2"
    floor: float = 0.0
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
        least = self.floor * self.v.mean() if self.ranks > 1 else 0.0
        return np.where(self.v > 0, self.direction(np.maximum(self.v, least)), 0.0)

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
class CDOracle(AdamOracle):
    """CD-Adam with one server, which stores the mean of the replicas and encodes chunk by chunk."""

    betas: tuple[float, float] = (0.9, 0.99)
    amsgrad: bool = True
    preconditioned: bool = False
    bits: int = 1
    silent: tuple[int, ...] = ()  # exchanges, counted from 0, that send nothing

    def __post_init__(self) -> None:
        self.length = 8 * math.ceil(self.size / (8 * self.ranks))
        self.replicas = np.zeros((self.ranks, self.size))
        self.mean, self.estimate = np.zeros(self.size), np.zeros(self.size)

    def step(self, gradients: Array, lr: float) -> Array:
        if self.ranks == 1:
            return super().step(gradients, lr)
        if self.steps not in self.silent:
            self.told(gradients)
        return super().step(self.estimate[None], lr)

    def told(self, gradients: Array) -> None:
        unit = self.unit()
        rests = (gradients - self.replicas) / unit
        sent = np.array([unit * coded(x, self.bits) for x in rests])
        self.replicas += sent
        self.mean += sent.mean(0)
        news = (self.mean - self.estimate) / unit
        pieces = [news[i : i + self.length] for i in range(0, self.size, self.length)]
        self.estimate += unit * np.concatenate([coded(x, self.bits) for x in pieces])

    def unit(self) -> Array:
        if not self.preconditioned:
            return np.ones(self.size)
        vmax = np.zeros(self.size) + self.vmax
        return np.sqrt(np.maximum(vmax, 1e-6 * vmax.mean()) + 1e-30)

    def direction(self, v: Array) -> Array:
        return super().direction(v) if self.correct else self.m / np.sqrt(v + self.eps)


@dataclass
class SlowOracle(CDOracle):
    """CD-Adam with a `replica_lr` below 1, which has error feedback for messages."""

    replica_lr: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        self.errors, self.carried = np.zeros((self.ranks, self.size)), np.zeros(self.size)

    def step(self, gradients: Array, lr: float) -> Array:
        if self.ranks == 1:
            return super().step(gradients, lr)
        if self.steps in self.silent:
            self.errors += gradients - self.replicas
            self.carried += self.mean - self.estimate
            return AdamOracle.step(self, self.estimate[None], lr)
        unit, shared = self.unit(), self.estimate
        wanted = gradients - self.replicas + self.errors
        sent = np.array([unit * coded(x, self.bits) for x in wanted / unit])
        news = (self.mean + sent.mean(0) - shared + self.carried) / unit
        pieces = [news[i : i + self.length] for i in range(0, self.size, self.length)]
        told = unit * np.concatenate([coded(x, self.bits) for x in pieces])
        self.errors, self.carried = wanted - sent, news * unit - told
        self.replicas = self.replicas + self.replica_lr * sent
        self.mean = self.mean + self.replica_lr * sent.mean(0)
        self.estimate = shared + self.replica_lr * told
        return AdamOracle.step(self, (shared + told)[None], lr)


@dataclass
class CDTopKOracle(CDOracle):
    """CD-Adam with top-k and no server: messages are fp32, and every rank computes their mean."""

    ratio: float = 0.1

    def told(self, gradients: Array) -> None:
        news = np.zeros(self.size, np.float32)
        for rank, gradient in enumerate(gradients.astype(np.float32)):
            rest = gradient - self.replicas[rank].astype(np.float32)
            index = np.argsort(-np.abs(rest))[: int(self.ratio * self.size)]
            news[index] += rest[index] / np.float32(self.ranks)
            rest[index] = 0
            self.replicas[rank] = gradient - rest
        self.estimate += news


@dataclass
class FlooredOracle:
    """AMSGrad on the mean of the ranks' gradients, with v and vmax that start at eps."""

    ranks: int
    size: int
    betas: tuple[float, float] = (0.9, 0.99)
    eps: float = 1e-8
    steps: int = 0

    def __post_init__(self) -> None:
        self.m, self.error = np.zeros((2, self.ranks, self.size))
        self.v = self.vmax = np.full(self.size, self.eps)
        self.lr = 0.0

    def step(self, gradients: Array, lr: float) -> Array:
        self.steps += 1
        self.m = self.betas[0] * self.m + (1 - self.betas[0]) * gradients
        self.advance(gradients.mean(0))
        return self.m.mean(0) / np.sqrt(self.vmax)

    def advance(self, gradient: Array) -> None:
        self.v = self.betas[1] * self.v + (1 - self.betas[1]) * gradient**2
        self.vmax = np.maximum(self.vmax, self.v)


@dataclass
class SketchedOracle(FlooredOracle):
    """SketchedAMSGrad: dense steps, then sketched steps.

    Residuals do not contain the learning rate here, so each step multiplies them by the ratio of
    the previous rate to the present one. The candidates depend on the fp32 rounding of the sketch,
    so the library's sketch computes them.
    """

    rule: SketchedAMSGrad = field(default_factory=SketchedAMSGrad)

    def step(self, gradients: Array, lr: float) -> Array:
        count = max(1, int(self.rule.ratio * self.size))
        columns = min(max(1, int(self.rule.columns * count)), self.size)
        asked = min(self.rule.candidates * count, self.size)
        whole = self.rule.rows * columns + 2 * asked >= self.size
        if self.ranks == 1 or whole or self.steps < self.rule.warmup_steps:
            return super().step(gradients, lr)
        self.m = self.betas[0] * self.m + (1 - self.betas[0]) * gradients
        p = self.m + (self.lr / lr) * self.error
        found = self.candidates(lr * p, columns, asked)
        self.steps += 1
        gathered = gradients + self.rule.bounded * (p - self.m)
        self.advance(np.where(np.isin(np.arange(self.size), found), gathered.mean(0), 0.0))
        worth = p.mean(0)[found] / np.sqrt(self.vmax[found])
        chosen = found[np.argsort(-np.abs(worth), kind="stable")[:count]]
        out = np.zeros(self.size)
        out[chosen] = p.mean(0)[chosen] / np.sqrt(self.vmax[chosen])
        self.error, self.lr = p, lr
        self.error[:, chosen] = 0
        return out

    def candidates(self, p: Array, columns: int, asked: int) -> Array:
        seed = random.key("sketch", "w", self.steps)
        codes = count_sketch.hashes(xp, self.size, self.rule.rows, columns, seed)
        tables = [xp.sketch(mine.astype(np.float32), codes, columns) for mine in p]
        mean = sum(tables[1:], tables[0]) / len(tables)
        estimates = xp.unsketch(mean, codes, np.zeros(self.size, np.float32))
        scores = np.abs(estimates) / np.sqrt(self.vmax.astype(np.float32))
        return np.sort(np.argsort(-scores, kind="stable")[:asked])


@dataclass
class LambOracle(OnebitOracle):
    """LAMB for `dense` steps, then 1-bit LAMB; the scale `equal` of messages must not matter."""

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
        least = self.floor * self.v.mean() if self.ranks > 1 else 0.0
        part = np.where(self.v > 0, self.direction(np.maximum(self.v, least)), 0.0)
        whole = part + self.decay * x
        share = min(1.0, np.linalg.norm(part) / np.linalg.norm(whole)) if self.decay else 1.0
        r = self.largest(least) * share + 1 - share
        r = min(max(r, 0.5), 4.0)
        self.last = min(max(r, 0.9 * self.last), 1.1 * self.last)
        return (self.k / self.known if self.correct else self.k) * self.last * whole

    def largest(self, least: float) -> float:
        old, new = np.maximum(self.v, least), np.maximum(self.fresh, least)
        if self.correct:
            old = old / (1 - self.betas[1] ** self.frozen)
            new = new / (1 - self.betas[1] ** self.steps)
        return float(np.max(((np.sqrt(old) + self.eps) / (np.sqrt(new) + self.eps))[self.v > 0]))


@dataclass
class ZeroOneOracle(OnebitOracle):
    """0/1 Adam as in the paper; its schedules use the counters of the reference implementation."""

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
        """Return the bias correction of m, the factor of weight decay, and the denominator."""
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
    """Return the signs of a vector times its scale."""
    size = np.linalg.norm(x) / math.sqrt(x.size) if scale == "l2" else np.abs(x).mean()
    return size * np.where(x >= 0, 1.0, -1.0)


def coded(x: Array, bits: int) -> Array:
    """Return the scaled signs of a vector; with two bits, the signs with one of two magnitudes."""
    if bits == 1:
        return signed(x, "l1")
    large = np.abs(x) >= 1.2 * np.abs(x).mean()
    means = [np.abs(x[part]).mean() if part.any() else 0.0 for part in (large, ~large)]
    return np.where(large, *means) * np.where(x >= 0, 1.0, -1.0)


def signs_rounds(size: int, ranks: int, itemsize: int) -> Rounds:
    """Return the collectives of packed signs: an alltoall, an allgather, and a scale for each."""
    if ranks == 1:
        return []
    chunk = math.ceil(size / (8 * ranks))
    return [
        ("alltoall", ranks * chunk),
        ("allgather", itemsize),
        ("allgather", chunk),
        ("allgather", itemsize),
    ]


@dataclass
class BirderOracle:
    """Birder on hosts of `local` ranks each, for the tensor "w"."""

    ranks: int
    size: int
    rule: Birder
    local: int = 1
    steps: int = 0
    silent: Callable[[int], bool] = lambda step: False

    def __post_init__(self) -> None:
        self.m, self.b, self.errors = np.zeros((3, self.ranks, self.size))
        self.owners, self.hosts = np.zeros(self.size), np.zeros((self.ranks, 8 * self.size + 64))
        self.length = 8 * math.ceil(self.size / (8 * self.ranks))

    def step(self, gradients: Array, lr: float) -> Array:
        self.m = self.rule.beta * self.m + (1 - self.rule.beta) * gradients
        slow = self.rule.beta if self.rule.beta_b is None else self.rule.beta_b
        self.b = np.maximum(slow * self.b + (1 - slow) * np.abs(gradients), np.abs(self.m))
        u = np.where(self.b > 0, self.m / np.where(self.b > 0, self.b, 1), 0)
        direction = u.mean(0) if self.rule.exact else self.chosen(u)
        self.steps += 1
        return direction

    def chosen(self, u: Array) -> Array:
        if self.ranks == 1:
            return self.fed(u[0], self.errors[0], 0, "owner", self.ranks)
        if self.silent(self.steps):
            return np.zeros(self.size)
        if self.rule.within == "half" and self.local > 1:
            sent = u.astype(np.float16).astype(float)
        else:
            pairs = enumerate(zip(u, self.errors, strict=True))
            sent = np.array([self.fed(x, error, rank, "worker") for rank, (x, error) in pairs])
        out, self.later = np.empty(self.size), self.hosts.copy()
        for owner in range(self.ranks):
            mine = slice(owner * self.length, (owner + 1) * self.length)
            mean = self.of_machines(sent, owner)[mine] if self.local > 1 else sent[:, mine].mean(0)
            out[mine] = self.fed(mean, self.owners[mine], owner, "owner", self.ranks)
        self.hosts = self.later
        return out

    def of_machines(self, sent: Array, owner: int) -> Array:
        """Return the mean that a chunk's owner receives from all hosts; only its chunk is valid."""
        means = sent.reshape(-1, self.local, self.size).mean(1)
        if len(means) == 1:
            return means[0]
        peers = [k * self.local + owner % self.local for k in range(len(means))]
        where = np.concatenate([np.arange(p * self.length, (p + 1) * self.length) for p in peers])
        total = np.zeros(self.ranks * self.length)
        for mean, peer in zip(means, peers, strict=True):
            padded = np.zeros(total.size)
            padded[: self.size] = mean
            error = self.hosts[peer][where]
            total[where] += self.fed(padded[where], error, peer, "machine", self.local)
            self.later[peer][where] = error
        return total[: self.size] / len(means)

    def fed(self, u: Array, error: Array, rank: int, stage: str, ranks: int = 1) -> Array:
        """Return a draw of `u`, with feedback of `u` + `error`; update `error` in place."""
        wanted = u + (error if self.rule.feedback else 0.0)
        sent = self.drawn(wanted, rank, stage, ranks)
        error[:] = wanted - sent
        return sent

    def drawn(self, u: Array, rank: int, stage: str, ranks: int) -> Array:
        """Return a random one of the two levels next to `u`, which is a mean over `ranks` ranks."""
        r = numbers(u.size, random.key("birder", "w", self.steps, rank, stage))
        levels = birder_levels(self.rule, ranks)
        u = np.clip(u, -1, 1)
        above = np.clip(np.searchsorted(levels, u, "right"), 1, len(levels) - 1)
        low, high = levels[above - 1], levels[above]
        return np.where(r > (high - u) / (high - low), high, low)


def birder_levels(rule: Birder, ranks: int) -> Array:
    """Return the possible values of a draw for a mean over `ranks` ranks."""
    if rule.bits <= 1:
        return np.array([-1.0, 1.0])
    noise = min(0.5, ((1 - rule.beta) / (1 + rule.beta)) ** 0.5)
    inner = round(4096 * noise / ranks**0.5) / 4096
    return np.array([-1, -inner, inner, 1])


def numbers(count: int, seed: int) -> Array:
    """Return `count` random numbers in (0, 1) for a seed."""
    window = quantization.WINDOW
    if not count:
        return np.zeros(0)
    begins = random.words(namespace(np.zeros(1)), -(-count // window), seed) % quantization.TABLE
    return np.concatenate([quantization.table()[i : i + window] for i in begins])[:count]


def birder_rounds(rule: Birder, local: int = 1) -> Callable[[int, int, int], Rounds]:
    """Return the function `rounds` of a row, for hosts of `local` ranks."""

    def rounds(size: int, ranks: int, itemsize: int) -> Rounds:
        if rule.exact or ranks == 1:
            return dense_rounds(size, ranks, itemsize) if rule.exact else []
        chunk, machines = math.ceil(size / (8 * ranks)), ranks // local
        near = ranks * chunk * (16 if rule.within == "half" else 1)
        inside = [("alltoall", near), ("allgather", machines * chunk)] if local > 1 else []
        outside = [("alltoall", machines * chunk), ("allgather", chunk)] if machines > 1 else []
        once = 1 if rule.within == "half" and local > 1 else rule.bits
        rounds = [(name, rule.bits * sent) for name, sent in inside + outside]
        return [(rounds[0][0], rounds[0][1] // rule.bits * once), *rounds[1:]]

    return rounds


def birder(rule: Birder) -> Row:
    discrete = not rule.exact
    return Row(
        rule,
        lambda *n: BirderOracle(*n, rule),
        birder_rounds(rule),
        discrete=discrete,
        moments=("m", "b"),
        random=discrete,
    )


def dense_rounds(size: int, ranks: int, itemsize: int) -> Rounds:
    return [("allreduce", itemsize * size)]


def onebit(**options: Any) -> Row:
    def oracle(ranks: int, size: int) -> Any:
        made = OnebitOracle(ranks, size, correct=options.get("bias_correction", True))
        made.scale, made.floor = options.get("scale", "l2"), options.get("floor", 0.0)
        return made

    return Row(OnebitAdam(warmup_steps=3, **options), oracle, signs_rounds, discrete=True)


def cd_adam(**options: Any) -> Row:
    bits = options.get("bits", 1)

    def oracle(ranks: int, size: int) -> Any:
        kind = CDTopKOracle if "compressor" in options else CDOracle
        kind = SlowOracle if "replica_lr" in options else kind
        correct = options.get("bias_correction", True)
        made = kind(ranks, size, eps=options.get("eps", 1e-8), correct=correct)
        made.preconditioned, made.bits = options.get("preconditioned", False), bits
        made.replica_lr = options.get("replica_lr", 1)
        return made

    def all_rounds(size: int, ranks: int, itemsize: int) -> Rounds:
        return [(name, bits * sent) for name, sent in signs_rounds(size, ranks, itemsize)]

    def chosen_rounds(size: int, ranks: int, itemsize: int) -> Rounds:
        count = int(0.1 * size)
        payload = 4 * count + indices.packed_length(count, size)
        return [("allgather", payload)] if ranks > 1 else []

    sparse = "compressor" in options
    return Row(
        CDAdam(**options),
        oracle,
        chosen_rounds if sparse else all_rounds,
        discrete=True,
        moments=("m", "v", "count", "vmax"),
        anew=True,
        narrow=("error",) if sparse else (),
    )


def sketched(**options: Any) -> Row:
    """Return a row of `SketchedAMSGrad`.

    `rounds` omits the library's limits of columns and candidates, which do not matter for the 1161
    elements in `test_optimizers.py`.
    """
    rule = SketchedAMSGrad(**{"warmup_steps": 3, "eps": 1e-4} | options)

    def rounds(size: int, ranks: int, itemsize: int) -> Rounds:
        k = max(1, int(rule.ratio * size))
        table, asked = rule.rows * int(rule.columns * k), 2 * rule.candidates * k
        if ranks == 1 or table + asked >= size:
            return dense_rounds(size, ranks, itemsize)
        return [("allreduce", 4 * table), ("allreduce", itemsize * asked)]

    def oracle(ranks: int, size: int) -> SketchedOracle:
        return SketchedOracle(ranks, size, rule.betas, rule.eps, rule=rule)

    moments = ("m", "v", "vmax", "count")
    return Row(rule, oracle, rounds, discrete=True, moments=moments, random=True)


def lamb(**options: Any) -> Row:
    def oracle(ranks: int, size: int) -> Any:
        made = LambOracle(ranks, size, correct=options.get("bias_correction", True))
        made.scale, made.floor = options.get("scale", "l2"), options.get("floor", 0.0)
        return made

    moments = ("m", "v", "count", "coeff", "weight")
    rule = OnebitLamb(warmup_steps=3, **options)
    return Row(rule, oracle, signs_rounds, discrete=True, moments=moments)


def zero_one(**options: Any) -> Row:
    """Return a row of `ZeroOneAdam` without local steps; `test_zero_one_adam.py` tests these."""

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
    onebit(floor=0.7),
    cd_adam(),
    cd_adam(bias_correction=False, eps=1e-4),
    cd_adam(preconditioned=True),
    cd_adam(bits=2),
    cd_adam(preconditioned=True, bits=2),
    cd_adam(replica_lr=0.1),
    cd_adam(preconditioned=True, bits=2, replica_lr=0.5),
    cd_adam(compressor=TopK(0.1)),
    sketched(ratio=0.02, columns=3.0, candidates=4),
    sketched(ratio=0.05, columns=2.0, candidates=1, rows=3, betas=(0.8, 0.9), warmup_steps=0),
    sketched(ratio=0.02, columns=3.0, candidates=4, bounded=True),
    sketched(ratio=1.0),
    birder(Birder()),
    birder(Birder(0.0, within="half", feedback=True)),
    birder(Birder().dense()),
    birder(Birder(bits=2)),
    birder(Birder(0.9, beta_b=0.99, bits=2, feedback=True)),
    Row(
        Lamb(),
        lambda *n: LambOracle(*n, dense=10**9),
        dense_rounds,
        moments=("m", "v", "count", "coeff", "weight"),
    ),
    lamb(),
    lamb(bias_correction=False, scale="l1"),
    lamb(floor=0.7),
    zero_one(),
    zero_one(bias_correction=False, scale="l1"),
]
"""Every law of `test_optimizers.py` is checked for every row."""

REFUSED = [
    *[(Adam, "betas", bad) for bad in ((0.9,), (1, 0.9), (0.9, -0.1), 0.9, None, ("a", 0.9))],
    *[(AMSGrad, "eps", bad) for bad in (-1e-8, math.nan, "a", None, True)],
    *[(OnebitAdam, "warmup_steps", bad) for bad in (-1, 0, 1.5, "soon", None, True)],
    *[(Birder, "beta", bad) for bad in (1, -0.1, math.nan, "a", None, True, (0.9,))],
    *[(Birder, "beta_b", bad) for bad in (0.9, 1, math.nan, "a", True)],
    *[(Birder, "within", bad) for bad in ("fp16", 1, True)],
    *[(Birder, "bits", bad) for bad in (0, 2.5, "2", None, math.nan, 0.9, 1.9)],
    *[(Birder, "feedback", bad) for bad in (1, None, "yes")],
    *[(OnebitAdam, "scale", bad) for bad in ("max", 1, None)],
    *[(OnebitAdam, "floor", bad) for bad in (-0.1, 1.5, "a", None)],
    *[(CDAdam, "preconditioned", bad) for bad in (1, None, "yes")],
    *[(CDAdam, "bits", bad) for bad in (0, 1e-9, 2.1, "2", None)],
    *[(CDAdam, "replica_lr", bad) for bad in (0, 1.1, "1", None, math.nan)],
    *[(CDAdam, "compressor", bad) for bad in ("topk", TopK, DGC(), FP16(), Dense(), CDAdam())],
    *[(CDAdam, "compressor", bad) for bad in (Threshold(0.1), ScaleCom(), TwoLevel(TopK()))],
    *[(SketchedAMSGrad, "betas", bad) for bad in ((0.9,), (1, 0.9), None)],
    *[(SketchedAMSGrad, "eps", bad) for bad in (0, -1.0, 1e-31, math.nan, "a", None, True)],
    *[(SketchedAMSGrad, "ratio", bad) for bad in (0, 1.5, -0.1, math.nan, "a", None, True)],
    *[(SketchedAMSGrad, "rows", bad) for bad in (0, 4, 2.5, None, True)],
    *[(SketchedAMSGrad, "columns", bad) for bad in (0, -1.0, math.inf, "a", None, True)],
    *[(SketchedAMSGrad, "candidates", bad) for bad in (0, 1.5, None, True)],
    *[(SketchedAMSGrad, "bounded", bad) for bad in (2, None, "yes")],
    *[(SketchedAMSGrad, "warmup_steps", bad) for bad in (-1, 1.5, "soon", None, True)],
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
