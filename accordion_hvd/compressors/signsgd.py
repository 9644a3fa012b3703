"""SignSGD with majority vote (Bernstein et al., ICML 2018, ICLR 2019), and with error feedback."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar

from accordion_hvd import check
from accordion_hvd.core.base import Allgather, Alltoall, Compressor, ExchangeGenerator, Info, State
from accordion_hvd.core.codec import Codec, Message, shares
from accordion_hvd.ops import namespace
from accordion_hvd.ops.spec import Spec, Tensor


@dataclass(frozen=True)
class SignSGD(Compressor):
    """Each rank sends signs; what is returned is, element by element, the sign most ranks sent.

    Algorithm 1 of "signSGD with Majority Vote is Communication Efficient and Fault Tolerant": one
    bit an element up, one bit down. The result is a direction of elements -1 and 1, not a mean:
    the learning rate alone says how far a step goes (choose it as for Adam), and an optimizer with
    momentum must not be added. With `momentum` each rank sends the signs of its own momentum
    (Signum; the paper's (1 - momentum) leaves signs as they are, and so is left out).

    One bit has no room for zero. Where a rank has a zero, and where an even number of ranks ties,
    every other position counts as positive, the others at the next step (ours): over two steps
    that is the zero of the paper's sign function, and it is the same on all ranks.

    The paper's server becomes an alltoall, in which each rank counts one slice's votes, and an
    allgather (ours). A rank can outvote no other, whatever it sends.

    All tensors get signs, small and exempt ones too (`plain`), since a learning rate for signs is
    none for gradients: with means beside signs, biases and norms would hardly move.

    Sent, of a tensor with d elements on n ranks: an alltoall of d / 8 bytes, an allgather of
    d / (8 n); so traffic does not grow with the ranks.

    Args:
        momentum: in [0, 1); 0 is SignSGD, the paper's Signum has 0.9. Levels of one policy must
            agree in it.
    """

    output: ClassVar[str] = "update"
    per_rank_state: ClassVar[tuple[str, ...]] = ("momentum",)
    batching: ClassVar[str] = "alike"

    momentum: float = 0.0

    def __post_init__(self) -> None:
        """Raises: ValueError when momentum is outside [0, 1)."""
        check.below_one(self, "momentum", self.momentum)

    def init(self, spec: Spec, info: Info) -> State:
        """`momentum` in the gradient's shape, if there is any."""
        state = super().init(spec, info)
        return state | ({"momentum": spec.zeros(spec.shape)} if self.momentum else {})

    def exchange(self, grad: Tensor, state: State, info: Info) -> ExchangeGenerator:
        """Slices of signs to those who count them; what has won to all."""
        xp, signed = namespace(grad), grad
        if self.momentum:
            signed = xp.accumulate_scaled(state["momentum"], self.momentum, grad)
            state = {"momentum": signed}
        signs = xp.pack_signs(signed, info.step)
        length = xp.shape(signs)[0]
        width = -(-length // info.size)  # bytes of a slice
        slices = xp.reshape(xp.pad_last(signs, info.size * width), (info.size, width))
        votes = yield Alltoall(slices)
        won = yield Allgather(majority(xp, xp.unstack(votes), info.step))
        signs = xp.concat(list(won))[:length]
        two = xp.full((1,), 2.0, "float32", xp.device(signs))
        size = math.prod(xp.shape(grad))
        return xp.sum_quantized([signs], [two], size, 1, 0.5, grad), state

    def plain(self) -> Compressor:
        """Signs, as for all others."""
        return self


def majority(xp: ModuleType, votes: Sequence[Tensor], step: Any) -> Tensor:
    """For each bit of equal vectors of bytes, what most of them have.

    An even number of voters is joined by one that has every other bit, the others at the next
    step. Counts are kept bit by bit, each plane of them for eight votes a byte.
    """
    voters = list(votes)
    if len(voters) % 2 == 0:
        one = xp.arange(1, xp.device(votes[0])) + 1
        voters.append(xp.cast(one * (0x55 * (1 + step % 2)), "uint8"))
    planes: list[Tensor] = []  # the count's bits, lowest first
    for number, carry in enumerate(voters, 1):
        for i, plane in enumerate(planes):
            planes[i], carry = plane ^ carry, plane & carry
        if number.bit_length() > len(planes):
            planes.append(carry)
    return _at_least(planes, len(voters) // 2 + 1)


def _at_least(planes: Sequence[Tensor], least: int) -> Tensor:
    """Return the bits whose count is `least` or more: the carry when 2^planes - least is added."""
    added, carry = 2 ** len(planes) - least, planes[0] ^ planes[0]
    for i, plane in enumerate(planes):
        carry = plane | carry if added >> i & 1 else plane & carry
    return carry


@dataclass(frozen=True)
class EFSignSGD(Codec):
    """Signs times the mean magnitude, with error feedback: a mean like any other.

    Algorithm 1 of "Error Feedback Fixes SignSGD and other Gradient Compression Schemes"
    (Karimireddy, Rebjock, Stich & Jaggi, ICML 2019): of p = gradient + error each rank sends
    (|p|_1 / d) sign(p), and keeps the rest. The paper puts the learning rate into p; here (ours)
    the error is in units of the gradient, so it can be handed over and any optimizer follows. The
    ranks' values are averaged as they come, with no second compression of the mean (ours).

    Sent: an allgather of d / 8 + 4 bytes, so traffic grows with the ranks: below 64 of them it is
    less than fp32's.
    """

    batching: ClassVar[str] = "alike"
    contractive: ClassVar[bool] = True

    def encode(self, x: Tensor, info: Info) -> Message:
        """Signs, and for each tensor the step from -scale to scale."""
        xp, size = namespace(x), namespace(x).shape(x)[-1]
        return xp.pack_signs(x), xp.bucket_norms(x, size, "mean") * 2

    def mean(self, messages: Sequence[Message], like: Tensor, info: Info) -> Tensor:
        """Add up signs times scales."""
        xp = namespace(like)
        return xp.sum_quantized(*shares(messages), xp.shape(like)[-1], 1, 0.5, like)

    def remove(self, total: Tensor, message: Message, info: Info) -> Tensor:
        """Subtract in place."""
        xp = namespace(total)
        return xp.subtract_quantized(total, *message, xp.shape(total)[-1], 1, 0.5)
