"""DoubleSqueeze: averages in parts, compressed in both directions (Tang et al., ICML 2019)."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

from accordion_hvd import check
from accordion_hvd.core.base import Alltoall, ExchangeGenerator, Info, State, Tensor
from accordion_hvd.core.codec import Codec, Message, Wrapper, gathered
from accordion_hvd.ops import namespace
from accordion_hvd.ops.spec import Spec


@dataclass(frozen=True)
class DoubleSqueeze(Wrapper):
    """Average in parts: each rank averages one part of all messages and sends the mean to all.

    Tensors are cut into as many parts as there are ranks. Each rank sends C(x) of each part to the
    rank that owns it. The owner averages the messages in rank order, and sends C of the mean to all
    ranks. So traffic does not grow with the number of ranks, for two rounds instead of one and a
    second rounding.

    Algorithm 1 of "DoubleSqueeze: Parallel Stochastic Gradient Descent with Double-Pass
    Error-Compensated Compression" (Tang, Yu, Lian, Zhang & Liu, ICML 2019), with the residuals e of
    the ranks and s of the owners, for v = e + g: send C(v), e <- v - C(v); the owner sends C(w) for
    w = mean of C(v) + s, s <- w - C(w). The paper's server is distributed over the ranks (ours), so
    that C compresses parts: methods with one scale per tensor, such as `EFSignSGD`, have one per
    part. Unbiased codecs, such as `QSGD`, have no residuals (ours).

    Parts have equal lengths. The last ones are padded with zeros, which count in a part's scale.
    Buckets of `QSGD` and blocks of `Int8` have at most the given size, so that parts consist of
    whole ones; the smaller size serves both passes. The columns of `OneBit` are runs of at most n
    neighbours in its (n, m) matrix, column by column. `TopK` and `STC` send the largest elements of
    each part, which they encode one by one, so that their computing time grows with the number of
    ranks.

    Args:
        codec: a codec whose messages ranks gather and have a fixed size, such as `QSGD(4)`; its own
            error feedback is not used.
        mean: codec of the means of parts. Default: `codec`.

    Traffic: for a message of b bytes on N ranks, an alltoall of b bytes and an allgather of b / N:
    2 (N - 1) / N b bytes, where `codec` alone sends (N - 1) b. The state is an fp32 tensor of the
    gradient's size and one of a part's size, each only if the codec of that pass is biased.
    """

    summary = "DoubleSqueeze(QSGD(4))", "as the codec by allreduce", "more than two ranks"
    mean: Codec | None = None

    def __post_init__(self) -> None:
        for name, codec in (("codec", self.codec), ("mean", self._second)):
            if not isinstance(codec, Codec) or codec.uneven or codec.summed:
                allowed = "a codec whose messages have a fixed size and cannot be added, such as "
                check.refuse(self, name, codec, f"{allowed}QSGD(4)")

    @property
    def _second(self) -> Codec:
        return self.codec if self.mean is None else self.mean

    @property
    def per_rank_state(self) -> tuple[str, ...]:  # type: ignore[override]
        biased = {"error": not self.codec.unbiased, "server": not self._second.unbiased}
        return tuple(key for key, kept in biased.items() if kept)

    @property
    def sharded(self) -> bool:  # type: ignore[override]
        return bool(self.per_rank_state)

    @property
    def batching(self) -> str:  # type: ignore[override]
        whole = (self.codec.batching, self._second.batching) == ("any", "any")
        return "any" if whole and not self.per_rank_state else super().batching

    def accept(self, spec: Spec, name: str) -> None:
        super().accept(spec, name)
        self._second.accept(spec, name)

    def init(self, spec: Spec, info: Info) -> State:
        """Return `error`: the rank's residual, in the codec's layout; `server`: its part's."""
        state, layout = super().init(spec, info), self.codec.layout(spec.shape)
        sizes = {"error": layout, "server": (self._cut(layout, info.size).length,)}
        return state | {key: spec.zeros(sizes[key]) for key in self.per_rank_state}

    def exchange(self, grad: Tensor, state: State, info: Info) -> ExchangeGenerator:
        """Send parts to their owners by an alltoall, and gather the means of parts."""
        xp, shape = namespace(grad), namespace(grad).shape(grad)
        stacked = bool(state) and 0 < math.prod(info.shape or (0,)) < math.prod(shape)
        layout = self.codec.layout(shape[1:] if stacked else shape)
        cut = self._cut(layout, info.size)
        first = cut.fitted(self.codec.specialize(info))
        x = xp.reshape(grad, (-1, *layout) if stacked else layout)
        x = xp.accumulate(state["error"], x) if "error" in state else xp.cast(x, "float32")
        rows = cut.rows(xp, x)
        own = [first.encode(x, info) for x in _groups(first, rows, cut)]
        received = yield from _dealt(first, own, rows, cut)
        room = cut.zeros(first, xp.shape(rows)[1], rows)
        part = cut.vectors(first, first.mean(received, room, info))
        if "error" in state:
            rest = cut.whole(_remains(first, rows, own, cut, info))
            state = {**state, "error": xp.reshape(rest, xp.shape(state["error"]))}
        means, state = yield from self._squeezed(part, state, cut, info)
        return xp.reshape(cut.whole(means), shape), state

    def _squeezed(
        self, part: Tensor, state: State, cut: Cut, info: Info
    ) -> Generator[Any, Any, tuple[Tensor, State]]:
        """Run the second pass: return all owners' messages, decoded, and the state.

        Args:
            part: mean of this rank's part, (tensors, length).
        """
        xp, codec = namespace(part), cut.fitted(self._second.specialize(info))
        if "server" in state:
            part = part + xp.reshape(state["server"], xp.shape(part))
        part = cut.held(part, info.rank)
        # Otherwise random codecs would use the random numbers of the first pass again.
        info = replace(info, name=f"{info.name}/mean")
        x = cut.view(codec, part)
        messages = yield from gathered(codec, codec.encode(x, info), xp.shape(x))
        if "server" in state:
            rest = cut.vectors(codec, codec.remove(x, messages[info.rank], info))
            state = {**state, "server": xp.reshape(rest, xp.shape(state["server"]))}
        return _decoded(codec, messages, part, cut, info), state

    def _cut(self, layout: tuple[int, ...], ranks: int) -> Cut:
        runs = [codec.run(layout) for codec in (self.codec, self._second)]
        return Cut.of(layout, ranks, min(runs), sum(self.codec.codes))

    # -------------------------------------------------------------------------------- residuals
    def residual(self, state: State) -> Tensor | None:
        """Return the residuals of the rank and of its part, one after the other."""
        own = [state[key] for key in self.per_rank_state if key in state]
        if not own:
            return None
        xp = namespace(own[0])
        return xp.concat([xp.reshape(x, (-1,)) for x in own])

    def with_residual(self, state: State, residual: Tensor) -> State:
        """Return the state with a residual in the form of `residual`."""
        xp, own = namespace(residual), {key: state[key] for key in self.per_rank_state}
        parts = xp.split(residual, [math.prod(xp.shape(x)) for x in own.values()])
        pairs = zip(own.items(), parts, strict=True)
        return {**state, **{key: xp.reshape(part, xp.shape(x)) for (key, x), part in pairs}}

    def expand_residual(self, residual: Tensor, spec: Spec, info: Info) -> Tensor:
        """Return e_i plus N times s in the rank's part, whose mean over the ranks is e + s."""
        xp, layout = namespace(residual), self.codec.layout(spec.shape)
        cut, total = self._cut(layout, info.size), spec.zeros(layout)
        if "error" in self.per_rank_state:
            total = xp.reshape(residual[: spec.size], layout)
        if "server" in self.per_rank_state:
            parts = [spec.zeros((cut.length,))] * info.size
            parts[info.rank] = residual[-cut.length :] * float(info.size)
            rows = xp.reshape(xp.concat(parts), (info.size, 1, cut.length))
            total = total + xp.reshape(cut.whole(rows), layout)
        return xp.reshape(total, spec.shape)

    def deactivate(self, state: State) -> State:
        """Return nothing: another level has taken all residuals."""
        return {}


@dataclass(frozen=True)
class Cut:
    """The division of tensors into equal parts of whole bytes, one for each rank.

    A part consists of runs of neighbours that share a scale. Matrices are cut between columns:
    their elements are neighbours column by column.

    Attributes:
        layout: shape of a tensor: a vector or a matrix.
        ranks: number of parts.
        runs: number of runs in a part.
        width: number of elements of a run.
    """

    layout: tuple[int, ...]
    ranks: int
    runs: int
    width: int

    @classmethod
    def of(cls, layout: tuple[int, ...], ranks: int, run: int, bits: int) -> Cut:
        """Return the parts with runs of at most `run` elements that take the fewest bytes.

        Args:
            bits: bits of an element. A run takes about 64 more, for its scale.
        """
        least, cuts = -(-math.prod(layout) // ranks), []
        for runs in range(-(-least // run), -(-least // run) + 8):
            unit = 8 // math.gcd(runs, 8)
            width = -(-least // (runs * unit)) * unit
            if width <= run:
                cuts.append(cls(layout, ranks, runs, width))
        return min(cuts, key=lambda cut: cut.length * bits + cut.runs * 64)

    @property
    def length(self) -> int:
        """Number of elements of a part, padding included; a multiple of 8."""
        return self.runs * self.width

    def fitted(self, codec: Codec) -> Codec:
        """Return the codec with this width of runs."""
        kind: Any = codec  # a dataclass, if it has arguments
        return replace(kind, **{codec.shared: self.width}) if codec.shared else codec

    def rows(self, xp: ModuleType, x: Tensor) -> Tensor:
        """Return (ranks, tensors, length) of one or several tensors in the layout."""
        x = xp.transpose(x) if len(self.layout) > 1 else x
        x = _padded(xp, xp.reshape(x, (-1, math.prod(self.layout))), self.ranks * self.length)
        return xp.swap_leading(xp.reshape(x, (-1, self.ranks, self.length)))

    def whole(self, rows: Tensor) -> Tensor:
        """Return tensors in the layout, (tensors, ...), without padding; inverse of `rows`."""
        xp, size = namespace(rows), math.prod(self.layout)
        x = xp.reshape(xp.swap_leading(rows), (-1, self.ranks * self.length))[:, :size]
        columns = xp.reshape(x, (-1, *self.layout[::-1]))
        return xp.transpose(columns) if len(self.layout) > 1 else columns

    def held(self, part: Tensor, rank: int) -> Tensor:
        """Return a rank's part with zeros in place of padding."""
        held = min(max(math.prod(self.layout) - rank * self.length, 0), self.length)
        return _padded(namespace(part), part[..., :held], self.length)

    def view(self, codec: Codec, vectors: Tensor) -> Tensor:
        """Return (number, length) as the codec encodes them: vectors, or matrices of runs."""
        xp = namespace(vectors)
        if len(codec.layout((1,))) == 1:
            return vectors
        return xp.transpose(xp.reshape(vectors, (-1, self.runs, self.width)))

    def vectors(self, codec: Codec, view: Tensor) -> Tensor:
        """Invert `view`."""
        xp = namespace(view)
        view = view if len(codec.layout((1,))) == 1 else xp.transpose(view)
        return xp.reshape(view, (-1, self.length))

    def zeros(self, codec: Codec, number: int, like: Tensor) -> Tensor:
        """Return zeros as the codec encodes a number of vectors, on the device of `like`."""
        matrix = len(codec.layout((1,))) > 1
        shape = (number, self.width, self.runs) if matrix else (number, self.length)
        return namespace(like).zeros(shape, "float32", namespace(like).device(like))


def _padded(xp: ModuleType, x: Tensor, width: int) -> Tensor:
    return x if xp.shape(x)[-1] == width else xp.pad_last(x, width)


# ------------------------------------------------------------------------------------ messages
# A codec with `codes` encodes all parts as one message, which is then cut, others one by one.
def _groups(codec: Codec, rows: Tensor, cut: Cut) -> list[Tensor]:
    """Return (ranks, tensors, length) as the codec encodes it, for one or `ranks` messages."""
    xp = namespace(rows)
    groups = [xp.reshape(rows, (-1, cut.length))] if codec.codes else xp.unstack(rows)
    return [cut.view(codec, group) for group in groups]


def _dealt(
    codec: Codec, messages: Sequence[Message], rows: Tensor, cut: Cut
) -> Generator[Any, Any, list[Message]]:
    """Send each rank the messages of its part; return those of this rank's part, by rank."""
    xp, ranks = namespace(rows), cut.ranks
    if codec.codes:
        codes, *scales = messages[0]
        shapes = [(ranks, xp.shape(x)[0] // ranks, *xp.shape(x)[1:]) for x in scales]
        sent = [xp.reshape(x, shape) for x, shape in zip(scales, shapes, strict=True)]
        sent.insert(0, _one(xp, _sections(codec, xp.reshape(codes, (1, -1)), ranks), 1))
    else:
        sent = [xp.stack(parts) for parts in zip(*messages, strict=True)]
    readers = codec.readers(xp.shape(cut.view(codec, rows[0]))) or (None,) * len(sent)
    pairs = zip(sent, readers, strict=True)
    received = yield tuple(Alltoall(x, decode=reader, rows=codec.rows) for x, reader in pairs)
    parts = [x if isinstance(x, tuple) else xp.unstack(x) for x in received]
    return list(zip(*parts, strict=True))


def _sections(codec: Codec, codes: Tensor, ranks: int) -> list[Tensor]:
    """Return the sections of packed codes, (messages, bytes), as `ranks` rows each."""
    xp, start, sections = namespace(codes), 0, []
    for bits in codec.codes:
        end = start + xp.shape(codes)[1] * bits // sum(codec.codes)
        sections.append(xp.reshape(codes[:, start:end], (ranks, -1)))
        start = end
    return sections


def _remains(
    codec: Codec, rows: Tensor, messages: Sequence[Message], cut: Cut, info: Info
) -> Tensor:
    """Return the parts of all ranks without what their messages encode. Consumes `rows`."""
    xp, rests = namespace(rows), []
    for x, message in zip(_groups(codec, rows, cut), messages, strict=True):
        readers = codec.readers(xp.shape(x)) or (None,) * len(message)
        pairs = zip(message, readers, strict=True)
        parsed = [part if read is None else read(part)[0] for part, read in pairs]
        rests.append(cut.vectors(codec, codec.remove(x, tuple(parsed), info)))
    return xp.reshape(_one(xp, rests), xp.shape(rows))


def _decoded(
    codec: Codec, messages: Sequence[Message], part: Tensor, cut: Cut, info: Info
) -> Tensor:
    """Return the tensors of the owners' messages, (ranks, tensors, length).

    Args:
        part: a tensor like this rank's part.
    """
    xp, parts, number = namespace(part), list(messages), namespace(part).shape(part)[0]
    if codec.codes:
        codes, *scales = ([*x] for x in zip(*messages, strict=True))
        joined = xp.reshape(_one(xp, _sections(codec, xp.stack(codes), 1), 1), (-1,))
        parts, number = [(joined, *map(xp.concat, scales))], number * cut.ranks
    means = [codec.decode(x, cut.zeros(codec, number, part), info) for x in parts]
    vectors = [cut.vectors(codec, mean) for mean in means]
    return xp.reshape(_one(xp, vectors), (cut.ranks, -1, cut.length))


def _one(xp: ModuleType, parts: list[Tensor], axis: int = 0) -> Tensor:
    return parts[0] if len(parts) == 1 else xp.concat(parts, axis)
