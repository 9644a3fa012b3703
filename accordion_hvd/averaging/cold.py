"""COLD and Dyna-COLD: innovation compression (Zhang, You & Xie, IEEE TAC 68(11), 2023).

The form of the recursion is that of NIDS (Li, Shi & Yan, 2019) with compressed innovations; the
paper's body was not at hand, so names of variables and defaults are ours.
"""

from __future__ import annotations

import abc
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, ClassVar

from accordion_hvd import check
from accordion_hvd.averaging import point_to_point
from accordion_hvd.averaging.base import Averaging, check_compressor, prefixed, unprefixed
from accordion_hvd.averaging.topology import topology
from accordion_hvd.core.base import (
    Allreduce,
    Compressor,
    ExchangeGenerator,
    Info,
    Neighbours,
    State,
    Tensor,
)
from accordion_hvd.ops import namespace
from accordion_hvd.ops.spec import Spec

_FLOOR = {"float32": 1e-7, "float64": 1e-15}  # of a scale, as a part of the first one
_TINY = 1e-30  # a scale that can be doubled, should all begin with zeros
_DOUBLINGS = 64  # that a step can need


@dataclass(frozen=True)
class Innovations(Averaging, abc.ABC):
    """Base class of COLD and Dyna-COLD, which differ only in the messages.

    Each rank keeps an estimate of its own vector that its neighbours know as well, and sends
    only the compressed difference to it, which tends to 0. `dual` sums to 0 over the ranks
    whatever the compressor does, so the fixed point is the optimum of the sum of all functions.
    """

    inner: ClassVar[str] = "sgd"
    neighbours_only: ClassVar[bool] = True

    topology: Any = "ring"
    gamma: float = 1.0

    def __post_init__(self) -> None:
        """Raises: ValueError when the topology is none or gamma outside (0, 1]."""
        object.__setattr__(self, "topology", topology(self, self.topology))
        check.ratio(self, "gamma", self.gamma)

    def equal(self, step: int) -> bool:
        """Return False: models never become exactly equal."""
        return False

    def groups(self, size: int) -> tuple[tuple[int, ...], ...]:
        """None; refuses a topology that does not suit."""
        if not self.topology.symmetric(size):
            check.refuse(self, "topology", self.topology, "symmetric")
        return ()

    def init(self, spec: Spec, info: Info) -> State:
        """`dual`, of the gradient's kind; `mine` and `theirs`: own and neighbours' estimates.

        `theirs` is their weighted sum: nothing grows with the number of neighbours.
        """
        names = ("dual", "mine", "theirs")
        return {n: spec.zeros(spec.shape, spec.wide) for n in names}

    def exchange(self, model: Tensor, state: State, info: Info) -> ExchangeGenerator:
        """Send one message to all neighbours; `info.lr` is the step size that made `model`."""
        if not info.lr > 0:
            check.refuse(self, "learning rate", info.lr, "above 0")
        xp, kind = namespace(model), namespace(model).dtype(state["dual"])
        y = xp.cast(model, kind) - state["dual"] * info.lr
        message, mine, state = yield from self._message(y - state["mine"], state, info)
        weights = self.topology.weights(info.size)[info.rank]
        near = self.topology.of(info.rank, info.size)
        sent = xp.concat([xp.to_bytes(part) for part in message])
        came = yield Neighbours(sent, to=near, of=near)
        own, theirs = state["mine"] + xp.cast(mine, kind), state["theirs"]
        for rank, flat in zip(near, came, strict=True):
            part = self._meaning(_unpacked(flat, message), y, state, info, rank)
            theirs = theirs + xp.cast(part, kind) * float(weights[rank])
        apart = own * float(1 - weights[info.rank]) - theirs  # sum of w_ij (own - theirs_j)
        dual = state["dual"] + apart * (self.gamma / (2 * info.lr))
        moved = xp.cast(y - apart * (self.gamma / 2), xp.dtype(model))
        return moved, {**state, "dual": dual, "mine": own, "theirs": theirs}

    @abc.abstractmethod
    def _message(
        self, innovation: Tensor, state: State, info: Info
    ) -> Generator[Any, Any, tuple[point_to_point.Message, Tensor, State]]:
        """Return the message, its meaning, and the state."""

    @abc.abstractmethod
    def _meaning(
        self, message: point_to_point.Message, like: Tensor, state: State, info: Info, sender: int
    ) -> Tensor:
        """Decode a neighbour's message."""


def _unpacked(flat: Tensor, like: point_to_point.Message) -> point_to_point.Message:
    """Parse a neighbour's message from bytes; `like` is this rank's message."""
    xp = namespace(flat)
    sizes = [xp.shape(xp.to_bytes(part))[0] for part in like]
    pieces = zip(xp.split(flat, sizes), like, strict=True)
    return tuple(xp.from_bytes(piece, xp.dtype(x), xp.shape(x)) for piece, x in pieces)


@dataclass(frozen=True)
class COLD(Innovations):
    """Decentralised training whose neighbours exchange compressed innovations.

    With step size lr, gradient g_i and W of the topology: y_i = x_i - lr (g_i + dual_i); the
    compressed y_i - mine_i is sent and added to the estimates; z_i = sum over j of
    W[i, j] (mine_i - mine_j); dual_i += gamma / (2 lr) z_i; x_i = y_i - gamma / 2 z_i. For smooth,
    strongly convex functions and full gradients it converges linearly to the exact optimum of the
    sum, for any compressor with E||Q(r) - r||^2 <= (1 - delta) ||r||^2; with mini-batches it is a
    heuristic. Without a compressor and with gamma 1 it is NIDS. The optimizer inside must be plain
    SGD, its learning rate below 2 / L.

    Sent: the compressor's message to each neighbour a step.

    Args:
        topology: a `Topology` with symmetric weights, the name of one, or a matrix.
        gamma: the part of the disagreement that a step removes, in (0, 1]; 1 for mild compressors,
            0.05 to 0.2 for harsh ones (with 1 they diverge).
        compressor: None, or what compresses innovations: any whose messages have a fixed size.
    """

    compressor: Compressor | None = None

    def __post_init__(self) -> None:
        """Raises: ValueError when an argument is not what it may be."""
        super().__post_init__()
        check_compressor(self, self.compressor)

    def init(self, spec: Spec, info: Info) -> State:
        """Also what the compressor keeps from one message to the next."""
        state = super().init(spec, info)
        if self.compressor is None:
            return state
        return state | prefixed(self.compressor.deactivate(self.compressor.init(spec, info)))

    def _message(
        self, innovation: Tensor, state: State, info: Info
    ) -> Generator[Any, Any, tuple[point_to_point.Message, Tensor, State]]:
        yield from ()
        if self.compressor is None:
            return (innovation,), innovation, state
        xp = namespace(innovation)
        x = xp.copy(xp.cast(innovation, "float32"))
        message, meaning, kept = point_to_point.encode(self.compressor, x, unprefixed(state), info)
        return message, meaning, {**state, **prefixed(kept)}

    def _meaning(
        self, message: point_to_point.Message, like: Tensor, state: State, info: Info, sender: int
    ) -> Tensor:
        if self.compressor is None:
            return message[0]
        return point_to_point.decode(self.compressor, message, like, info, sender)


@dataclass(frozen=True)
class DynaCOLD(Innovations):
    """COLD with one bit an element and a scale that everybody knows in advance.

    Step k has the scale s_k = scale theta^k, and an element is sent as its sign, which means
    +-s_k / 2. If innovations fit the scale (|r| <= s_k), so do the next ones as long as theta is
    above the rate of the method without compression, and the error falls as theta^k.

    A rank whose innovation does not fit doubles its own scale as often as it needs, for good,
    before it sends (ours: the published method diverges then). Which doublings a sender has made
    goes along as one byte; `stats()["reports"]` has their number.

    Sent: p / 8 + 1 bytes for p elements to each neighbour a step.

    Args:
        topology: a `Topology` with symmetric weights, the name of one, or a matrix.
        gamma: the part of the disagreement that a step removes, in (0, 1].
        theta: by which the scale falls each step, in (0, 1).
        scale: the first one; None: twice the largest innovation of the first step of any rank,
            which takes one allreduce of a number.
    """

    gamma: float = 0.5
    theta: float = 0.98
    scale: float | None = None

    def __post_init__(self) -> None:
        """Raises: ValueError when an argument is not what it may be."""
        super().__post_init__()
        if not check.is_number(self.theta) or not 0 < self.theta < 1:
            check.refuse(self, "theta", self.theta, "a number in (0, 1)")
        if self.scale is not None and (not check.is_number(self.scale) or self.scale <= 0):
            check.refuse(self, "scale", self.scale, "None or a number above 0")

    def init(self, spec: Spec, info: Info) -> State:
        """Also `scale`, the first one, and how many `doublings` there have been."""
        first = spec.xp.full((1,), self.scale or 0.0, "float32", spec.device)
        return super().init(spec, info) | {"scale": first, "doublings": spec.zeros((1,))}

    def report(self, state: State) -> dict[str, Tensor]:
        """Return how often this rank has doubled its scale."""
        return {"doublings": state["doublings"]}

    def _message(
        self, innovation: Tensor, state: State, info: Info
    ) -> Generator[Any, Any, tuple[point_to_point.Message, Tensor, State]]:
        xp = namespace(innovation)
        x = xp.copy(xp.cast(innovation, "float32"))
        largest = xp.bucket_norms(x, max(1, xp.shape(x)[0]), "max")
        if self.scale is None and info.step == 0:
            most = yield Allreduce(largest, op="max")
            least = xp.full((1,), _TINY, "float32", xp.device(x))
            state = {**state, "scale": xp.maximum(most * 2.0, least)}
        powers = xp.cast(xp.arange(_DOUBLINGS, xp.device(x)), "float32")
        own = self._scale(state, info, state["doublings"])
        short = xp.cast(largest > 2.0**powers * own, "float32")  # of these
        needed = xp.reshape(short, (1, -1)) @ xp.full((_DOUBLINGS, 1), 1.0, "float32", xp.device(x))
        state = {**state, "doublings": state["doublings"] + xp.reshape(needed, (1,))}
        message = xp.pack_signs(x), xp.cast(state["doublings"], "uint8")
        return message, self._meaning(message, x, state, info, info.rank), state

    def _meaning(
        self, message: point_to_point.Message, like: Tensor, state: State, info: Info, sender: int
    ) -> Tensor:
        xp, (signs, doublings) = namespace(like), message
        size = xp.shape(like)[0]
        room = xp.zeros((size,), "float32", xp.device(like))
        scale = self._scale(state, info, xp.cast(doublings, "float32"))
        return xp.sum_quantized([signs], [scale], max(1, size), 1, 0.5, room)

    def _scale(self, state: State, info: Info, doublings: Tensor) -> Tensor:
        """From the step's number, so that all ranks have the same to the bit."""
        least = _FLOOR[namespace(doublings).dtype(state["dual"])]
        return state["scale"] * max(self.theta**info.step, least) * 2.0**doublings
