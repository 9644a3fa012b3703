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
    """SignSGD with majority vote: each rank sends signs, and the result is the majority's sign.

    Each rank sends one bit per element. For each element, the result is the sign that most ranks
    have sent, so elements are -1 or 1. The result is a direction, not a mean: the learning rate
    alone determines the size of a step (choose it as for Adam), and the inner optimizer must not
    have momentum.

    Algorithm 1 of "signSGD with Majority Vote is Communication Efficient and Fault Tolerant". No
    rank can outvote another, whatever it sends. With `momentum`, each rank sends the signs of its
    own momentum (Signum). The paper's factor (1 - momentum) does not change signs and is omitted.

    The paper's server is replaced by an alltoall, after which each rank counts the votes for one
    slice, and an allgather (ours). One bit has no room for zero. A zero on a rank, and a tie
    between an even number of ranks, count as positive at every other index and as negative at the
    rest; the next step reverses this (ours). Over two steps this averages to the zero of the
    paper's sign function, and it is the same on all ranks.

    Small and exempt tensors get signs as well (`plain`), because a learning rate for signs does not
    suit gradients: biases and norms would hardly move.

    Args:
        momentum: momentum coefficient in [0, 1). 0 is SignSGD; the paper's Signum uses 0.9. All
            levels of a policy must have the same. Default: 0.

    Traffic: for d elements on N ranks, an alltoall of d / 8 bytes and an allgather of d / (8 N)
    bytes, so traffic does not grow with the number of ranks.
    """

    summary = "SignSGD()", "n m / 8", "plain SGD, with learning rates as for Adam"
    output = "update"
    per_rank_state: ClassVar[tuple[str, ...]] = ("momentum",)
    batching = "alike"

    momentum: float = 0.0

    def __post_init__(self) -> None:
        check.below_one(self, "momentum", self.momentum)

    def init(self, spec: Spec, info: Info) -> State:
        state = super().init(spec, info)
        return state | ({"momentum": spec.zeros(spec.shape)} if self.momentum else {})

    def exchange(self, grad: Tensor, state: State, info: Info) -> ExchangeGenerator:
        """Send slices of signs to the ranks that count them, then gather the majorities."""
        xp, signed = namespace(grad), grad
        if self.momentum:
            signed = xp.accumulate_scaled(state["momentum"], self.momentum, grad)
            state = {"momentum": signed}
        signs = xp.pack_signs(signed, info.step)
        length = xp.shape(signs)[0]
        width = -(-length // info.size)  # bytes of a slice
        slices = xp.reshape(xp.pad_last(signs, info.size * width), (info.size, width))
        votes = yield Alltoall(slices)
        majorities = yield Allgather(majority(xp, xp.unstack(votes), info.step))
        signs = xp.concat(list(majorities))[:length]
        two = xp.full((1,), 2.0, "float32", xp.device(signs))
        size = math.prod(xp.shape(grad))
        return xp.sum_quantized([signs], [two], size, 1, 0.5, grad), state

    def plain(self) -> Compressor:
        """Return this compressor: all tensors get signs."""
        return self


def majority(xp: ModuleType, votes: Sequence[Tensor], step: Any) -> Tensor:
    """Return the majority of each bit over equally long vectors of bytes.

    If the number of voters is even, one voter is added that has every other bit set, and the
    complementary bits in the next step. Each bit has a counter; plane i holds bit i of all
    counters, eight counters per byte.
    """
    voters = list(votes)
    if len(voters) % 2 == 0:
        ones = xp.arange(1, xp.device(votes[0])) + 1
        voters.append(xp.cast(ones * (0x55 * (1 + step % 2)), "uint8"))
    planes: list[Tensor] = []  # the count's bits, lowest first
    for number, carry in enumerate(voters, 1):
        for i, plane in enumerate(planes):
            planes[i], carry = plane ^ carry, plane & carry
        if number.bit_length() > len(planes):
            planes.append(carry)
    return _at_least(planes, len(voters) // 2 + 1)


def _at_least(planes: Sequence[Tensor], least: int) -> Tensor:
    """Return the bits with a count of at least `least`: the carry of count + 2^planes - least."""
    added, carry = 2 ** len(planes) - least, planes[0] ^ planes[0]
    for i, plane in enumerate(planes):
        carry = plane | carry if added >> i & 1 else plane & carry
    return carry


@dataclass(frozen=True)
class EFSignSGD(Codec):
    """SignSGD with error feedback: signs times the mean magnitude, averaged over the ranks.

    Each rank sends the signs of residual + gradient and one scale, the mean magnitude of this sum.
    All ranks gather all messages and average them; each rank keeps its quantization error in its
    residual.

    Algorithm 1 of "Error Feedback Fixes SignSGD and other Gradient Compression Schemes"
    (Karimireddy, Rebjock, Stich & Jaggi, ICML 2019): for p = gradient + residual with d elements,
    a rank sends (|p|_1 / d) sign(p).

    The paper multiplies p by the learning rate. Here (ours) the residual is in units of the
    gradient, so it can be handed over to other levels, and any optimizer can follow. The mean of
    the ranks' values is not compressed again (ours).

    Traffic: an allgather of d / 8 + 4 bytes, so traffic grows with the number of ranks. On fewer
    than 64 ranks it is less than for fp32.
    """

    summary = "EFSignSGD()", "n m / 8, by allgather", "few ranks"
    batching = "alike"
    contractive: ClassVar[bool] = True
    codes: ClassVar[tuple[int, ...]] = (1,)

    def encode(self, x: Tensor, info: Info) -> Message:
        """Return the signs, and for each tensor the step from -scale to scale."""
        xp, size = namespace(x), namespace(x).shape(x)[-1]
        return xp.pack_signs(x), xp.bucket_norms(x, size, "mean") * 2

    def mean(self, messages: Sequence[Message], like: Tensor, info: Info) -> Tensor:
        xp = namespace(like)
        return xp.sum_quantized(*shares(messages), xp.shape(like)[-1], 1, 0.5, like)

    def remove(self, total: Tensor, message: Message, info: Info) -> Tensor:
        xp = namespace(total)
        return xp.subtract_quantized(total, *message, xp.shape(total)[-1], 1, 0.5)
