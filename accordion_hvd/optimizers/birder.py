"""Birder, a 1-bit adaptive optimizer whose steps are random signs (Peng et al., NeurIPS 2023)."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, ClassVar

from accordion_hvd import check
from accordion_hvd.core.base import (
    Allgather,
    Allreduce,
    Alltoall,
    ExchangeGenerator,
    Hosts,
    Info,
    State,
    Tensor,
)
from accordion_hvd.core.placement import consecutive, place
from accordion_hvd.ops import namespace, random
from accordion_hvd.ops.spec import Spec
from accordion_hvd.optimizers.base import UpdateRule, check_eps
from accordion_hvd.optimizers.signs import Chunks, check_bits, speaks

MOMENTS = ("m", "b")
WITHIN = (None, "bits", "half")

SPEAKS, SILENT = range(2)
"""Phases: whether anything travels in an exchange."""


@dataclass(frozen=True)
class Birder(UpdateRule):
    """Each element steps by +lr or -lr, at random, such that the mean is an Adam-like direction.

    On each rank i, with its own gradient g: m <- b1 m + (1 - b1) g, b <- b1 b + (1 - b1) |g|,
    u_i = m / b. As |m| <= b, u is in [-1, 1], and one random bit says it without bias:
    Q(u) = +1 with the probability (1 + u) / 2, else -1. Each rank sends Q(u_i), each averages what
    came of its chunk and sends Q of that average to all. What all then hold is the step; its mean
    is the ranks' mean of u_i. There is no warm-up, no scale, and on one rank the step is Q(u).

    Weight decay is decoupled. The learning rate is one for Adam, or smaller, and must fall in the
    end. The update, both randomisations, the hierarchical exchange and `beta` are recalled, as the
    paper's full text was not at hand; the other arguments are ours, and so are antithetic draws in
    pairs of steps. docs/optimizer-details.md explains them, and the behaviour under policies.

    Sent, of d elements on n ranks: an alltoall of d / 8 bytes, an allgather of d / (8 n), times
    `bits`. With `within`, over the network: these of d / L elements among N ranks; in a machine, an
    alltoall of d / 8 (2 d for "half") bytes and an allgather of d / (8 L). With `shared`: two
    allreduces.

    State: m and b, each rank's own: 8 bytes an element.

    Args:
        beta: decay rate of both moments, in [0, 1).
        beta_b: decay rate of b, in [beta, 1); None: `beta`.
        within: None, "bits" or "half": how ranks of one machine exchange, if apart from others.
        shared: whether m and b are the ranks' means.
        feedback: whether what a draw has lacked is added before the next one.
        eps: added to b; at least 0. Above 0 the steps depend on the gradients' scale.
        exact: whether u is averaged as it is: the dense stage.
        bits: of an element, in the mean; in [0.1, 2].
    """

    rescale_note: ClassVar[str] = "m and b are the ranks' means"
    averaged_state: ClassVar[tuple[str, ...]] = MOMENTS  # which keeps |m| <= b
    group_settings: ClassVar[tuple[str, ...]] = ("beta", "beta_b", "eps")
    decoupled_weight_decay: ClassVar[bool] = True

    beta: float = 0.95
    within: str | None = None
    shared: bool = False
    feedback: bool = False
    eps: float = 0.0
    exact: bool = False
    bits: float = 1
    beta_b: float | None = None

    def __post_init__(self) -> None:
        """Raises: ValueError when an argument is not what it must be."""
        check.below_one(self, "beta", self.beta)
        slow = self.beta_b
        if slow is not None and not (check.is_number(slow) and self.beta <= slow < 1):
            allowed = f"None, or a number of at least beta ({self.beta}) and below 1"
            check.refuse(self, "beta_b", slow, allowed)
        check_eps(self, self.eps)
        check.one_of(self, "within", self.within, WITHIN)
        for name in ("shared", "feedback", "exact"):
            if not isinstance(getattr(self, name), bool):
                check.refuse(self, name, getattr(self, name), "True or False")
        check_bits(self, self.bits)
        alone = self.shared or self.exact  # no bits travel
        own = ("error", "server") if self.feedback and not alone else ()
        object.__setattr__(self, "per_rank_state", (*(() if self.shared else MOMENTS), *own))
        object.__setattr__(self, "batching", "" if own else "alike")
        object.__setattr__(self, "topology_aware", self.within is not None and not alone)

    def dense(self) -> Birder:
        """Return the exact mean of u."""
        return replace(self, within=None, feedback=False, exact=True, bits=1)

    def variant(self, step: int) -> int:
        """Return whether signs are drawn."""
        return SPEAKS if self.exact or speaks(self.bits, step) else SILENT

    @property
    def phases(self) -> bool:
        """Return whether `variant` ever changes."""
        return self.bits not in (1, 2)

    def init(self, spec: Spec, info: Info) -> State:
        """`m` and `b`, (size,); with feedback, what draws lacked: `error`, and `server` (chunk)."""
        sizes = {"m": spec.size, "b": spec.size}
        if "error" in self.per_rank_state:
            sizes |= {"error": spec.size, "server": Chunks(spec.size, info.size).length}
        own = {key: spec.zeros((size,), spec.wide) for key, size in sizes.items()}
        return super().init(spec, info) | own

    def exchange(self, grad: Tensor, state: State, info: Info) -> ExchangeGenerator:
        """Moments; u, or its mean; the step."""
        xp, beta = namespace(grad), self.setting(info, "beta")
        given = magnitude = xp.reshape(grad, xp.shape(state["m"]))
        if self.shared and info.size > 1:
            given = xp.cast(given, xp.dtype(state["m"]))
            magnitude = xp.maximum(given, -given)
            given, magnitude = yield Allreduce(given, reuse=True), Allreduce(magnitude, reuse=True)
        m = xp.momentum(state["m"], beta, given)
        b = self._scale(state["b"], m, magnitude, info)
        u = xp.bounded_ratio(m, b, self.setting(info, "eps"))
        if self.exact:
            u = u if self.shared else (yield Allreduce(u, reuse=True))
            return xp.reshape(u, xp.shape(grad)), {"m": m, "b": b}
        room = grad if info.size > 1 else xp.copy(grad)  # alone, taking back needs the gradient
        if self.shared or info.size == 1:
            draw = self._draw(replace(info, rank=0), "owner", info.size)
            signs, errors = draw.of(u, state, "error")
        elif info.phase == SILENT:
            yield ()
            return xp.reshape(xp.zeros_reusing(room), xp.shape(grad)), {**state, "m": m, "b": b}
        else:
            signs, errors = yield from self._averaged(u, state, info)
            draw = self._draw(info, "owner", info.size)
        return draw.values(xp, signs, room), {**state, **errors, "m": m, "b": b}

    def _scale(self, b: Tensor, m: Tensor, magnitude: Tensor, info: Info) -> Tensor:
        """Return the new b, at least |m|."""
        xp, slow = namespace(m), self.setting(info, "beta_b")
        if slow is None:
            return xp.momentum(b, self.setting(info, "beta"), abs(magnitude))
        return xp.maximum(xp.momentum(b, slow, abs(magnitude)), xp.maximum(m, -m))

    def _draw(self, info: Info, stage: str, ranks: int) -> Draw:
        """Return the encoding of means over this number of ranks."""
        seed = random.key("birder", info.name, info.step // 2, info.rank, stage)
        inner = inner_magnitude(self.setting(info, "beta"), ranks) if self.bits > 1 else 1.0
        return Draw(seed, info.step % 2, inner)

    def _averaged(
        self, u: Tensor, state: State, info: Info
    ) -> Generator[Any, Any, tuple[list[Tensor], State]]:
        """Signs whose mean is the ranks' mean of `u`, packed; what draws lacked.

        Rank r owns chunk r, on any host. Within a machine, each averages the chunks
        of all ranks that have its place.
        """
        xp, width = namespace(u), math.prod(namespace(u).shape(u))
        whole = Chunks(width, info.size).length * info.size
        dtype = xp.dtype(state["m"])
        errors: State = {}
        plan = Places.of(info.hosts if self.topology_aware else (), info)
        if plan.neighbours > 1 and self.within == "half":
            u = xp.pad_last(xp.reshape(xp.cast(u, "float16"), (-1,)), whole)
            theirs = yield Alltoall(plan.arranged(xp, u, plan.neighbours), group=plan.intra)
            parts = [xp.cast(row, dtype) for row in xp.unstack(theirs)]
            mean = sum(parts[1:], parts[0]) * (1 / len(parts))
        else:
            draw = self._draw(info, "worker", 1)
            signs, errors = draw.of(u, state, "error")
            signs = [xp.pad_last(packed, whole // 8) for packed in signs]
            if plan.neighbours > 1:
                rows = [plan.arranged(xp, packed, plan.neighbours) for packed in signs]
                theirs = yield Alltoall(xp.concat(rows, 1), group=plan.intra)
                mean = draw.mean(xp, theirs, dtype)
        if plan.hosts > 1:
            if plan.neighbours > 1:
                draw = self._draw(info, "machine", plan.neighbours)
                signs, _ = draw.of(mean)
            rows = [xp.reshape(packed, (plan.hosts, -1)) for packed in signs]
            theirs = yield Alltoall(xp.concat(rows, 1), group=plan.inter)
            mean = draw.mean(xp, theirs, dtype)
        signs, lacked = self._draw(info, "owner", info.size).of(mean, state, "server")
        bits, packed = len(signs), xp.concat(signs)
        for group, number in ((plan.inter, plan.hosts), (plan.intra, plan.neighbours)):
            if number > 1:
                parts = yield Allgather(packed, group=group)
                packed = xp.concat(list(parts))
        packed = xp.swap_leading(xp.reshape(packed, (info.size, bits, -1)))
        signs = [plan.restored(xp, row) for row in xp.unstack(xp.reshape(packed, (bits, -1)))]
        return [x[: math.ceil(width / 8)] for x in signs], {**errors, **lacked}

    def warm_start(self, state: State, other: Any, other_state: State) -> State:
        """Take over the moments of this optimizer's other stage."""
        if not isinstance(other, Birder):
            return state
        return {**state, **{key: other_state[key] for key in MOMENTS}}

    def deactivate(self, state: State) -> State:
        """Errors wait here; moments go along."""
        return {
            key: x for key, x in state.items() if key in self.per_rank_state and key not in MOMENTS
        }


@dataclass(frozen=True)
class Places:
    """The order of the exchanges between ranks.

    Attributes:
        intra, inter: the ranks of this rank's machine, and those of its place on all; None for all.
        neighbours, hosts: how many these are.
        order: all ranks, those of the first place on all hosts first, and so on.
    """

    intra: tuple[int, ...] | None
    inter: tuple[int, ...] | None
    neighbours: int
    hosts: int
    order: tuple[int, ...]

    @classmethod
    def of(cls, hosts: Hosts, info: Info) -> Places:
        """Return this rank's places; without known hosts, each rank has one of its own."""
        hosts = hosts or consecutive(info.size, 1)
        here, columns = place(hosts, info.rank, info.size), zip(*hosts, strict=True)
        order = tuple(rank for column in columns for rank in sorted(column))
        groups = [
            None if len(x) == info.size else tuple(sorted(x)) for x in (here.intra, here.inter)
        ]
        return cls(groups[0], groups[1], len(here.intra), len(here.inter), order)

    def arranged(self, xp: ModuleType, x: Tensor, rows: int) -> Tensor:
        """Arrange a vector's equal pieces, one per rank, in the order of the places."""
        return xp.reshape(_permuted(xp, x, self.order), (rows, -1))

    def restored(self, xp: ModuleType, x: Tensor) -> Tensor:
        """Invert `arranged`; return a vector."""
        return _permuted(xp, x, [self.order.index(rank) for rank in range(len(self.order))])


def _permuted(xp: ModuleType, x: Tensor, order: Sequence[int]) -> Tensor:
    if list(order) == list(range(len(order))):
        return x
    pieces = xp.unstack(xp.reshape(x, (len(order), -1)))
    return xp.concat([pieces[rank] for rank in order])


def inner_magnitude(beta: float, ranks: int) -> float:
    """Return the smaller magnitude of two bits, for a mean over this number of ranks; see `Birder`.

    A multiple of 2^-12, so that fp32 sums over 2048 ranks are exact.
    """
    noise = math.sqrt((1 - beta) / (1 + beta))
    return max(1, round(4096 * min(0.5, noise) / math.sqrt(ranks))) / 4096


@dataclass(frozen=True)
class Draw:
    """Random codes, without bias, for elements in [-1, 1]: of one bit, -1 or 1, or of two.

    With two they are one of -1, -inner, inner, 1, and what travels is two signs, which weigh
    (1 + inner) / 2 and (1 - inner) / 2. The first is random up to `inner`, and beyond it certain;
    then the second is random, which before says the opposite of the first. So one random number
    an element does for both.

    Attributes:
        seed: of the random numbers.
        turn: 0, or 1 to read a number r as 1 - r.
        inner: in (0, 1); 1 for one bit.
    """

    seed: Any
    turn: Any
    inner: float = 1.0

    def of(
        self, u: Tensor, state: State | None = None, key: str = ""
    ) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Signs for `u`, packed. With `key`, for that error, too; and the new error."""
        xp, error = namespace(u), (state or {}).get(key)
        if error is not None:
            u = u + xp.reshape(error, xp.shape(u))
        scaled = u if self.inner == 1 else u * (1 / self.inner)
        signs = [xp.pack_random_signs(scaled, self.seed, self.turn)]
        if self.inner != 1:
            rest = self._less(u, signs) * (2 / (1 - self.inner))
            signs.append(xp.pack_random_signs(rest, self.seed, self.turn))
        if error is None:
            return signs, {}
        return signs, {key: xp.reshape(self._less(u, signs), xp.shape(error))}

    def values(self, xp: ModuleType, parts: Sequence[Tensor], like: Tensor) -> Tensor:
        """Decode the signs and add them up, in the shape of `like`, which it consumes; fp32.

        Exact, below 2^24 parts with one bit and 2^12 with two.
        """
        steps = [2.0] if self.inner == 1 else [1 + self.inner, 1 - self.inner]
        device = xp.device(like)
        factors = [
            xp.full((1,), steps[i % len(steps)], "float32", device) for i in range(len(parts))
        ]
        return xp.sum_quantized(parts, factors, math.prod(xp.shape(like)), 1, 0.5, like)

    def mean(self, xp: ModuleType, rows: Tensor, dtype: str) -> Tensor:
        """Decode the rows: each has an element's first signs, then its second."""
        bits = 1 if self.inner == 1 else 2
        parts = xp.unstack(xp.reshape(rows, (xp.shape(rows)[0] * bits, -1)))
        room = xp.zeros((8 * xp.shape(parts[0])[0],), "float32", xp.device(rows))
        return xp.cast(self.values(xp, parts, room), dtype) * (bits / len(parts))

    def _less(self, u: Tensor, signs: Sequence[Tensor]) -> Tensor:
        """`u` without what signs stand for."""
        xp = namespace(u)
        sent = self.values(xp, signs, xp.zeros(xp.shape(u), "float32", xp.device(u)))
        return u - xp.cast(sent, xp.dtype(u))
