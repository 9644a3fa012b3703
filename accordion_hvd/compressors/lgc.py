"""Learned gradient compression (Abrahamyan, Chen, Bekoulis & Deligiannis, IEEE TNNLS, 2021)."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any, ClassVar

from accordion_hvd import check
from accordion_hvd.compressors.autoencoder import TINY, Autoencoder, signals_of
from accordion_hvd.compressors.sparsifier import Sparsifier, mean_of, places
from accordion_hvd.core.base import Allgather, Allreduce, Broadcast, ExchangeGenerator, Info, State
from accordion_hvd.ops import namespace
from accordion_hvd.ops.spec import Spec, Tensor

DENSE, TRAINING, SHIPPING, CODED = range(4)
"""Phases. SHIPPING is the last step of training, at which all ranks take rank 0's weights."""

_MEMORY = (0.9, 0.999)  # Adam's


@dataclass(frozen=True)
class LGC(Sparsifier):
    """Top-k values at common positions, coded by an autoencoder that is trained meanwhile.

    Three phases: the plain average; then top-k, whose values train the autoencoder; then codes.
    At each step the ranks take turns as leader: it chooses the `ratio` of each tensor that is
    largest in its gradient plus error, and everybody sends its own values there. They are brought
    into the order of the leader's values, tensor by tensor, which makes them smooth (in the order
    of positions they could hardly be coded), and divided by the leader's root mean square.

    - "ring": codes are averaged, and the average is decoded: mean = D(mean of E(v)).
    - "server": only the leader's code travels, and of each rank its innovation: the few largest of
      its values. Each rank has a decoder of its own, D_k(code, innovation of k); the mean is that
      of what they give. Another loss draws all ranks' codes together, so that the leader's serves.

    Layers, phases, losses and the two forms are the paper's, as far as known; as there, what was
    not chosen stays in the error, and what decoding loses is lost (fed back, it made training
    diverge). Ours: leaders in the "server" form's training, too; Adam and He's initial weights
    (plain SGD leaves most of the error); division by the root mean square; and signals that are
    completed to what the layers divide, by repeating the last value, instead of resized.

    Biases, norms and small tensors are averaged as they are. Exempt the first and the last layer,
    as the paper does, by `skip`. The autoencoder needs some thousand chosen values to be worth it.
    Phases count the steps that LGC has served: while another level does, they wait.

    Sent, for mu values chosen of n: 4 n bytes; then 8 mu; then mu for a code and 4 mu for positions
    ("server": also about 5 for each value of an innovation), the code and the positions as
    allreduces, since a graph does not know who leads. Between the phases 0.9 MB, once.

    `stats()["reports"]` has "reconstruction": what part of the squared values decoding lost in the
    last step of training.

    Args:
        ratio: the part of the elements that is chosen, in (0, 1]; of each tensor at least one is.
        form: "ring" or "server".
        dense: steps of the first phase.
        training: steps of the second phase, at least 1.
        innovation: the part of the elements that each rank sends as they are ("server").
        rate: the autoencoder's learning rate.
    """

    scope: ClassVar[str] = "joint"

    ratio: float = 0.001
    form: str = "ring"
    dense: int = 200
    training: int = 300
    innovation: float = 1e-5
    rate: float = 1e-3

    def __post_init__(self) -> None:
        """Raises: ValueError when an argument makes no sense."""
        super().__post_init__()
        check.one_of(self, "form", self.form, ("ring", "server"))
        check.integer(self, "dense", self.dense, least=0)
        check.integer(self, "training", self.training, least=1)
        check.ratio(self, "innovation", self.innovation)
        check.ratio(self, "rate", self.rate)

    def variant(self, step: int) -> int:
        """Return the phase: DENSE, TRAINING, SHIPPING or CODED."""
        if step < self.dense:
            return DENSE
        left = self.dense + self.training - step
        return TRAINING if left > 1 else SHIPPING if left == 1 else CODED

    @property
    def startup_steps(self) -> int:
        """Until there are codes."""
        return self.dense + self.training

    def init(self, spec: Spec, info: Info) -> State:
        """Return the state: `error`, and the autoencoder's parameters and moments.

        `error`: what was not sent yet, a vector with the gradient's elements. `weights`: the
        encoder's, then each decoder's. `moments`, `decay`: Adam's two moments of each, and of 1.
        `reconstruction`: see `report`.
        """
        networks = self._networks(info.size)
        return super().init(spec, info) | {
            "weights": spec.xp.asarray(networks.draw(f"lgc.{info.name}"), spec.device),
            "moments": spec.zeros((2, networks.size)),
            "decay": spec.zeros((2, 1)),
            "reconstruction": spec.zeros((1,)) + 1.0,
        }

    def exchange(self, grad: Tensor, state: State, info: Info) -> ExchangeGenerator:
        """Run one allreduce; or broadcast the leader's positions, then exchange values or codes."""
        xp, error = namespace(grad), state["error"]
        if self._innovates and info.phase == CODED:
            error = xp.copy(error)  # innovations, which come last, may not decode
        total = xp.accumulate(error, xp.reshape(grad, (-1,)))
        if info.phase == DENSE:
            mean = yield Allreduce(total)
            return xp.reshape(mean, xp.shape(grad)), {**state, "error": xp.zeros_reusing(total)}
        index, scale, code = yield from self._follow(total, state, info)
        values = xp.take(total, index)
        if info.phase == CODED and code is None:
            decoded = yield from self._of_mean(values, scale, state, info)
        elif info.phase == CODED:
            decoded = yield from self._of_leader(values, scale, code, state, info)
        else:
            decoded = yield Allgather(values)
            state = self._trained(decoded, scale, state, info)
            if info.phase == SHIPPING:
                state["weights"] = yield Broadcast(state["weights"])
        error = xp.clear(total, index)
        values = sum(decoded[1:], decoded[0]) / len(decoded)
        return mean_of([(index, values)], grad), {**state, "error": error}

    def report(self, state: State) -> dict[str, Tensor]:
        """`reconstruction`: squared error of what was decoded / squared values, when last trained.

        1 before that.
        """
        return {"reconstruction": state["reconstruction"]} if state else {}

    # ---------------------------------------------------------------------------- who sends what
    def _follow(
        self, total: Tensor, state: State, info: Info
    ) -> Generator[Any, Any, tuple[Tensor, Tensor, Tensor | None]]:
        """Return the leader's positions, its root mean square and, for a server, its code.

        One allreduce of int32: everybody but the leader adds zeros.
        """
        xp = namespace(total)
        index = self._largest(total, info)
        values, (count,) = xp.take(total, index), xp.shape(index)
        scale = xp.reshape(xp.norm(values), (1,)) / count**0.5
        says = [index, _seen_as("int32", scale)]
        if self._innovates and info.phase == CODED:
            networks = self._networks(info.size, state)
            code = networks.encode(state["weights"], signals_of([values], scale))
            says.append(_seen_as("int32", code))
        said = xp.cast(xp.concat(says), "int64") * _leader(xp, info, xp.device(total))[info.rank]
        read = partial(_said, count=count, size=math.prod(xp.shape(total)))
        leader, said = info.step % info.size, xp.cast(said, "int32")
        index, scale, code = yield Allreduce(said, op="sum", reuse=True, sender=leader, decode=read)
        return index, scale, code if len(says) > 2 else None

    def _largest(self, total: Tensor, info: Info) -> Tensor:
        """Return the positions of the largest elements of each tensor, ordered by value."""
        xp, start, found = namespace(total), 0, []
        for part in xp.split(total, info.sizes or xp.shape(total)):
            (size,) = xp.shape(part)
            index = xp.largest_index(part, self.kept(size))
            found.append(xp.take(index, xp.argsort(xp.take(part, index))) + start)
            start += size
        return xp.concat(found)

    def _of_mean(
        self, values: Tensor, scale: Tensor, state: State, info: Info
    ) -> Generator[Any, Any, list[Tensor]]:
        """Decode the mean of all codes ("ring")."""
        networks = self._networks(info.size)
        code = networks.encode(state["weights"], signals_of([values], scale))
        code = yield Allreduce(code, reuse=True)
        return _vectors(networks.decode(state["weights"], code, None), scale, values)

    def _of_leader(
        self, values: Tensor, scale: Tensor, code: Tensor, state: State, info: Info
    ) -> Generator[Any, Any, list[Tensor]]:
        """Decode each rank's values from the leader's code and the rank's innovation ("server")."""
        xp = namespace(values)
        index, (count,) = self._innovation(values, state), xp.shape(values)
        read = partial(places, count=xp.shape(index)[0], size=count)
        told = Allgather(xp.pack_index(index, count), decode=read)
        pairs = zip(*(yield told, Allgather(xp.take(values, index))), strict=True)
        news = signals_of([_placed(place, part, count) for place, part in pairs], scale)
        networks, codes = self._networks(info.size, state), xp.stack([code] * info.size)
        return _vectors(networks.decode(state["weights"], codes, news), scale, values)

    def _innovation(self, values: Tensor, state: State) -> Tensor:
        xp = namespace(values)
        count = int(self.innovation * xp.shape(state["error"])[0])
        return xp.largest_index(values, max(1, min(count, xp.shape(values)[0])))

    # --------------------------------------------------------------------------- the autoencoder
    @property
    def _innovates(self) -> bool:
        return self.form == "server"

    def _networks(self, ranks: int, state: State | None = None) -> Autoencoder:
        """Return the autoencoder for this number of ranks.

        Raises:
            ValueError: `state` is of another number of ranks.
        """
        networks = Autoencoder(ranks if self._innovates else 1, self._innovates)
        if state is not None:
            (size,) = namespace(state["weights"]).shape(state["weights"])
            if size != networks.size:
                allowed = "what it was, since each has a decoder (form='ring' has but one)"
                check.refuse(self, "number of ranks", ranks, allowed)
        return networks

    def _trained(self, parts: Sequence[Tensor], scale: Tensor, state: State, info: Info) -> State:
        """After one step of training on everybody's values; every rank does the same."""
        xp, ranks, device = namespace(scale), info.size, namespace(scale).device(scale)
        networks, x = self._networks(ranks, state), signals_of(parts, scale)
        if self._innovates:
            mix = xp.stack([xp.cast(_leader(xp, info, device), "float32")] * ranks)
            wanted, news = x, signals_of([self._news(part, state) for part in parts], scale)
        else:
            mix = xp.full((1, ranks), 1.0 / ranks, "float32", device)
            wanted, news = mix @ x, None
        slope, off = networks.slopes(state["weights"], x, mix, wanted, news, float(self._innovates))
        lost = xp.norm(off) ** 2 / (xp.norm(wanted) ** 2 + TINY)
        return self._stepped(state, slope) | {"reconstruction": xp.reshape(lost, (1,))}

    def _news(self, values: Tensor, state: State) -> Tensor:
        """Return a rank's values without those that are no innovation."""
        xp, index = namespace(values), self._innovation(values, state)
        return _placed(index, xp.take(values, index), *xp.shape(values))

    def _stepped(self, state: State, slope: Tensor) -> State:
        """Adam (Kingma & Ba, 2015); `decay` makes up for moments that began as zeros."""
        xp = namespace(slope)
        terms = zip((slope, slope * slope), _MEMORY, strict=True)
        moments = [state["moments"][i] * b + x * (1 - b) for i, (x, b) in enumerate(terms)]
        decay = [state["decay"][i] * b + (1 - b) for i, b in enumerate(_MEMORY)]
        mean, square = (moment / part for moment, part in zip(moments, decay, strict=True))
        weights = state["weights"] - self.rate * mean / (square**0.5 + 1e-8)
        changed = {"weights": weights, "moments": xp.stack(moments), "decay": xp.stack(decay)}
        return {**state, **changed}


def _leader(xp: ModuleType, info: Info, device: Any) -> Tensor:
    """1 for the rank whose turn it is, 0 for others (int64): a function of the step."""
    behind = (info.step - xp.arange(info.size, device)) % info.size
    return (info.size - behind) // info.size


def _said(payload: Tensor, count: int, size: int) -> tuple[tuple[Tensor, ...], Tensor]:
    """Parse a leader's message: `count` different positions below `size`, a scale, and the rest."""
    xp, index = namespace(payload), payload[:count]
    floats = _seen_as("float32", payload[count:])
    return (index, floats[:1], floats[1:]), xp.invalid_index(
        xp.take(index, xp.argsort(index)), size
    )


def _seen_as(dtype: str, x: Tensor) -> Tensor:
    """Return the bits of `x` as a vector: fp32 seen as int32 is added to zeros without loss."""
    xp = namespace(x)
    return xp.from_bytes(xp.to_bytes(x), dtype, (-1,))


def _placed(index: Tensor, values: Tensor, size: int) -> Tensor:
    """Return zeros with `values` at `index`."""
    xp = namespace(values)
    return xp.add_at(xp.zeros((size,), "float32", xp.device(values)), index, values)


def _vectors(signals: Tensor, scale: Tensor, like: Tensor) -> list[Tensor]:
    xp = namespace(signals)
    return xp.unstack(signals[:, : xp.shape(like)[0]] * scale)
