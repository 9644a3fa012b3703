"""Deep Gradient Compression (Lin, Han, Mao, Wang & Dally, ICLR 2018)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from accordion_hvd import check
from accordion_hvd.compressors.sparsifier import Sparsifier
from accordion_hvd.compressors.topk import TopK
from accordion_hvd.compressors.wrappers import with_momentum
from accordion_hvd.core.base import Allreduce, Compressor, ExchangeGenerator, Info, State, Tensor
from accordion_hvd.core.codec import average
from accordion_hvd.ops import namespace
from accordion_hvd.ops.spec import Spec

STAGES = 4
"""Number of stages of a warm-up. Stage i (from 1) sends the fraction 4^-i of the elements."""


@dataclass(frozen=True)
class DGC(Sparsifier):
    """Deep gradient compression: top-k sparsification of momentum updates instead of gradients.

    Each rank accumulates its local momentum and sends the largest accumulated elements with their
    indices. All ranks gather all messages and average them. The result is an update that includes
    momentum, so the inner optimizer must be plain SGD. Tensors that are too small to be
    compressed, or exempt, get plain momentum (`plain`).

    A rank computes u <- momentum u + g and v <- v + u, and sends the largest elements of v. It
    then zeroes these elements in v (momentum correction: a delayed element has its momentum when
    it is sent) and in u (momentum factor masking: stale momentum does not carry on).

    With ratio 1 nothing is stale, so u is not masked and DGC is exactly momentum SGD. With
    momentum 0, DGC equals `TopK`.

    Args:
        ratio: fraction of the elements to send, in (0, 1]. Default: 0.001, as in the paper.
        momentum: momentum coefficient in [0, 1). Default: 0.9.
        warmup: number of steps in which the ratio falls by a factor of 4 per quarter, from 1/4 in
            the first to 1/256 in the last, but never below `ratio`. The paper warms up for 4
            epochs. Default: 0, no warm-up.
        clip: threshold for the gradient norm. Before all else, each rank clips the gradient of a
            tensor to clip / sqrt(N) for N ranks. The paper clips the gradients of all tensors
            together, but here no rank has all of them at once. Default: None, no clipping.

    Traffic: about 5.2 k (N - 1) bytes per rank for k elements in a ring of N ranks, as for `TopK`;
    an allreduce with ratio 1.

    When a policy changes levels, v is handed over to levels that also return updates, since v is
    in units of updates; u is handed over between DGCs only. When the number of ranks changes, all
    ranks continue with the mean of the ranks' u, or with u = 0 where the state of only one rank is
    known. The inner optimizer's weight decay is applied after momentum
    and does not pass through it. The paper's Nesterov variant is not implemented, and sparse
    gradients get no momentum.
    """

    summary = "DGC(0.001)", "0.006 n m, by allgather", "plain SGD without momentum"
    output = "update"
    per_rank_state: ClassVar[tuple[str, ...]] = ("error", "momentum")

    ratio: float = 0.001
    momentum: float = 0.9
    warmup: int = 0
    clip: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check.below_one(self, "momentum", self.momentum)
        check.integer(self, "warmup", self.warmup, least=0)
        if self.clip is not None and (not check.is_number(self.clip) or self.clip <= 0):
            check.refuse(self, "clip", self.clip, "a number above 0, or None")

    @property
    def batching(self) -> str:  # type: ignore[override]
        return "alike" if self.clip is None else ""

    def init(self, spec: Spec, info: Info) -> State:
        """Return `error`, the paper's v, and `momentum`, its u: vectors of the gradient's size."""
        state = super().init(spec, info)
        return state | {"momentum": spec.zeros((spec.size,))} if self.momentum else state

    def variant(self, step: int) -> int:
        """Return the stage of the warm-up, from 0; `STAGES` after the warm-up."""
        return min(step * STAGES // self.warmup, STAGES) if self.warmup else STAGES

    @property
    def period(self) -> int:
        return 0 if self.warmup else 1

    def stage_ratio(self, stage: int) -> float:
        return self.ratio if stage >= STAGES else max(self.ratio, 0.25 ** (stage + 1))

    def exchange(self, grad: Tensor, state: State, info: Info) -> ExchangeGenerator:
        """Run one allgather of indices and values; with ratio 1, one allreduce."""
        xp = namespace(grad)
        shape = xp.shape(state["error"])  # (size,); several tensors: (number, size)
        ratio = self.stage_ratio(info.phase) if self.warmup else self.ratio
        fresh = self._clipped(xp.reshape(grad, shape), info)
        if self.momentum:
            fresh = xp.accumulate_scaled(state["momentum"], self.momentum, fresh)
        if ratio == 1:
            total = xp.accumulate(state["error"], fresh)
            mean = yield Allreduce(total)
            error = xp.zeros_reusing(total)
            return xp.reshape(mean, xp.shape(grad)), self._state(error, fresh)
        codec = TopK(ratio)
        message, total = codec.encode_accumulating(state["error"], fresh, info)
        mean, mine = yield from average(codec, message, xp.reshape(grad, shape), info)
        if self.momentum:
            fresh = xp.reshape(xp.clear(xp.reshape(fresh, (-1,)), mine[0][0]), shape)
        error = codec.remove(total, mine, info)
        return xp.reshape(mean, xp.shape(grad)), self._state(error, fresh)

    def plain(self) -> Compressor | None:
        return DGC(1.0, self.momentum) if self.momentum else super().plain()

    def warm_start(self, state: State, other: Compressor, other_state: State) -> State:
        return with_momentum(state, other_state)

    def _state(self, error: Tensor, momentum: Tensor) -> State:
        return {"error": error} | ({"momentum": momentum} if self.momentum else {})

    def _clipped(self, grad: Tensor, info: Info) -> Tensor:
        if self.clip is None:
            return grad
        xp = namespace(grad)
        grad = xp.cast(grad, "float32")
        norm, limit = xp.norm(grad), self.clip / math.sqrt(info.size)
        return grad * (limit / xp.maximum(norm, xp.full((), limit, "float32", xp.device(grad))))
