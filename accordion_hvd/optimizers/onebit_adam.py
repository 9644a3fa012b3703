"""1-bit Adam (Tang et al., ICML 2021)."""

from __future__ import annotations

import warnings
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, ClassVar

from accordion_hvd import check
from accordion_hvd.core.base import Compressor, ExchangeGenerator, Info, State, Tensor
from accordion_hvd.ops import namespace
from accordion_hvd.ops.spec import Spec
from accordion_hvd.optimizers.base import Adam
from accordion_hvd.optimizers.signs import SCALES, Chunks, advanced, averaged, norms
from accordion_hvd.policies.fixed import WarmUp

QUIET = 1e-6
"""Variance, relative to the mean of the tensor, below which steps exceed about 1000 lr."""


@dataclass(frozen=True)
class OnebitAdam(Adam):
    """1-bit Adam: Adam until the variance is stable, then momentum at one bit an element.

    Stage 1 is `Adam`. In stage 2 each rank updates the common momentum m with its own gradient g,
    and ranks average the results p at one bit an element; v stays frozen:

    1. p = b1 m + (1 - b1) g
    2. m <- compressed allreduce of p, with error feedback on both sides (`signs.averaged`)
    3. u = m' / (sqrt(v') + eps)

    The paper's (and DeepSpeed's): the stages, the compression, scale "l2" and the automatic end of
    stage 1 (`policies.WarmUp`). Weight decay is decoupled, and on one rank nothing is compressed,
    as in the reference. Ours: bias corrections (the reference has none: `bias_correction=False`; v'
    keeps the correction of the last step of stage 1), and elements whose variance is zero at the
    switch do not move. The reference masks such elements, which otherwise diverge, because a sign
    is never zero. See docs/optimizer-details.md for `floor` and the behaviour under `Accordion`.

    Training may diverge if elements have hardly any gradient in stage 1, because a sign moves them
    as far as others and their frozen variance is tiny. If some variance is below 1e-6 of its
    tensor's mean at the switch to stage 2 and `floor` is 0, the switch warns once; `floor=0.01`
    helps.

    Sent in stage 2, of a tensor with d elements on n ranks: an alltoall of d / 8 bytes, an
    allgather of d / (8 n), and two scales.

    Args:
        warmup_steps: number of steps of stage 1, at least 1, or "auto": see `policies.WarmUp`.
        betas: decay rates b1 and b2, in [0, 1).
        eps: constant added to the root, at least 0.
        bias_correction: whether to correct the moments for their start at zero.
        scale: "l2" preserves the norm of a message; "l1" has the least squared error, and is better
            if few elements are large.
        floor: least variance of an element in stage 2, as a multiple of its tensor's mean variance,
            in [0, 1] (ours; the reference has 0).
    """

    rescale_note: ClassVar[str] = "the mean of the ranks' residuals is every rank's error"
    per_rank_state: ClassVar[tuple[str, ...]] = ("error", "server")
    decoupled_weight_decay: ClassVar[bool] = True

    warmup_steps: int | str = "auto"
    scale: str = "l2"
    floor: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.warmup_steps != "auto":
            check.integer(self, "warmup_steps", self.warmup_steps, least=1)  # else v is 0
        check.one_of(self, "scale", self.scale, SCALES)
        if not check.is_number(self.floor) or not 0 <= self.floor <= 1:
            check.refuse(self, "floor", self.floor, "a number in [0, 1]")

    def dense(self) -> Adam:
        return Adam(self.betas, self.eps, self.bias_correction)

    def policy(self) -> Any:
        return WarmUp(self.dense(), self, self.warmup_steps)

    def init(self, spec: Spec, info: Info) -> State:
        """Return the state of `Adam`, and the residuals `error` (size,) and `server` (chunk)."""
        length = Chunks(spec.size, info.size).length
        own = {"error": spec.zeros((spec.size,), spec.wide)}
        return super().init(spec, info) | own | {"server": spec.zeros((length,), spec.wide)}

    def check_start(self, state: State, other: Compressor, info: Info) -> None:
        """Warn if steps of some elements will be very long, or if some will never move."""
        if info.size == 1 or isinstance(other, OnebitAdam):
            return
        kind, v = type(self).__name__, state["v"]
        if self.floor < QUIET and _has_quiet_elements(v):
            warnings.warn(
                f"{kind}: some elements have had hardly any gradient so far. "
                "Their variance is below 1e-6 of their tensor's mean, so that they move by "
                "more than 1000 learning rates in a step, and training may diverge. Pass "
                "floor=0.01, which bounds the variance from below.",
                RuntimeWarning,
                stacklevel=2,
            )
        still = int((namespace(v).to_numpy(v) == 0).sum())
        if still:
            warnings.warn(
                f"{kind}: {still} elements of {info.name!r} have had no gradient so far. Their "
                "variance is 0, so that they never move in the compressed stage. If they get "
                f"gradients later, take more warmup_steps, or pass skip=[{info.name!r}].",
                RuntimeWarning,
                stacklevel=2,
            )

    def exchange(self, grad: Tensor, state: State, info: Info) -> ExchangeGenerator:
        """Run stage 2: average the momentum at one bit an element, and return the direction."""
        xp = namespace(grad)
        m, own, room = yield from self.shared(grad, state, info, into=state["m"])
        state = {**state, **own, "m": m, "count": advanced(state["count"])}
        v = floored(state["v"], self.floor) if info.size > 1 else state["v"]
        direction = xp.mask_where_zero(self.direction({**state, "v": v}, info, room), state["v"])
        return xp.reshape(direction, xp.shape(grad)), state

    def shared(
        self, grad: Tensor, state: State, info: Info, into: Tensor = None
    ) -> Generator[Any, Any, tuple[Tensor, State, Tensor]]:
        """Return stage 2's momentum, the new residuals, and scratch memory. Consumes `grad`.

        The momentum may use the memory of `into`; on one rank it uses that of `state["m"]`.
        """
        xp, beta = namespace(grad), self.setting(info, "betas")[0]
        room = xp.reshape(grad, xp.shape(state["m"]))
        if info.size == 1:
            # Undoing the update of m needs the gradient, so its memory must not be overwritten.
            m = xp.momentum(state["m"], beta, room)
            return xp.mask_where_zero(m, state["v"]), {}, xp.copy(room)
        room = xp.lerp(room, beta, state["m"])
        total = xp.accumulate(state["error"], room)
        exchange = averaged(total, state["server"], info, self.scale, into)
        m, error, server = yield from exchange
        m = xp.mask_where_zero(m, state["v"])  # else a later stage 1 would divide it by eps
        return m, {"error": error, "server": server}, room


def _has_quiet_elements(v: Tensor) -> bool:
    """Return whether a variance is above 0, but below `QUIET` times its vector's mean."""
    xp = namespace(v)
    lacks = xp.mask_where_zero(floored(v, QUIET) - v, v)  # elements without variance do not move
    return bool(xp.to_numpy(lacks).any())


def floored(v: Tensor, floor: float, reference: Tensor = None) -> Tensor:
    """Return `v`, raised to at least `floor` times the mean of a vector (the last dimension).

    The vector is that of `reference`, by default of `v` itself.
    """
    if not floor:
        return v
    xp, reference = namespace(v), v if reference is None else reference
    *front, width = xp.shape(v)
    means = xp.reshape(norms(reference, "l1"), (*front, 1)) * (1 / width)
    return xp.maximum(v, xp.cast(means * floor, xp.dtype(v)))
