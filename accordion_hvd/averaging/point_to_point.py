"""Messages of compressors from one rank to another, without an average over ranks.

A codec encodes and decodes such messages itself. For other compressors, the sender runs the
exchange generator as if there were only one rank: the tensors of its requests are the message,
and the mean over this one rank is the decoded value. The receiver runs the same exchange
generator with the message as the answers to its requests. So every compressor whose messages
have a fixed size works here without additional code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from accordion_hvd.core.base import Allgather, Compressor, Info, Request, State, Tensor
from accordion_hvd.core.codec import Codec, parse
from accordion_hvd.core.running import drive
from accordion_hvd.ops import namespace

Parcel = tuple[Tensor, ...]


def encode(
    compressor: Compressor, x: Tensor, state: State, info: Info
) -> tuple[Parcel, Tensor, State]:
    """Encode `x`; return the message, its decoded value, and the state for the next message.

    There is no error feedback: the part of `x` that is not sent is not retained.

    Args:
        compressor: a compressor that returns the mean of gradients.
        x: fp32 tensor; its memory may be reused.
        state: state after the previous message, {} for the first one.
        info: information about the exchange; `info.rank` is the sender.

    Raises:
        ValueError: if messages of the compressor do not have a fixed size.
    """
    if isinstance(compressor, Codec):
        return (*_encode(compressor, x, info), {})
    message: list[Tensor] = []

    def answer(request: Request) -> Any:
        if isinstance(request, Allgather) and request.uneven:
            _refuse(compressor)
        xp = namespace(request.tensor)
        message.append(xp.copy(request.tensor))
        return _answer(request, xp.copy(request.tensor), info.rank)

    state = compressor.init(namespace(x).spec(x), info) | state
    value, state = _run(compressor, x, state, _single_rank(info, info.rank), answer)
    return tuple(message), value, compressor.deactivate(state)


def decode(
    compressor: Compressor, message: Parcel, like: Tensor, info: Info, sender: int
) -> Tensor:
    """Decode a message of another rank.

    Args:
        like: fp32 tensor in the shape of the encoded tensor.
        info: information about the receiver's exchange, at the same step.
    """
    xp = namespace(like)
    if isinstance(compressor, Codec):
        return _decode(compressor, message, like, _single_rank(info, sender), sender)
    parts = iter(message)
    zeros = xp.zeros(xp.shape(like), "float32", xp.device(like))
    state = compressor.init(xp.spec(zeros), info)
    answer = lambda request: _answer(request, next(parts), sender)  # noqa: E731
    return _run(compressor, zeros, state, _single_rank(info, sender), answer)[0]


def _encode(codec: Codec, x: Tensor, info: Info) -> tuple[Parcel, Tensor]:
    if codec.uneven:
        _refuse(codec)
    xp, sender, info = namespace(x), info.rank, _single_rank(info, info.rank)
    message = codec.encode(xp.reshape(x, codec.layout(xp.shape(x))), info)
    return message, _decode(codec, message, x, info, sender)


def _decode(codec: Codec, message: Parcel, like: Tensor, info: Info, sender: int) -> Tensor:
    xp, shape = namespace(like), namespace(like).shape(like)
    layout = codec.layout(shape)
    room = xp.zeros(layout, "float32", xp.device(like))
    return xp.reshape(codec.decode(parse(codec, message, layout, sender), room, info), shape)


def _refuse(compressor: Compressor) -> None:
    raise ValueError(
        f"{compressor!r} sends messages whose size changes, but point-to-point messages must have "
        "a fixed size."
    )


def _single_rank(info: Info, sender: int) -> Info:
    return replace(info, rank=0, size=1, name=f"{info.name}.{sender}", hosts=())


def _run(
    compressor: Compressor, x: Tensor, state: State, info: Info, answer: Callable[[Request], Any]
) -> tuple[Tensor, State]:
    exchange = compressor.exchange(x, state, info)
    return drive(exchange, lambda requests: [answer(request) for request in requests])


def _answer(request: Request, part: Tensor, sender: int) -> Any:
    xp = namespace(part)
    value: Any = part
    if request.decode is not None:
        value, invalid = request.decode(part)
        value = xp.raise_on_invalid(value, invalid, [sender] * xp.shape(invalid)[0])
    return (value,) if isinstance(request, Allgather) else value
