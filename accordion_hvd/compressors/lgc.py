"""Learned gradient compression (Abrahamyan, Chen, Bekoulis & Deligiannis, IEEE TNNLS, 2021)."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

from accordion_hvd import check
from accordion_hvd.compressors.autoencoder import TINY, Autoencoder, code_size, signals_of
from accordion_hvd.compressors.sparsifier import Sparsifier, mean_of, places
from accordion_hvd.core.base import (
    Allgather,
    Allreduce,
    Broadcast,
    ExchangeGenerator,
    Info,
    Request,
    State,
)
from accordion_hvd.ops import namespace
from accordion_hvd.ops.spec import Spec, Tensor

DENSE, TRAINING, SHIPPING, CODED = range(4)
"""Phases. SHIPPING is the last step of training; it broadcasts rank 0's weights."""

_BETAS = (0.9, 0.999)  # of Adam


@dataclass(frozen=True)
class LGC(Sparsifier):
    """Learned gradient compression: top-k values, encoded by an autoencoder that is trained online.

    In each step one rank, the leader, selects the elements of its residual + gradient with the
    largest magnitude. All ranks send their values at the leader's indices, encoded by an
    autoencoder, and decode the mean. The elements that were not selected stay in the residual.

    LGC runs in three phases: dense averages, then top-k values, which train the autoencoder, then
    codes. Ranks take turns as the leader, which selects the fraction `ratio` of each tensor. Values
    are sorted in the order of the leader's values, tensor by tensor, which makes the signal smooth
    (in the order of the indices it could hardly be encoded), and are divided by the leader's root
    mean square.

    - "ring": the ranks average their codes and decode the average: mean = D(mean of E(v)).
    - "server": the leader sends its code, and each rank k sends its innovation, the few largest of
      its values. Each rank has its own decoder D_k(code, innovation of k), and the mean is that of
      the decoded values. A second loss makes the ranks' codes similar, so that the leader's code
      suits all ranks.

    Layers, phases, losses and the two forms are the paper's, as far as we know them. As in the
    paper, elements that were not selected stay in the residual, but decoding errors are lost (with
    feedback of decoding errors, training diverged). Ours: leaders also in the training of the
    "server" form; Adam and He's initial weights (plain SGD leaves most of the error); division by
    the root mean square; and padding a signal to the length that the layers need, by repeating its
    last value, instead of resizing it.

    Args:
        ratio: fraction of the elements to select, in (0, 1]; at least one per tensor. Default:
            0.001.
        form: "ring" or "server". Default: "ring".
        dense: number of steps of the first phase. Default: 200.
        training: number of steps of the second phase, at least 1. Default: 300.
        innovation: fraction of the elements that each rank sends without encoding ("server").
            Default: 1e-5.
        rate: learning rate of the autoencoder. Default: 1e-3.

    Traffic, for mu selected of n elements: an allreduce of 4 n bytes in the first phase; then a
    broadcast of 4 mu bytes for the leader's indices. In the second phase, an allgather of 4 mu
    bytes for values follows. In the third phase of "ring", an allreduce of mu bytes for codes
    follows; in that of "server", the leader's code adds mu bytes to the broadcast, and an
    allgather of about 5 bytes per value of an innovation follows, so that other ranks send their
    innovations only. Between the second and the third phase, 0.9 MB are sent once (0.2 MB more per
    rank for "server"). A TensorFlow graph cannot change the leader, so an allreduce, to which the
    other ranks contribute zeros, replaces the broadcast and costs as much as two broadcasts.

    Biases, norms and small tensors are averaged without compression. The paper also averages the
    first layer without compression, and sends the last layer by top-k only:
    `Fixed(LGC(), overrides={"conv1.*": Dense(), "fc.*": TopK(0.001)})`. The autoencoder pays off
    from some thousand selected values on. The phases count the steps that LGC has served; steps of
    other levels do not count. `stats()["reports"]` contains "reconstruction": the fraction of the
    sum of squared values that decoding lost in the last step of training.
    """

    summary = "LGC(0.001)", "0.005 n m", "large models, long trainings"
    scope = "joint"

    ratio: float = 0.001
    form: str = "ring"
    dense: int = 200
    training: int = 300
    innovation: float = 1e-5
    rate: float = 1e-3

    def __post_init__(self) -> None:
        super().__post_init__()
        check.one_of(self, "form", self.form, ("ring", "server"))
        check.integer(self, "dense", self.dense, least=0)
        check.integer(self, "training", self.training, least=1)
        check.ratio(self, "innovation", self.innovation)
        check.ratio(self, "rate", self.rate)

    def variant(self, step: int) -> int:
        if step < self.dense:
            return DENSE
        left = self.dense + self.training - step
        return TRAINING if left > 1 else SHIPPING if left == 1 else CODED

    @property
    def startup_steps(self) -> int:
        return self.dense + self.training

    def init(self, spec: Spec, info: Info) -> State:
        """Return the residual, the autoencoder's parameters and the moments of their optimizer.

        `error` is the residual, a vector of the gradient's size. `weights` are the encoder's
        parameters, then each decoder's. `moments` are Adam's two moments per parameter, and `decay`
        their bias corrections. `reconstruction`: see `report`.
        """
        networks = self._networks(info.size)
        return super().init(spec, info) | {
            "weights": spec.xp.asarray(networks.draw(f"lgc.{info.name}"), spec.device),
            "moments": spec.zeros((2, networks.size)),
            "decay": spec.zeros((2, 1)),
            "reconstruction": spec.zeros((1,)) + 1.0,
        }

    def exchange(self, grad: Tensor, state: State, info: Info) -> ExchangeGenerator:
        """Run one allreduce; or receive the leader's indices, then exchange values or codes."""
        xp, error = namespace(grad), state["error"]
        if self._innovates and info.phase == CODED:
            error = xp.copy(error)  # innovations, which are sent last, may not decode
        total = xp.accumulate(error, xp.reshape(grad, (-1,)))
        if info.phase == DENSE:
            mean = yield Allreduce(total)
            return xp.reshape(mean, xp.shape(grad)), {**state, "error": xp.zeros_reusing(total)}
        index, scale, code = yield from self._from_leader(total, state, info)
        values = xp.take(total, index)
        if info.phase == CODED and code is None:
            decoded = yield from self._decode_mean(values, scale, state, info)
        elif info.phase == CODED:
            decoded = yield from self._decode_server(values, scale, code, state, info)
        else:
            decoded = yield Allgather(values)
            state = self._train(decoded, scale, state, info)
            if info.phase == SHIPPING:
                state["weights"] = yield Broadcast(state["weights"])
        error = xp.clear(total, index)
        values = sum(decoded[1:], decoded[0]) / len(decoded)
        return mean_of([(index, values)], grad), {**state, "error": error}

    def report(self, state: State) -> dict[str, Tensor]:
        """Return `reconstruction`: squared error / squared values of the last training step.

        It is 1 before the first training step.
        """
        return {"reconstruction": state["reconstruction"]} if state else {}

    # -------------------------------------------------------------------------------- exchanges
    def _from_leader(
        self, total: Tensor, state: State, info: Info
    ) -> Generator[Any, Any, tuple[Tensor, Tensor, Tensor | None]]:
        """Return the leader's indices, its root mean square and, for the "server" form, its code.

        The leader broadcasts them as int32. A graph does not know the leader: there, all ranks make
        a message, and an allreduce adds the leader's to the others' zeros.
        """
        xp, leader = namespace(total), info.step % info.size
        (size,) = xp.shape(total)
        coded = self._innovates and info.phase == CODED
        count = sum(self.kept(part) for part in info.sizes or (size,))
        read = partial(_parse, count=count, size=size)
        if not check.is_integer(leader):  # in a graph
            message = xp.cast(self._message(total, state, info, coded), "int64")
            message = xp.cast(message * _is_leader(xp, info, xp.device(total))[info.rank], "int32")
            request: Request = Allreduce(message, op="sum", reuse=True, sender=leader, decode=read)
        else:
            if leader == info.rank:
                message = self._message(total, state, info, coded)
            else:
                length = count + 1 + code_size(count) * coded
                message = xp.zeros((length,), "int32", xp.device(total))
            request = Broadcast(message, root=leader, decode=read)
        index, scale, code = yield request
        return index, scale, code if coded else None

    def _message(self, total: Tensor, state: State, info: Info, coded: bool) -> Tensor:
        xp, index = namespace(total), self._largest(total, info)
        values, (count,) = xp.take(total, index), xp.shape(index)
        scale = xp.reshape(xp.norm(values), (1,)) / count**0.5
        parts = [index, _bits("int32", scale)]
        if coded:
            networks = self._networks(info.size, state)
            code = networks.encode(state["weights"], signals_of([values], scale))
            parts.append(_bits("int32", code))
        return xp.concat(parts)

    def _largest(self, total: Tensor, info: Info) -> Tensor:
        """Return the indices of the largest elements of each tensor, sorted by value."""
        xp, start, indices = namespace(total), 0, []
        for part in xp.split(total, info.sizes or xp.shape(total)):
            (size,) = xp.shape(part)
            index = xp.largest_index(part, self.kept(size))
            indices.append(xp.take(index, xp.argsort(xp.take(part, index))) + start)
            start += size
        return xp.concat(indices)

    def _decode_mean(
        self, values: Tensor, scale: Tensor, state: State, info: Info
    ) -> Generator[Any, Any, list[Tensor]]:
        """Decode the mean of all codes ("ring")."""
        networks = self._networks(info.size)
        code = networks.encode(state["weights"], signals_of([values], scale))
        code = yield Allreduce(code, reuse=True)
        return _vectors(networks.decode(state["weights"], code, None), scale, values)

    def _decode_server(
        self, values: Tensor, scale: Tensor, code: Tensor, state: State, info: Info
    ) -> Generator[Any, Any, list[Tensor]]:
        """Decode each rank's values from the leader's code and the rank's innovation ("server")."""
        xp = namespace(values)
        index, (count,) = self._innovation_index(values, state), xp.shape(values)
        read = partial(places, count=xp.shape(index)[0], size=count)
        request = Allgather(xp.pack_index(index, count), decode=read)
        pairs = zip(*(yield request, Allgather(xp.take(values, index))), strict=True)
        innovations = signals_of([_scatter(place, part, count) for place, part in pairs], scale)
        networks, codes = self._networks(info.size, state), xp.stack([code] * info.size)
        return _vectors(networks.decode(state["weights"], codes, innovations), scale, values)

    def _innovation_index(self, values: Tensor, state: State) -> Tensor:
        xp = namespace(values)
        count = int(self.innovation * xp.shape(state["error"])[0])
        return xp.largest_index(values, max(1, min(count, xp.shape(values)[0])))

    # --------------------------------------------------------------------------- the autoencoder
    def rescale(self, states: Sequence[State], spec: Spec, info: Info) -> State:
        """Return this rank's state; in the "server" form, only for the same number of ranks."""
        if "weights" in states[0]:
            self._networks(info.size, states[0])
        return super().rescale(states, spec, info)

    @property
    def _innovates(self) -> bool:
        return self.form == "server"

    def _networks(self, ranks: int, state: State | None = None) -> Autoencoder:
        """Return the autoencoder; ValueError if `state` belongs to another number of ranks."""
        networks = Autoencoder(ranks if self._innovates else 1, self._innovates)
        if state is not None:
            (size,) = namespace(state["weights"]).shape(state["weights"])
            if size != networks.size:
                allowed = "the same as before, since each rank has a decoder (form='ring' has one)"
                check.refuse(self, "number of ranks", ranks, allowed)
        return networks

    def _train(self, parts: Sequence[Tensor], scale: Tensor, state: State, info: Info) -> State:
        """Return the state after a training step on all ranks' values; all ranks get the same."""
        xp, ranks, device = namespace(scale), info.size, namespace(scale).device(scale)
        networks, x = self._networks(ranks, state), signals_of(parts, scale)
        if self._innovates:
            mix = xp.stack([xp.cast(_is_leader(xp, info, device), "float32")] * ranks)
            wanted = x
            innovations = signals_of([self._innovation_of(part, state) for part in parts], scale)
        else:
            mix = xp.full((1, ranks), 1.0 / ranks, "float32", device)
            wanted, innovations = mix @ x, None
        similarity = float(self._innovates)
        slope, off = networks.slopes(state["weights"], x, mix, wanted, innovations, similarity)
        lost = xp.norm(off) ** 2 / (xp.norm(wanted) ** 2 + TINY)
        return self._adam_step(state, slope) | {"reconstruction": xp.reshape(lost, (1,))}

    def _innovation_of(self, values: Tensor, state: State) -> Tensor:
        """Return a rank's values with zeros except for its innovation."""
        xp, index = namespace(values), self._innovation_index(values, state)
        return _scatter(index, xp.take(values, index), *xp.shape(values))

    def _adam_step(self, state: State, slope: Tensor) -> State:
        """Return the state after a step of Adam (Kingma & Ba, 2015), with bias correction."""
        xp = namespace(slope)
        terms = zip((slope, slope * slope), _BETAS, strict=True)
        moments = [state["moments"][i] * b + x * (1 - b) for i, (x, b) in enumerate(terms)]
        decay = [state["decay"][i] * b + (1 - b) for i, b in enumerate(_BETAS)]
        mean, square = (moment / part for moment, part in zip(moments, decay, strict=True))
        weights = state["weights"] - self.rate * mean / (square**0.5 + 1e-8)
        changed = {"weights": weights, "moments": xp.stack(moments), "decay": xp.stack(decay)}
        return {**state, **changed}


def _is_leader(xp: ModuleType, info: Info, device: Any) -> Tensor:
    distance = (info.step - xp.arange(info.size, device)) % info.size
    return (info.size - distance) // info.size


def _parse(payload: Tensor, count: int, size: int) -> tuple[tuple[Tensor, ...], Tensor]:
    """Parse a leader's message: `count` distinct indices below `size`, a scale, and a code."""
    xp, index = namespace(payload), payload[:count]
    floats = _bits("float32", payload[count:])
    ascending = xp.take(index, xp.argsort(index))
    return (index, floats[:1], floats[1:]), xp.invalid_index(ascending, size)


def _bits(dtype: str, x: Tensor) -> Tensor:
    """Return the bits of `x` as a vector of another dtype: int32 bits can be added to zeros."""
    xp = namespace(x)
    return xp.from_bytes(xp.to_bytes(x), dtype, (-1,))


def _scatter(index: Tensor, values: Tensor, size: int) -> Tensor:
    xp = namespace(values)
    return xp.add_at(xp.zeros((size,), "float32", xp.device(values)), index, values)


def _vectors(signals: Tensor, scale: Tensor, like: Tensor) -> list[Tensor]:
    xp = namespace(signals)
    return xp.unstack(signals[:, : xp.shape(like)[0]] * scale)
