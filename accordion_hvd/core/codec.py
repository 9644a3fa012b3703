"""Codecs: methods whose ranks send one message each, and what makes compressors of them.

A codec says how a tensor becomes a message (`encode`) and what messages mean (`decode`, or `mean`
for those of all ranks at once). It knows neither error feedback nor collectives, so whoever needs
no more than C(x) calls it directly. `Gathered` and `ErrorFeedback` make compressors of codecs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from accordion_hvd import check
from accordion_hvd.core.base import Allgather, Allreduce, Compressor, ExchangeGenerator, Info, State
from accordion_hvd.ops import namespace
from accordion_hvd.ops.spec import Spec, Tensor

Message = tuple[Any, ...]
"""The parts of a message, each of which travels as one tensor."""

Reader = Callable[[Tensor], tuple[Any, Tensor]]
"""Parses a part that was received; see `Request.decode`."""


class Codec(Compressor):
    """A method of one message; where it serves by itself, ranks gather or average all messages.

    A subclass is a frozen dataclass that defines `encode`, and `decode` or `mean`.

    Attributes:
        feedback: whether it has error feedback where it serves by itself, as biased methods need.
        uneven: whether the size of a message depends on values.
        summed: whether messages have one part, and the mean of these parts, an allreduce, means the
            mean of what they mean. What `encode_accumulating` returns behind that part stays with
            this rank, for `mean` and `remove`.
    """

    feedback: ClassVar[bool] = True
    uneven: ClassVar[bool] = False
    summed: ClassVar[bool] = False

    def layout(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape in which a tensor is encoded: a vector, unless a subclass says more.

        Where small tensors share a call (`batching = "alike"`), there is one more dimension before.
        """
        return (math.prod(shape),)

    def encode(self, x: Tensor, info: Info) -> Message:
        """Return the message that stands for `x`, fp32, in the `layout`."""
        raise TypeError(f"{type(self).__name__} does not define encode()")

    def readers(self, shape: tuple[int, ...]) -> tuple[Reader | None, ...]:
        """Return what parses each part of a message for a tensor of this layout; () for nothing."""
        return ()

    def decode(self, message: Message, like: Tensor, info: Info) -> Tensor:
        """Return the meaning of a message, fp32, in the shape of `like`, whose memory may be used.

        Args:
            message: parts as `readers` parse them.
            like: of the encoded tensor's shape.
            info: of the sender's exchange.
        """
        if type(self).mean is Codec.mean:
            raise TypeError(f"{type(self).__name__} defines neither decode() nor mean()")
        return self.mean([message], like, info)

    def mean(self, messages: Sequence[Message], like: Tensor, info: Info) -> Tensor:
        """Return the mean of what the ranks' messages mean; see `decode`."""
        xp, total = namespace(like), None
        for message in messages:
            part = self.decode(message, xp.copy(like), info)
            total = part if total is None else total + part
        return total * (1 / len(messages))  # type: ignore[operator]

    # --------------------------------------------- for error feedback: override them to be faster
    def encode_accumulating(self, error: Tensor, x: Tensor, info: Info) -> tuple[Message, Tensor]:
        """Return the message for error + x, and that sum. Consumes `error`, so that undo works."""
        total = namespace(error).accumulate(error, x)
        return self.encode(total, info), total

    def remove(self, total: Tensor, message: Message, info: Info) -> Tensor:
        """Return `total` without the meaning of its message. Consumes `total`, for good."""
        xp = namespace(total)
        room = xp.zeros(xp.shape(total), "float32", xp.device(total))
        return total - self.decode(message, room, info)

    # ----------------------------------------------------------------------- as a compressor
    def init(self, spec: Spec, info: Info) -> State:
        """`error`, in the layout, where there is feedback."""
        state = super().init(spec, info)
        return state | ({"error": spec.zeros(self.layout(spec.shape))} if self.feedback else {})

    def exchange(self, grad: Tensor, state: State, info: Info) -> ExchangeGenerator:
        """Run one allgather (or allreduce), with error feedback or without."""
        serve = with_feedback if self.feedback else without_feedback
        return serve(self, grad, state, info)


def average(
    codec: Codec, message: Message, room: Tensor, info: Info
) -> Generator[Any, Any, tuple[Tensor, Message]]:
    """Send a message to all ranks; return the mean of all messages' meanings, and this one parsed.

    Args:
        codec: whose message it is.
        message: from `Codec.encode`.
        room: of the encoded tensor's shape; its memory may hold the mean.
        info: of the exchange.
    """
    if codec.summed:
        sent = yield Allreduce(message[0])
        return codec.mean([(sent, *message[1:])], room, info), message
    readers = codec.readers(namespace(room).shape(room)) or (None,) * len(message)
    requests = tuple(
        Allgather(part, uneven=codec.uneven, decode=reader)
        for part, reader in zip(message, readers, strict=True)
    )
    if len(requests) == 1:  # the form in which compressors that wrap others expect it
        messages: list[Message] = [(part,) for part in (yield requests[0])]
    else:
        messages = list(zip(*(yield requests), strict=True))
    return codec.mean(messages, room, info), messages[info.rank]


def parse(codec: Codec, message: Sequence[Tensor], shape: tuple[int, ...], sender: int) -> Message:
    """Return a message as `Codec.decode` takes it.

    Args:
        codec: the sender's.
        message: as it came.
        shape: of what was encoded.
        sender: rank that is named where the message does not parse.

    Raises:
        PayloadError: it does not.
    """
    parsed: list[Any] = []
    for part, reader in zip(message, codec.readers(shape) or (None,) * len(message), strict=True):
        if reader is None:
            parsed.append(part)
            continue
        value, doubt = reader(part)
        xp = namespace(doubt)
        parsed.append(xp.raise_on_invalid(value, doubt, [sender] * xp.shape(doubt)[0]))
    return tuple(parsed)


def shares(messages: Sequence[Message]) -> tuple[list[Tensor], list[Tensor]]:
    """Return codes, and scales divided by the number of ranks, of messages of such two parts."""
    codes, scales = zip(*messages, strict=True)
    return list(codes), [scale * (1 / len(messages)) for scale in scales]


def without_feedback(codec: Codec, grad: Tensor, state: State, info: Info) -> ExchangeGenerator:
    """Average what is left of gradients; the rest is lost."""
    xp, shape = namespace(grad), namespace(grad).shape(grad)
    x = xp.cast(grad, "float32")
    x = x if codec.batching == "any" else xp.reshape(x, codec.layout(shape))
    mean, _ = yield from average(codec, codec.encode(x, info), x, info)
    return xp.reshape(mean, shape), state


def with_feedback(codec: Codec, grad: Tensor, state: State, info: Info) -> ExchangeGenerator:
    """Average what is sent of error + gradient; the rest is the new `error`."""
    xp, shape = namespace(grad), namespace(grad).shape(grad)
    x = xp.reshape(grad, xp.shape(state["error"]))
    message, total = codec.encode_accumulating(state["error"], x, info)
    mean, mine = yield from average(codec, message, x, info)
    error = codec.remove(total, mine, info)
    return xp.reshape(mean, shape), {"error": xp.reshape(error, xp.shape(total))}


@dataclass(frozen=True)
class Wrapper(Compressor):
    """A compressor that is made of a codec.

    Args:
        codec: such as `TopK(0.01)`, whose own error feedback is left out.
    """

    per_rank_state: ClassVar[tuple[str, ...]] = ()

    codec: Codec

    def __post_init__(self) -> None:
        """Raises: ValueError when codec is none."""
        if not isinstance(self.codec, Codec):
            check.refuse(self, "codec", self.codec, "a Codec, such as TopK(0.01) or QSGD(4)")

    @property
    def batching(self) -> str:  # type: ignore[override]
        """Tensors of one shape may share a call, as there is a state for each, if for the codec."""
        return "alike" if self.codec.batching else ""

    def accept(self, spec: Spec, name: str) -> None:
        """Refuse tensors that compressors in general, or the codec, refuse."""
        super().accept(spec, name)
        self.codec.accept(spec, name)
