"""Codecs, which are methods with one message per rank, and the functions that exchange messages.

A codec encodes a tensor as a message (`encode`) and decodes messages (`decode`, or `mean` for the
messages of all ranks at once). These methods involve neither error feedback nor collectives, so
code that needs only C(x) calls them directly. Used as a compressor, a codec exchanges its messages
by itself; wrappers such as `EF21` make other compressors from it.
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
"""A function that parses a received part and returns `(value, invalid)`; see `Request.decode`."""


class Codec(Compressor):
    """A method with one message per rank; as a compressor, it gathers or averages the messages.

    A subclass is a frozen dataclass that defines `encode`, and `decode` or `mean`.

    Attributes:
        feedback: whether the codec, used as a compressor, has error feedback, which biased methods
            need.
        uneven: whether the size of a message depends on values.
        summed: whether only the first part of a message is sent, and the mean of these parts, an
            allreduce, decodes to the mean of the decoded messages. Any further parts stay on this
            rank, for `mean` and `remove`.
        unbiased: whether a decoded message is the tensor in expectation, which `Diana` needs.
        rows: whether readers also take rows, one from each rank (`Allgather.rows`). Ignored if the
            codec is `uneven`.
        codes: bits of the sections of the first part of a message, with one code per element, as
            `quantization.pack_bits` packs them. The first dimension of other parts then counts
            tensors or `run`s, so that a message can be cut. () if messages have another form.
        shared: name of the argument that is the length of a `run`; "" if there is none.
    """

    feedback: ClassVar[bool] = True
    uneven: ClassVar[bool] = False
    summed: ClassVar[bool] = False
    unbiased: ClassVar[bool] = False
    rows: ClassVar[bool] = False
    codes: ClassVar[tuple[int, ...]] = ()
    shared: ClassVar[str] = ""

    def run(self, layout: tuple[int, ...]) -> int:
        """Return how many neighbours share a scale: by default a column or, padded, a vector."""
        if self.shared:
            return int(getattr(self, self.shared))
        length, *columns = layout
        return length if columns else length + -length % 8

    def specialize(self, info: Info) -> Codec:
        """Return the codec that serves the tensor of an exchange; by default, this codec.

        A codec whose arguments depend on the tensor's shape (`info.shape`) overrides it. The result
        has the same `layout`, and the same class attributes.

        Args:
            info: facts about the exchange.
        """
        return self

    def layout(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape in which a tensor is encoded; by default, that of a vector.

        Small tensors that share a call (`batching = "alike"`) have one more dimension in front.
        """
        return (math.prod(shape),)

    def encode(self, x: Tensor, info: Info) -> Message:
        """Return the message of a tensor.

        Args:
            x: the tensor, fp32, in the `layout`.
            info: facts about the exchange.
        """
        raise TypeError(f"{type(self).__name__} does not define encode()")

    def readers(self, shape: tuple[int, ...]) -> tuple[Reader | None, ...]:
        """Return one reader per part of a message, None for parts that need no parsing.

        An empty tuple means that no part needs parsing.

        Args:
            shape: shape of the encoded tensor.
        """
        return ()

    def decode(self, message: Message, like: Tensor, info: Info) -> Tensor:
        """Return the tensor that a message encodes, fp32, in the shape of `like`.

        Args:
            message: parts of the message, as the `readers` return them.
            like: a tensor of the encoded tensor's shape, which may be overwritten.
            info: facts about the sender's exchange.
        """
        if type(self).mean is Codec.mean:
            raise TypeError(f"{type(self).__name__} defines neither decode() nor mean()")
        return self.mean([message], like, info)

    def mean(self, messages: Sequence[Message], like: Tensor, info: Info) -> Tensor:
        """Return the mean of the tensors that the ranks' messages encode; see `decode`."""
        xp, total = namespace(like), None
        for message in messages:
            part = self.decode(message, xp.copy(like), info)
            total = part if total is None else total + part
        return total * (1 / len(messages))  # type: ignore[operator]

    # ------------------------------------------------ error feedback: override these for speed
    def encode_accumulating(self, error: Tensor, x: Tensor, info: Info) -> tuple[Message, Tensor]:
        """Return the message of error + x, and error + x.

        Consumes `error`, with operations that can be undone.
        """
        total = namespace(error).accumulate(error, x)
        return self.encode(total, info), total

    def remove(self, total: Tensor, message: Message, info: Info) -> Tensor:
        """Return the residual: `total` minus the tensor that `message` encodes.

        Consumes `total`, which need not be undone.
        """
        xp = namespace(total)
        buffer = xp.zeros(xp.shape(total), "float32", xp.device(total))
        return total - self.decode(message, buffer, info)

    # --------------------------------------------------------------------- use as a compressor
    def init(self, spec: Spec, info: Info) -> State:
        """Return the state: with error feedback, the `error`, in the layout."""
        state = super().init(spec, info)
        return state | ({"error": spec.zeros(self.layout(spec.shape))} if self.feedback else {})

    def exchange(self, grad: Tensor, state: State, info: Info) -> ExchangeGenerator:
        """Run one allgather, or one allreduce if `summed`, with or without error feedback."""
        serve = with_feedback if self.feedback else without_feedback
        return serve(self, grad, state, info)


def average(
    codec: Codec, message: Message, room: Tensor, info: Info
) -> Generator[Any, Any, tuple[Tensor, Message]]:
    """Send this rank's message to all ranks and average the decoded messages.

    Args:
        codec: the codec of the message.
        message: this rank's message, from `Codec.encode`.
        room: a tensor of the encoded tensor's shape, which may be overwritten.
        info: facts about the exchange.

    Returns:
        The mean of the tensors that all messages encode, and this rank's message, parsed.
    """
    if codec.summed:
        combined = yield Allreduce(message[0])
        return codec.mean([(combined, *message[1:])], room, info), message
    messages = yield from gathered(codec, message, namespace(room).shape(room))
    return codec.mean(messages, room, info), messages[info.rank]


def gathered(
    codec: Codec, message: Message, shape: tuple[int, ...]
) -> Generator[Any, Any, list[Message]]:
    """Send this rank's message to all ranks; return the messages of all ranks, parsed.

    Args:
        shape: shape of the encoded tensor.
    """
    readers = codec.readers(shape) or (None,) * len(message)
    requests = tuple(
        Allgather(part, uneven=codec.uneven, decode=reader, rows=codec.rows and not codec.uneven)
        for part, reader in zip(message, readers, strict=True)
    )
    if len(requests) == 1:  # the form in which compressors that wrap others expect it
        return [(part,) for part in (yield requests[0])]
    return list(zip(*(yield requests), strict=True))


def parse(codec: Codec, message: Sequence[Tensor], shape: tuple[int, ...], sender: int) -> Message:
    """Parse a received message for `Codec.decode`.

    Args:
        codec: codec of the sender.
        message: parts of the message, as received.
        shape: shape of the encoded tensor.
        sender: rank that the error names.

    Raises:
        PayloadError: if the message does not parse.
    """
    parsed: list[Any] = []
    for part, reader in zip(message, codec.readers(shape) or (None,) * len(message), strict=True):
        if reader is None:
            parsed.append(part)
            continue
        value, invalid = reader(part)
        xp = namespace(invalid)
        parsed.append(xp.raise_on_invalid(value, invalid, [sender] * xp.shape(invalid)[0]))
    return tuple(parsed)


def shares(messages: Sequence[Message]) -> tuple[list[Tensor], list[Tensor]]:
    """Split messages `(codes, scale)` into codes, and scales divided by the number of messages."""
    codes, scales = zip(*messages, strict=True)
    return list(codes), [scale * (1 / len(messages)) for scale in scales]


def without_feedback(codec: Codec, grad: Tensor, state: State, info: Info) -> ExchangeGenerator:
    """Average the ranks' C(gradient), without error feedback."""
    xp, shape, codec = namespace(grad), namespace(grad).shape(grad), codec.specialize(info)
    x = xp.cast(grad, "float32")
    if codec.batching != "any":
        stacked = 0 < math.prod(info.shape or (0,)) < math.prod(shape)
        x = xp.reshape(x, (-1, *codec.layout(info.shape)) if stacked else codec.layout(shape))
    mean, _ = yield from average(codec, codec.encode(x, info), x, info)
    return xp.reshape(mean, shape), state


def with_feedback(codec: Codec, grad: Tensor, state: State, info: Info) -> ExchangeGenerator:
    """Average the ranks' C(x), x = error + gradient; the new `error` is x - C(x)."""
    xp, shape, codec = namespace(grad), namespace(grad).shape(grad), codec.specialize(info)
    x = xp.reshape(grad, xp.shape(state["error"]))
    message, total = codec.encode_accumulating(state["error"], x, info)
    mean, parsed = yield from average(codec, message, x, info)
    error = codec.remove(total, parsed, info)
    return xp.reshape(mean, shape), {"error": xp.reshape(error, xp.shape(total))}


@dataclass(frozen=True)
class Wrapper(Compressor):
    """Base class of compressors that are made from a codec.

    Args:
        codec: a codec such as `TopK(0.01)`; its own error feedback is not used.
    """

    per_rank_state: ClassVar[tuple[str, ...]] = ()

    codec: Codec

    def __post_init__(self) -> None:
        if not isinstance(self.codec, Codec):
            check.refuse(self, "codec", self.codec, "a Codec, such as TopK(0.01) or QSGD(4)")

    @property
    def batching(self) -> str:  # type: ignore[override]
        """Return "alike" if the codec supports batching, else ""; each tensor has its own state."""
        return "alike" if self.codec.batching else ""

    def accept(self, spec: Spec, name: str) -> None:
        super().accept(spec, name)
        self.codec.accept(spec, name)


# ------------------------------------------------------------------------------------------- shifts
class Shifted(Wrapper):
    """Base class of methods in which rank i sends C(g_i - h_i) for its gradient g_i and shift h_i.

    With m_i the decoded message of rank i, h_i <- h_i + alpha m_i. Each rank also tracks h, the
    mean of all h_i. The state is `local` (h_i) and `mean` (h), both fp32 in the codec's layout. The
    residual of other levels is not `additive`: the next message would forget it.

    Attributes:
        alpha: step size of the shifts.
        ahead: whether the result is the new h (EF21) instead of the old h plus the mean of all
            m_i (DIANA).
    """

    per_rank_state: ClassVar[tuple[str, ...]] = ("local",)
    alpha: float = 1.0
    ahead: ClassVar[bool] = False
    additive = False

    def init(self, spec: Spec, info: Info) -> State:
        """Return the state: zeros, so that the first message encodes the gradient itself."""
        state, layout = super().init(spec, info), self.codec.layout(spec.shape)
        return state | {"local": spec.zeros(layout), "mean": spec.zeros(layout)}

    def exchange(self, grad: Tensor, state: State, info: Info) -> ExchangeGenerator:
        xp, shape = namespace(grad), namespace(grad).shape(grad)
        codec = self.codec.specialize(info)
        local, before = state["local"], state["mean"]
        difference = xp.cast(xp.reshape(grad, xp.shape(local)), "float32") - local
        message, buffer = codec.encode(difference, info), xp.copy(difference)
        mean, parsed = yield from average(codec, message, difference, info)
        decoded = codec.decode(parsed, buffer, info)
        after = before + mean * self.alpha
        result = xp.copy(after) if self.ahead else before + mean  # the optimizer may overwrite it
        return xp.reshape(result, shape), {"local": local + decoded * self.alpha, "mean": after}

    def warm_start(self, state: State, other: Compressor, other_state: State) -> State:
        """Take over h_i and h from another codec with the same layout."""
        if not isinstance(other, Shifted):
            return state
        layouts = [namespace(x["mean"]).shape(x["mean"]) for x in (state, other_state)]
        return state if layouts[0] != layouts[1] else {**state, **other_state}

    def deactivate(self, state: State) -> State:
        """Return nothing: gradients change while another level serves, and shifts would return."""
        return {}

    def rescale(self, states: Sequence[State], spec: Spec, info: Info) -> State:
        """Set all h_i to h, so that their mean is h on any number of ranks."""
        if not states[0]:  # of a level that does not serve
            return {}
        return {"local": states[0]["mean"], "mean": states[0]["mean"]}

    def rescale_from_one(self, state: State, spec: Spec, info: Info) -> State:
        return self.rescale([state], spec, info)
