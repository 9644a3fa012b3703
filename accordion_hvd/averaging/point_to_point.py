"""A compressor's message from one to another, where there is no common average.

A codec has such messages. Of other methods the conversation is held by one rank alone: what it asks
to exchange is its message, and the mean over that one rank is what the message means. Whoever is
given the message replays the conversation with it. So every compressor whose messages
have a fixed size serves here, without a line of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from accordion_hvd.core.base import Allgather, Compressor, Info, Request, State, Tensor
from accordion_hvd.core.codec import Codec, parse
from accordion_hvd.core.running import drive
from accordion_hvd.ops import namespace

Message = tuple[Tensor, ...]


def encode(
    compressor: Compressor, x: Tensor, kept: State, info: Info
) -> tuple[Message, Tensor, State]:
    """Encode `x`; return the message, its meaning, and the state for the next message.

    Nothing that is not sent is kept: no error feedback.

    Args:
        compressor: one that returns the mean of gradients.
        x: fp32; its memory may be used.
        kept: from the last message, {} at first.
        info: whose `rank` is the sender.

    Raises:
        ValueError: the message's size is not fixed.
    """
    if isinstance(compressor, Codec):
        return (*_coded(compressor, x, info), {})
    message: list[Tensor] = []

    def answer(request: Request) -> Any:
        if isinstance(request, Allgather) and request.uneven:
            _refuse(compressor)
        xp = namespace(request.tensor)
        message.append(xp.copy(request.tensor))
        return _answer(request, xp.copy(request.tensor), info.rank)

    state = compressor.init(namespace(x).spec(x), info) | kept
    meaning, after = _hold(compressor, x, state, _alone(info, info.rank), answer)
    return tuple(message), meaning, compressor.deactivate(after)


def decode(
    compressor: Compressor, message: Message, like: Tensor, info: Info, sender: int
) -> Tensor:
    """Decode a message.

    Args:
        compressor: the sender's.
        message: from its `encode`.
        like: fp32, in the shape of what was encoded.
        info: of the reader, at the same step.
        sender: who has sent it.
    """
    xp = namespace(like)
    if isinstance(compressor, Codec):
        return _meaning(compressor, message, like, _alone(info, sender), sender)
    parts = iter(message)
    blank = xp.zeros(xp.shape(like), "float32", xp.device(like))
    state = compressor.init(xp.spec(blank), info)
    answer = lambda request: _answer(request, next(parts), sender)  # noqa: E731
    return _hold(compressor, blank, state, _alone(info, sender), answer)[0]


def _coded(codec: Codec, x: Tensor, info: Info) -> tuple[Message, Tensor]:
    """Encode with a codec; return the message and its meaning."""
    if codec.uneven:
        _refuse(codec)
    xp, told = namespace(x), _alone(info, info.rank)
    message = codec.encode(xp.reshape(x, codec.layout(xp.shape(x))), told)
    return message, _meaning(codec, message, x, told, info.rank)


def _meaning(codec: Codec, message: Message, like: Tensor, told: Info, sender: int) -> Tensor:
    xp, shape = namespace(like), namespace(like).shape(like)
    layout = codec.layout(shape)
    room = xp.zeros(layout, "float32", xp.device(like))
    return xp.reshape(codec.decode(parse(codec, message, layout, sender), room, told), shape)


def _refuse(compressor: Compressor) -> None:
    raise ValueError(f"{compressor!r} sends messages whose size changes, which do not go here.")


def _alone(info: Info, sender: int) -> Info:
    return replace(info, rank=0, size=1, name=f"{info.name}.{sender}", hosts=())


def _hold(
    compressor: Compressor, x: Tensor, state: State, info: Info, answer: Callable[[Request], Any]
) -> tuple[Tensor, State]:
    exchange = compressor.exchange(x, state, info)
    return drive(exchange, lambda requests: [answer(request) for request in requests])


def _answer(request: Request, part: Tensor, sender: int) -> Any:
    xp = namespace(part)
    read: Any = part
    if request.decode is not None:
        read, doubt = request.decode(part)
        read = xp.raise_on_invalid(read, doubt, [sender] * xp.shape(doubt)[0])
    return (read,) if isinstance(request, Allgather) else read
