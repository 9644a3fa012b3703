"""COLD and Dyna-COLD: innovation compression (Zhang, You & Xie, IEEE TAC 68(11), 2023).

The recursion has the form of NIDS (Li, Shi & Yan, 2019) with compressed innovations. The full
text of the paper was not available to us, so the names of variables and the defaults are ours.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from accordion_hvd import check
from accordion_hvd.averaging.base import Averaging, check_compressor, prefixed, unprefixed
from accordion_hvd.averaging.topology import topology
from accordion_hvd.core.base import (
    Allgather,
    Allreduce,
    Compressor,
    ExchangeGenerator,
    Info,
    Neighbours,
    Request,
    State,
    Tensor,
)
from accordion_hvd.core.codec import Codec, parse
from accordion_hvd.core.running import drive
from accordion_hvd.ops import namespace
from accordion_hvd.ops.spec import Spec

_FLOOR = {"float32": 1e-7, "float64": 1e-15}  # smallest scale, as a fraction of the first one
_TINY = 1e-30  # smallest first scale, so that it can be doubled if all innovations are zero
_DOUBLINGS = 64  # largest number of doublings in one step


@dataclass(frozen=True)
class Innovations(Averaging, abc.ABC):
    """Base class of COLD and Dyna-COLD, which differ only in their messages.

    Each rank maintains an estimate of its own vector, and its neighbours maintain the same
    estimate. The rank sends only the compressed difference from this estimate, which tends to 0.
    The sum of `dual` over the ranks is 0 for any compressor, so the fixed point is the optimum of
    the sum of all ranks' functions.
    """

    inner: ClassVar[str] = "sgd"
    neighbours_only: ClassVar[bool] = True

    topology: Any = "ring"
    gamma: float = 1.0

    def __post_init__(self) -> None:
        check.settle(self, "topology", topology(self, self.topology))
        check.ratio(self, "gamma", self.gamma)

    def equal(self, step: int) -> bool:
        return False

    def groups(self, size: int) -> tuple[tuple[int, ...], ...]:
        if not self.topology.symmetric(size):
            check.refuse(self, "topology", self.topology, "symmetric")
        return ()

    def init(self, spec: Spec, info: Info) -> State:
        """Return `dual`, in units of gradients, and the estimates `mine` and `theirs`.

        `mine` is the estimate of this rank's vector. `theirs` is the weighted sum of the
        neighbours' estimates, so the state does not grow with the number of neighbours.
        """
        names = ("dual", "mine", "theirs")
        return {n: spec.zeros(spec.shape, spec.wide) for n in names}

    def exchange(self, model: Tensor, state: State, info: Info) -> ExchangeGenerator:
        """Send one message to all neighbours and combine theirs.

        `info.lr` is the step size that produced `model`. A step of size 0, with which schedules
        end, changes nothing and sends nothing.
        """
        check.at_least(self, "learning rate", info.lr, least=0)
        if info.lr == 0:
            return model, state
        xp, kind = namespace(model), namespace(model).dtype(state["dual"])
        y = xp.cast(model, kind) - state["dual"] * info.lr
        message, decoded, state = yield from self._encode(y - state["mine"], state, info)
        weights = self.topology.weights(info.size)[info.rank]
        neighbours = self.topology.of(info.rank, info.size)
        sent = xp.concat([xp.to_bytes(part) for part in message])
        received = yield Neighbours(sent, to=neighbours, of=neighbours)
        mine, theirs = state["mine"] + xp.cast(decoded, kind), state["theirs"]
        for rank, flat in zip(neighbours, received, strict=True):
            part = self._decode(_unpacked(flat, message), y, state, info, rank)
            theirs = theirs + xp.cast(part, kind) * float(weights[rank])
        # sum over j of w_ij (mine - theirs_j)
        disagreement = mine * float(1 - weights[info.rank]) - theirs
        dual = state["dual"] + disagreement * (self.gamma / (2 * info.lr))
        updated = xp.cast(y - disagreement * (self.gamma / 2), xp.dtype(model))
        return updated, {**state, "dual": dual, "mine": mine, "theirs": theirs}

    @abc.abstractmethod
    def _encode(
        self, innovation: Tensor, state: State, info: Info
    ) -> Generator[Any, Any, tuple[Parcel, Tensor, State]]:
        """Return the message, its decoded value, and the new state."""

    @abc.abstractmethod
    def _decode(
        self, message: Parcel, like: Tensor, state: State, info: Info, sender: int
    ) -> Tensor:
        """Decode the message of rank `sender`."""


def _unpacked(flat: Tensor, like: Parcel) -> Parcel:
    """Parse a neighbour's message from bytes; `like` is this rank's message."""
    xp = namespace(flat)
    sizes = [xp.shape(xp.to_bytes(part))[0] for part in like]
    pieces = zip(xp.split(flat, sizes), like, strict=True)
    return tuple(xp.from_bytes(piece, xp.dtype(x), xp.shape(x)) for piece, x in pieces)


@dataclass(frozen=True)
class COLD(Innovations):
    """Decentralized training in which neighbours exchange compressed innovations.

    Each rank compresses the difference between its vector and an estimate that its neighbours
    share, and sends the result to its neighbours in the topology. The rank then moves its model
    toward the neighbours' estimates and corrects its gradient by a dual variable, so that all
    models approach the common optimum.

    With step size lr, gradient g_i and the weights W of the topology, a rank computes
    y_i = x_i - lr (g_i + dual_i), sends the compressed y_i - mine_i, which is added to the
    estimates, and computes z_i = sum over j of W[i, j] (mine_i - mine_j). Then
    dual_i += gamma / (2 lr) z_i and x_i = y_i - gamma / 2 z_i.

    For smooth, strongly convex functions and full gradients, COLD converges linearly to the exact
    optimum of the sum, with any compressor for which E||Q(r) - r||^2 <= (1 - delta) ||r||^2. With
    mini-batches it is a heuristic. Without a compressor and with gamma 1 it is NIDS. The inner
    optimizer must be plain SGD, with a learning rate below 2 / L for L-smooth functions.

    Args:
        topology: a `Topology` with symmetric weights, the name of one, or a matrix. Default:
            "ring".
        gamma: fraction of the disagreement that a step removes, in (0, 1]. Use 1 for mild
            compressors and 0.05 to 0.2 for strong ones, which diverge with 1. Default: 1.
        compressor: compressor of the innovations, whose messages must have a fixed size. Default:
            None, no compression.

    Traffic: the compressor's message to each neighbour per step.
    """

    compressor: Compressor | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_compressor(self, self.compressor)

    def init(self, spec: Spec, info: Info) -> State:
        state = super().init(spec, info)
        if self.compressor is None:
            return state
        return state | prefixed(self.compressor.deactivate(self.compressor.init(spec, info)))

    def _encode(
        self, innovation: Tensor, state: State, info: Info
    ) -> Generator[Any, Any, tuple[Parcel, Tensor, State]]:
        yield from ()
        if self.compressor is None:
            return (innovation,), innovation, state
        xp = namespace(innovation)
        x = xp.copy(xp.cast(innovation, "float32"))
        own = unprefixed(state)
        message, decoded, own = encode(self.compressor, x, own, info)
        return message, decoded, {**state, **prefixed(own)}

    def _decode(
        self, message: Parcel, like: Tensor, state: State, info: Info, sender: int
    ) -> Tensor:
        if self.compressor is None:
            return message[0]
        return decode(self.compressor, message, like, info, sender)


@dataclass(frozen=True)
class DynaCOLD(Innovations):
    """COLD with one bit per element and a scale that all ranks know in advance.

    Each rank sends the sign of each element of its innovation, and its neighbours decode it as
    plus or minus half the scale of this step. Otherwise the recursion is that of `COLD`.

    Step k has the scale s_k = scale theta^k, and signs stand for +-s_k / 2. If innovations fit the
    scale (|r| <= s_k), the next ones fit as well as long as theta is larger than the convergence
    rate of the uncompressed method, and the error decreases as theta^k.

    A rank whose innovation does not fit doubles its own scale, permanently and as often as needed,
    before it sends (ours: the published method diverges in this case). Each message contains the
    sender's number of doublings in one byte; `stats()["reports"]` contains it as well.

    Args:
        topology: a `Topology` with symmetric weights, the name of one, or a matrix. Default:
            "ring".
        gamma: fraction of the disagreement that a step removes, in (0, 1]. Default: 0.5.
        theta: factor of the scale per step, in (0, 1). Default: 0.98.
        scale: the first scale, above 0. Default: None, twice the largest innovation of any rank in
            the first step, which takes an allreduce of one number.

    Traffic: p / 8 + 1 bytes for p elements to each neighbour per step.
    """

    gamma: float = 0.5
    theta: float = 0.98
    scale: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not check.is_number(self.theta) or not 0 < self.theta < 1:
            check.refuse(self, "theta", self.theta, "a number in (0, 1)")
        if self.scale is not None and (not check.is_number(self.scale) or self.scale <= 0):
            check.refuse(self, "scale", self.scale, "None or a number above 0")

    def init(self, spec: Spec, info: Info) -> State:
        first = spec.xp.full((1,), self.scale or 0.0, "float32", spec.device)
        return super().init(spec, info) | {"scale": first, "doublings": spec.zeros((1,))}

    def report(self, state: State) -> dict[str, Tensor]:
        """Return the number of times that this rank has doubled its scale."""
        return {"doublings": state["doublings"]}

    def _encode(
        self, innovation: Tensor, state: State, info: Info
    ) -> Generator[Any, Any, tuple[Parcel, Tensor, State]]:
        xp = namespace(innovation)
        x = xp.copy(xp.cast(innovation, "float32"))
        largest = xp.bucket_norms(x, max(1, xp.shape(x)[0]), "max")
        # Not only in step 0: its rate may be 0, and an elastic job starts such a state anew.
        if self.scale is None and not float(xp.to_numpy(state["scale"])[0]):
            most = yield Allreduce(largest, op="max")
            least = xp.full((1,), _TINY, "float32", xp.device(x))
            first = xp.maximum(most * 2.0, least) / self._shrunk(state, info)
            state = {**state, "scale": first}
        powers = xp.cast(xp.arange(_DOUBLINGS, xp.device(x)), "float32")
        own = self._scale(state, info, state["doublings"])
        too_small = xp.cast(largest > 2.0**powers * own, "float32")
        ones = xp.full((_DOUBLINGS, 1), 1.0, "float32", xp.device(x))
        needed = xp.reshape(too_small, (1, -1)) @ ones
        state = {**state, "doublings": state["doublings"] + xp.reshape(needed, (1,))}
        message = xp.pack_signs(x), xp.cast(state["doublings"], "uint8")
        return message, self._decode(message, x, state, info, info.rank), state

    def _decode(
        self, message: Parcel, like: Tensor, state: State, info: Info, sender: int
    ) -> Tensor:
        xp, (signs, doublings) = namespace(like), message
        size = xp.shape(like)[0]
        room = xp.zeros((size,), "float32", xp.device(like))
        scale = self._scale(state, info, xp.cast(doublings, "float32"))
        return xp.sum_quantized([signs], [scale], max(1, size), 1, 0.5, room)

    def _scale(self, state: State, info: Info, doublings: Tensor) -> Tensor:
        """Return the scale, computed from the step so that all ranks agree bit for bit."""
        return state["scale"] * self._shrunk(state, info) * 2.0**doublings

    def _shrunk(self, state: State, info: Info) -> float:
        least = _FLOOR[namespace(state["dual"]).dtype(state["dual"])]
        return max(self.theta**info.step, least)


# ----------------------------------------------------------------------- messages from rank to rank
# A codec encodes and decodes such messages itself. For other compressors, the sender runs the
# exchange generator as if there were only one rank: the tensors of its requests are the message,
# and the mean over this one rank is the decoded value. The receiver runs the same exchange
# generator with the message as the answers to its requests. So every compressor whose messages have
# a fixed size works here without additional code.

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
