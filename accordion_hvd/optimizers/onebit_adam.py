"""1-bit Adam (Tang et al., ICML 2021)."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, ClassVar

from accordion_hvd import check
from accordion_hvd.core.base import ExchangeGenerator, Info, State, Tensor
from accordion_hvd.ops import namespace
from accordion_hvd.ops.spec import Spec
from accordion_hvd.optimizers.adam import Adam
from accordion_hvd.optimizers.signs import SCALES, Chunks, advanced, averaged, norms
from accordion_hvd.policies.warmup import WarmUp


@dataclass(frozen=True)
class OnebitAdam(Adam):
    """Adam until the variance is stable; then momentum at one bit, over the variance frozen.

    Stage 1 is `Adam`. Stage 2, at each step, on each rank with its own gradient g:
    p = b1 m + (1 - b1) g, where m is what all ranks had after the step before;
    m <- compressed allreduce of p with both errors' feedback (`signs.averaged`);
    u = m' / (sqrt(v') + eps), where v stays as it was at the end of stage 1. Weight decay is
    decoupled, as in the reference.

    The paper's (and DeepSpeed's): stages, compression, scale "l2", the automatic end of stage 1
    (`policy.WarmUp`). Ours: bias corrections (`bias_correction=False` is the reference, which has
    none; v' keeps that of the last step of stage 1); elements whose variance is zero at the switch
    do not move (the reference takes a mask for them, without which they run away, as a sign is
    never zero); on one rank nothing is compressed, as in the reference.

    Under `Accordion` critical regimes are in stage 1, where v goes on from where it was frozen,
    and others in stage 2, over the variance of the last critical regime; errors wait meanwhile.

    Sent in stage 2, of a tensor with d elements on n ranks: an alltoall of d / 8 bytes, an
    allgather of d / (8 n), and two scales.

    Args:
        warmup_steps: steps of stage 1, at least 1, or "auto": see `policy.WarmUp`.
        betas: b1 and b2, in [0, 1).
        eps: at least 0.
        bias_correction: whether moments that began at zero are scaled up.
        scale: "l2" keeps the norm of what is sent; "l1" is the least squares one, and better where
            few elements are large.
        floor: in stage 2 an element's variance counts as at least this multiple of the mean of its
            tensor's, in [0, 1]. A sign moves all elements by the same momentum, which is divided
            by a root: elements that hardly ever had a gradient in stage 1 are thrown far away,
            and with them the loss (ours; 0 is the reference).
    """

    rescale_note: ClassVar[str] = "the mean of the ranks' residuals is every rank's error"
    per_rank_state: ClassVar[tuple[str, ...]] = ("error", "server")
    decoupled_weight_decay: ClassVar[bool] = True

    warmup_steps: int | str = "auto"
    scale: str = "l2"
    floor: float = 0.0

    def __post_init__(self) -> None:
        """Raises: ValueError when an argument is not what it must be."""
        super().__post_init__()
        if self.warmup_steps != "auto":
            check.integer(self, "warmup_steps", self.warmup_steps, least=1)  # v must be something
        check.one_of(self, "scale", self.scale, SCALES)
        if not check.is_number(self.floor) or not 0 <= self.floor <= 1:
            check.refuse(self, "floor", self.floor, "a number in [0, 1]")

    def dense(self) -> Adam:
        """Return the optimizer of stage 1."""
        return Adam(self.betas, self.eps, self.bias_correction)

    def policy(self) -> Any:
        """Stage 1 for `warmup_steps`, then stage 2."""
        return WarmUp(self.dense(), self, self.warmup_steps)

    def init(self, spec: Spec, info: Info) -> State:
        """Return the state of `Adam`, `error` of this rank's momentum, `server` of its chunk."""
        length = Chunks(spec.size, info.size).length
        own = {"error": spec.zeros((spec.size,), spec.wide)}
        return super().init(spec, info) | own | {"server": spec.zeros((length,), spec.wide)}

    def exchange(self, grad: Tensor, state: State, info: Info) -> ExchangeGenerator:
        """Stage 2: two rounds, signs to those who average them, and signs of averages to all."""
        xp = namespace(grad)
        m, own, room = yield from self.shared(grad, state, info, into=state["m"])
        state = {**state, **own, "m": m, "count": advanced(state["count"])}
        v = floored(state["v"], self.floor) if info.size > 1 else state["v"]
        direction = xp.mask_where_zero(self.direction({**state, "v": v}, info, room), state["v"])
        return xp.reshape(direction, xp.shape(grad)), state

    def shared(
        self, grad: Tensor, state: State, info: Info, into: Tensor = None
    ) -> Generator[Any, Any, tuple[Tensor, State, Tensor]]:
        """Stage 2's momentum on all ranks, errors, and memory that may be used; consumes `grad`.

        The momentum may be in the memory of `into`; on one rank it is in that of `state["m"]`.
        """
        xp, beta = namespace(grad), self.setting(info, "betas")[0]
        room = xp.reshape(grad, xp.shape(state["m"]))
        if info.size == 1:
            # To take m's step back takes the gradient, whose memory is therefore not room.
            m = xp.momentum(state["m"], beta, room)
            return xp.mask_where_zero(m, state["v"]), {}, xp.copy(room)
        room = xp.lerp(room, beta, state["m"])
        total = xp.accumulate(state["error"], room)
        talk = averaged(total, state["server"], info, self.scale, into)
        m, error, server = yield from talk
        m = xp.mask_where_zero(
            m, state["v"]
        )  # else it would be divided by eps in a stage 1 to come
        return m, {"error": error, "server": server}, room


def floored(v: Tensor, floor: float) -> Tensor:
    """`v`, each element at least `floor` times the mean of its vector (the last dimension)."""
    if not floor:
        return v
    xp = namespace(v)
    *front, width = xp.shape(v)
    means = xp.reshape(norms(v, "l1"), (*front, 1)) * (1 / width)
    return xp.maximum(v, xp.cast(means * floor, xp.dtype(v)))
