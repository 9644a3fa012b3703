"""Deep Gradient Compression (Lin, Han, Mao, Wang & Dally, ICLR 2018)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from accordion_hvd import check
from accordion_hvd.compressors.sparsifier import Sparsifier
from accordion_hvd.compressors.topk import TopK
from accordion_hvd.core.base import Allreduce, Compressor, ExchangeGenerator, Info, State, Tensor
from accordion_hvd.core.codec import average
from accordion_hvd.ops import namespace
from accordion_hvd.ops.spec import Spec

STAGES = 4
"""Stages of a warm-up; in stage i (from 1), 4^-i of the elements are sent."""


@dataclass(frozen=True)
class DGC(Sparsifier):
    """Top-k sparsification of momentum's updates instead of gradients.

    Each rank keeps its own momentum u <- momentum * u + g and adds it up, v <- v + u; the largest
    of v are sent and zeroed in v (momentum correction: what waits has its momentum when it is
    sent) and in u (momentum factor masking: stale momentum does not point on). What comes back is
    an update, momentum included: the optimizer inside must be plain SGD. Tensors too small to be
    compressed, or exempt, get plain momentum (`plain`).

    Where nothing is left out (ratio 1) nothing is stale either: u is not masked, and all is
    momentum SGD exactly. With momentum 0, all is `TopK`.

    Levels: v waits in units of updates; a change of level hands it over to another level of that
    kind, and between DGCs u goes along. On a change of the number of ranks, all ranks take up
    rank 0's u. Weight decay of the optimizer inside acts beside momentum, not through it; the
    paper's nesterov variant is left out, sparse gradients travel without momentum.

    Sent: as `TopK`, about 5.2 k (n - 1) bytes a rank in a ring of n ranks; at ratio 1 an allreduce.

    Args:
        ratio: the part of the elements that is sent, in (0, 1]; the paper's is 0.001.
        momentum: in [0, 1).
        warmup: steps in which the ratio falls from 1/4 by a factor of 4 in each quarter (1/256 in
            the last), never below `ratio`; the paper's are 4 epochs. 0: none.
        clip: clips each rank's gradient of a tensor to this norm divided by the root of the
            number of ranks, before all else; None: not. The paper clips the gradients of all
            tensors together, which no rank has at once here.
    """

    output: ClassVar[str] = "update"
    per_rank_state: ClassVar[tuple[str, ...]] = ("error", "momentum")

    ratio: float = 0.001
    momentum: float = 0.9
    warmup: int = 0
    clip: float | None = None

    def __post_init__(self) -> None:
        """Raises: ValueError when an argument is not what it must be."""
        super().__post_init__()
        check.below_one(self, "momentum", self.momentum)
        check.integer(self, "warmup", self.warmup, least=0)
        if self.clip is not None and (not check.is_number(self.clip) or self.clip <= 0):
            check.refuse(self, "clip", self.clip, "a number above 0, or None")
        object.__setattr__(self, "batching", "alike" if self.clip is None else "")

    def init(self, spec: Spec, info: Info) -> State:
        """`error`: the paper's v; `momentum`: its u. Vectors with the gradient's elements."""
        state = super().init(spec, info)
        return state | {"momentum": spec.zeros((spec.size,))} if self.momentum else state

    def variant(self, step: int) -> int:
        """Return the stage of the warm-up, from 0; `STAGES` after it."""
        return min(step * STAGES // self.warmup, STAGES) if self.warmup else STAGES

    @property
    def phases(self) -> bool:
        """Return whether there is a warm-up."""
        return self.warmup > 0

    def stage_ratio(self, stage: int) -> float:
        """Return the part of the elements that is sent in a stage."""
        return self.ratio if stage >= STAGES else max(self.ratio, 0.25 ** (stage + 1))

    def exchange(self, grad: Tensor, state: State, info: Info) -> ExchangeGenerator:
        """Run one allgather of positions and values; at ratio 1 an allreduce."""
        xp = namespace(grad)
        shape = xp.shape(state["error"])  # (size,); several tensors: (number, size)
        ratio = self.stage_ratio(info.phase) if self.phases else self.ratio
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
        """Plain momentum, for tensors that are not compressed."""
        return DGC(1.0, self.momentum) if self.momentum else super().plain()

    def warm_start(self, state: State, other: Compressor, other_state: State) -> State:
        """Take over another DGC's u."""
        if "momentum" not in state or "momentum" not in other_state:
            return state
        return {**state, "momentum": other_state["momentum"]}

    def _state(self, error: Tensor, momentum: Tensor) -> State:
        return {"error": error} | ({"momentum": momentum} if self.momentum else {})

    def _clipped(self, grad: Tensor, info: Info) -> Tensor:
        if self.clip is None:
            return grad
        xp = namespace(grad)
        grad = xp.cast(grad, "float32")
        norm, limit = xp.norm(grad), self.clip / math.sqrt(info.size)
        return grad * (limit / xp.maximum(norm, xp.full((), limit, "float32", xp.device(grad))))
