"""Birder, a 1-bit adaptive optimizer whose steps are random signs (Peng et al., NeurIPS 2023)."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import KW_ONLY, dataclass
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
    consecutive,
    place,
)
from accordion_hvd.ops import namespace, random
from accordion_hvd.ops.spec import Spec
from accordion_hvd.optimizers.base import UpdateRule
from accordion_hvd.optimizers.signs import Chunks, check_bits, speaks

MOMENTS = ("m", "b")
WITHIN = (None, "bits", "half")

SPEAKS, SILENT = range(2)
"""Phases: whether an exchange sends anything."""


@dataclass(frozen=True)
class Birder(UpdateRule):
    """1-bit adaptive optimizer whose steps are random signs with an Adam-like direction as mean.

    Each rank i updates its own moments with its own gradient g, and ranks average random signs:

    1. m <- beta m + (1 - beta) g, b <- beta b + (1 - beta) |g|
    2. u_i = m / b, in [-1, 1] because |m| <= b
    3. Rank i sends Q(u_i), where Q(u) = +1 with probability (1 + u) / 2, else -1; so E[Q(u)] = u
    4. Each rank averages the received signs of its chunk, and sends Q of that average to all ranks

    The received signs are the step. Its expectation is the mean of all u_i. There is no warm-up and
    no scale. On one rank the step is Q(u_1).

    Use the learning rate of Adam or a smaller one, and let it fall at the end. Weight decay is
    decoupled. The paper's full text was not available: the update, both randomisations, the
    hierarchical exchange and `beta` are recalled. `feedback`, `bits` and `beta_b` are ours.
    docs/optimizer-details.md explains them and the behaviour under a policy.

    An element whose gradient is always zero has u = 0, so its steps are fair coins: it is
    lr sqrt(t) from its start after t steps, in root mean square. With `feedback`, it stays within
    a few lr.

    Sent, of d elements on n ranks: an alltoall of d / 8 bytes and an allgather of d / (8 n), times
    `bits`. With `within`, on N hosts of L ranks: between hosts, the same for d / L elements and N
    ranks; within a host, an alltoall of d / 8 bytes (2 d for "half") and an allgather of d / (8 L).

    State: m and b of each rank, 8 bytes an element in fp32; with `feedback` 12 + 4 / n, and 4 more
    with `within`.

    Args:
        beta: decay rate of m and b, in [0, 1).
        within: format of an intra-host exchange, "bits" or "half"; None: ranks of a host do not
            exchange separately.
        feedback: whether to add the error of a draw before the next draw.
        bits: number of bits an element, 1 or 2; with `feedback`, any number in [0.1, 2] is allowed,
            which is the mean over exchanges.
        beta_b: decay rate of b, in [beta, 1); None: `beta`.
    """

    rescale_note: ClassVar[str] = "m and b are the ranks' means"
    averaged_state: ClassVar[tuple[str, ...]] = MOMENTS  # means preserve |m| <= b
    group_settings: ClassVar[tuple[str, ...]] = ("beta", "beta_b")
    decoupled_weight_decay: ClassVar[bool] = True
    exact: ClassVar[bool] = False

    beta: float = 0.95
    within: str | None = None
    _: KW_ONLY
    feedback: bool = False
    bits: float = 1
    beta_b: float | None = None

    def __post_init__(self) -> None:
        check.below_one(self, "beta", self.beta)
        slow = self.beta_b
        if slow is not None and not (check.is_number(slow) and self.beta <= slow < 1):
            allowed = f"None, or a number of at least beta ({self.beta}) and below 1"
            check.refuse(self, "beta_b", slow, allowed)
        check.one_of(self, "within", self.within, WITHIN)
        if not isinstance(self.feedback, bool):
            check.refuse(self, "feedback", self.feedback, "True or False")
        check_bits(self, self.bits)
        if self.period != 1 and not self.feedback:
            check.refuse(self, "bits", self.bits, "1 or 2 without feedback=True")

    @property
    def per_rank_state(self) -> tuple[str, ...]:  # type: ignore[override]
        residuals = ("error", "server", "host") if self.within else ("error", "server")
        return (*MOMENTS, *residuals) if self.feedback else MOMENTS

    @property
    def batching(self) -> str:  # type: ignore[override]
        return "" if self.feedback else "alike"

    @property
    def topology_aware(self) -> bool:  # type: ignore[override]
        return self.within is not None

    def dense(self) -> Birder:
        return ExactBirder(self.beta, beta_b=self.beta_b)

    def variant(self, step: int) -> int:
        return SPEAKS if self.exact or speaks(self.bits, step) else SILENT

    @property
    def period(self) -> int:
        return int(self.bits in (1, 2))

    def init(self, spec: Spec, info: Info) -> State:
        """Return `m` and `b`, (size,), and with `feedback` residuals.

        `error`: of this rank's draws, (size,); `server`: of this rank's chunk; with `within` also
        `host`: of the draws of means over a host, (padded size,), used at this rank's place only.
        """
        length = Chunks(spec.size, info.size).length
        sizes = {"m": spec.size, "b": spec.size, "error": spec.size, "server": length}
        sizes = {key: n for key, n in sizes.items() if key in self.per_rank_state}
        if "host" in self.per_rank_state:
            sizes |= {"host": length * info.size}
        own = {key: spec.zeros((size,), spec.wide) for key, size in sizes.items()}
        return super().init(spec, info) | own

    def exchange(self, grad: Tensor, state: State, info: Info) -> ExchangeGenerator:
        """Update the moments, exchange random signs of u (or u), and return the step."""
        xp, beta = namespace(grad), self.setting(info, "beta")
        fresh = xp.reshape(grad, xp.shape(state["m"]))
        m = xp.momentum(state["m"], beta, fresh)
        b = self._scale(state["b"], m, fresh, info)
        u = xp.bounded_ratio(m, b, 0.0)
        if self.exact:
            u = yield Allreduce(u, reuse=True)
            return xp.reshape(u, xp.shape(grad)), {"m": m, "b": b}
        room = grad if info.size > 1 else xp.copy(grad)  # one rank needs the gradient for an undo
        if info.size == 1:
            draw = self._draw(info, "owner", info.size)
            signs, errors = draw.of(u, state, "error")
        elif info.phase == SILENT:
            yield ()
            return xp.reshape(xp.zeros_reusing(room), xp.shape(grad)), {**state, "m": m, "b": b}
        else:
            signs, errors = yield from self._averaged(u, state, info)
            draw = self._draw(info, "owner", info.size)
        return draw.values(xp, signs, room), {**state, **errors, "m": m, "b": b}

    def _scale(self, b: Tensor, m: Tensor, fresh: Tensor, info: Info) -> Tensor:
        """Return the new b, which is at least |m|."""
        xp, slow = namespace(m), self.setting(info, "beta_b")
        if slow is None:
            return xp.momentum(b, self.setting(info, "beta"), abs(fresh))
        return xp.maximum(xp.momentum(b, slow, abs(fresh)), xp.maximum(m, -m))

    def _draw(self, info: Info, stage: str, ranks: int) -> Draw:
        """Return the random encoding of means over this number of ranks."""
        seed = random.key("birder", info.name, info.step, info.rank, stage)
        inner = inner_magnitude(self.setting(info, "beta"), ranks) if self.bits > 1 else 1.0
        return Draw(seed, inner)

    def _averaged(
        self, u: Tensor, state: State, info: Info
    ) -> Generator[Any, Any, tuple[list[Tensor], State]]:
        """Return packed signs and new residuals; E[signs] is the mean of `u` over the ranks.

        Rank r owns chunk r, whatever its host. Within a host, each rank averages the chunks of all
        ranks that have the same place on their hosts.
        """
        xp, width = namespace(u), math.prod(namespace(u).shape(u))
        padded = Chunks(width, info.size).length * info.size
        dtype = xp.dtype(state["m"])
        errors: State = {}
        plan = Places.of(info.hosts if self.topology_aware else (), info)
        if plan.neighbours > 1 and self.within == "half":
            u = xp.pad_last(xp.reshape(xp.cast(u, "float16"), (-1,)), padded)
            received = yield Alltoall(plan.arranged(xp, u, plan.neighbours), group=plan.intra)
            parts = [xp.cast(row, dtype) for row in xp.unstack(received)]
            mean = sum(parts[1:], parts[0]) * (1 / len(parts))
        else:
            draw = self._draw(info, "worker", 1)
            signs, errors = draw.of(u, state, "error")
            signs = [xp.pad_last(packed, padded // 8) for packed in signs]
            if plan.neighbours > 1:
                rows = [plan.arranged(xp, packed, plan.neighbours) for packed in signs]
                received = yield Alltoall(xp.concat(rows, 1), group=plan.intra)
                mean = draw.mean(xp, received, dtype)
        if plan.hosts > 1:
            if plan.neighbours > 1:
                draw = self._draw(info, "machine", plan.neighbours)
                signs, host = plan.fed(draw, mean, state)
                errors |= host
            rows = [xp.reshape(packed, (plan.hosts, -1)) for packed in signs]
            received = yield Alltoall(xp.concat(rows, 1), group=plan.inter)
            mean = draw.mean(xp, received, dtype)
        signs, server = self._draw(info, "owner", info.size).of(mean, state, "server")
        bits, packed = len(signs), xp.concat(signs)
        for group, number in ((plan.inter, plan.hosts), (plan.intra, plan.neighbours)):
            if number > 1:
                parts = yield Allgather(packed, group=group)
                packed = xp.concat(list(parts))
        packed = xp.swap_leading(xp.reshape(packed, (info.size, bits, -1)))
        signs = [plan.restored(xp, row) for row in xp.unstack(xp.reshape(packed, (bits, -1)))]
        return [x[: math.ceil(width / 8)] for x in signs], {**errors, **server}

    def warm_start(self, state: State, other: Any, other_state: State) -> State:
        if not isinstance(other, Birder):
            return state
        return {**state, **{key: other_state[key] for key in MOMENTS}}

    def deactivate(self, state: State) -> State:
        """Return the residuals, which stay with this stage; the next stage copies the moments."""
        return {k: x for k, x in super().deactivate(state).items() if k not in MOMENTS}


class ExactBirder(Birder):
    """Dense stage of `Birder`: ranks average u exactly."""

    exact: ClassVar[bool] = True


@dataclass(frozen=True)
class Places:
    """The groups of ranks in a hierarchical exchange.

    A rank's place is its position among the ranks of its host.

    Attributes:
        intra: ranks on this rank's host; None if these are all ranks.
        inter: ranks with this rank's place, one on each host; None if these are all ranks.
        neighbours: number of ranks in `intra`.
        hosts: number of ranks in `inter`.
        place: this rank's place.
        order: all ranks, ordered by place, then by rank.
    """

    intra: tuple[int, ...] | None
    inter: tuple[int, ...] | None
    neighbours: int
    hosts: int
    place: int
    order: tuple[int, ...]

    @classmethod
    def of(cls, hosts: Hosts, info: Info) -> Places:
        """Return the groups of this rank; without known hosts, each rank has a host of its own."""
        hosts = hosts or consecutive(info.size, 1)
        own, columns = place(hosts, info.rank, info.size), zip(*hosts, strict=True)
        order = tuple(rank for column in columns for rank in sorted(column))
        groups = [None if len(x) == info.size else tuple(sorted(x)) for x in (own.intra, own.inter)]
        number = sorted(own.intra).index(info.rank)
        return cls(groups[0], groups[1], len(own.intra), len(own.inter), number, order)

    def arranged(self, xp: ModuleType, x: Tensor, rows: int) -> Tensor:
        """Return a vector's equal pieces, one for each rank, in the order `order`, as rows."""
        return xp.reshape(_permuted(xp, x, self.order), (rows, -1))

    def fed(self, draw: Draw, mean: Tensor, state: State) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Return packed signs of the mean over a host, and the new residual `host` if there is one.

        The residual has the elements of all places, so that ranks may move to other hosts.
        """
        if "host" not in state:
            return draw.of(mean)
        xp = namespace(mean)
        rows = xp.unstack(self.arranged(xp, state["host"], self.neighbours))
        signs, own = draw.of(mean, {"host": rows[self.place]}, "host")
        rows[self.place] = own["host"]
        return signs, {"host": self.restored(xp, xp.concat(rows))}

    def restored(self, xp: ModuleType, x: Tensor) -> Tensor:
        """Return the vector of which `x` is the result of `arranged`."""
        return _permuted(xp, x, [self.order.index(rank) for rank in range(len(self.order))])


def _permuted(xp: ModuleType, x: Tensor, order: Sequence[int]) -> Tensor:
    if list(order) == list(range(len(order))):
        return x
    pieces = xp.unstack(xp.reshape(x, (len(order), -1)))
    return xp.concat([pieces[rank] for rank in order])


def inner_magnitude(beta: float, ranks: int) -> float:
    """Return the smaller magnitude of a two-bit code, for a mean over this number of ranks.

    It is a multiple of 2^-12, so that fp32 sums over 2048 ranks are exact.
    """
    noise = math.sqrt((1 - beta) / (1 + beta))
    return max(1, round(4096 * min(0.5, noise) / math.sqrt(ranks))) / 4096


@dataclass(frozen=True)
class Draw:
    """Unbiased random codes of elements in [-1, 1], with one or two bits.

    One bit stands for -1 or 1. Two bits stand for -1, -inner, inner or 1: they are two signs, with
    the weights (1 + inner) / 2 and (1 - inner) / 2. For |u| <= inner the first sign is random, and
    the second is its opposite. For |u| > inner the first sign is that of u, and the second is
    random. So both signs use the same random number.

    Attributes:
        seed: seed of the random numbers.
        inner: smaller magnitude of two bits, in (0, 1); 1 for one bit.
    """

    seed: Any
    inner: float = 1.0

    def of(
        self, u: Tensor, state: State | None = None, key: str = ""
    ) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Return packed signs of `u`, and {key: the new residual}.

        If `state` has the residual `key`, it is added to `u` first; otherwise the dict is empty.
        """
        xp, error = namespace(u), (state or {}).get(key)
        if error is not None:
            u = u + xp.reshape(error, xp.shape(u))
        scaled = u if self.inner == 1 else u * (1 / self.inner)
        signs = [xp.pack_random_signs(scaled, self.seed)]
        if self.inner != 1:
            delta = self._less(u, signs) * (2 / (1 - self.inner))
            signs.append(xp.pack_random_signs(delta, self.seed))
        if error is None:
            return signs, {}
        return signs, {key: xp.reshape(self._less(u, signs), xp.shape(error))}

    def values(self, xp: ModuleType, parts: Sequence[Tensor], like: Tensor) -> Tensor:
        """Return the sum of the decoded signs, fp32, in the shape of `like`. Consumes `like`.

        The sum is exact for fewer than 2^24 parts with one bit, and 2^12 with two.
        """
        steps = [2.0] if self.inner == 1 else [1 + self.inner, 1 - self.inner]
        count, device = len(steps), xp.device(like)
        factors = [xp.full((1,), steps[i % count], "float32", device) for i in range(len(parts))]
        return xp.sum_quantized(parts, factors, math.prod(xp.shape(like)), 1, 0.5, like)

    def mean(self, xp: ModuleType, rows: Tensor, dtype: str) -> Tensor:
        """Return the mean of the decoded rows, each with all first signs, then all second signs."""
        bits = 1 if self.inner == 1 else 2
        parts = xp.unstack(xp.reshape(rows, (xp.shape(rows)[0] * bits, -1)))
        room = xp.zeros((8 * xp.shape(parts[0])[0],), "float32", xp.device(rows))
        return xp.cast(self.values(xp, parts, room), dtype) * (bits / len(parts))

    def _less(self, u: Tensor, signs: Sequence[Tensor]) -> Tensor:
        xp = namespace(u)
        sent = self.values(xp, signs, xp.zeros(xp.shape(u), "float32", xp.device(u)))
        return u - xp.cast(sent, xp.dtype(u))
