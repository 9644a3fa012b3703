"""SketchedSGD: communication-efficient SGD with sketching (Ivkin et al., NeurIPS 2019)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from accordion_hvd import check
from accordion_hvd.compressors.dgc import DGC
from accordion_hvd.compressors.sparsifier import Sparsifier
from accordion_hvd.core.base import Allreduce, Compressor, ExchangeGenerator, Info, State, Tensor
from accordion_hvd.ops import count_sketch, namespace, random
from accordion_hvd.ops.spec import Spec


@dataclass(frozen=True)
class SketchedSGD(Sparsifier):
    """Find the largest elements of the ranks' sum in a sketch of it, send these exactly.

    Each rank adds its gradient to its momentum, u = momentum u + g, and that to its error,
    v = v + u. The ranks add up count sketches of v, tables whose size depends neither on the
    number of elements nor of ranks. The `candidates` k elements that are largest by the sketch are
    averaged exactly in a second round; of these the k largest are the update, and v and u are
    zero there from then on. Returned is a finished direction: use plain SGD inside.

    As in the paper, biases and small tensors travel dense (with plain momentum: `plain`), and so
    does what a sketch would not make smaller; then u is kept. Ours: the mean instead of the sum
    over ranks; not the whole model is one vector but tensors side by side, up to 8 MB, so that they
    leave during backward; new hashes at each step, so that no two elements collide for ever; hashes
    move blocks of elements instead of single ones (`ops.count_sketch`), with the paper's bounds for
    each element.

    Sent, for k = ratio * size: an allreduce of 4 rows columns k bytes, and one of 4 candidates k.
    At the defaults that is an 18th of the gradient.

    Args:
        ratio: k, as a part of the elements, in (0, 1]; at least one element is sent.
        rows: of the sketch, odd and at least 1; 5 find nearly all large elements, 1 few.
        columns: of the sketch, in multiples of k, at least 1; the more, the fewer errors.
        candidates: how many times k elements are asked for exactly, an integer of at least 1.
        momentum: the paper's rho, in [0, 1).
    """

    output: ClassVar[str] = "update"
    per_rank_state: ClassVar[tuple[str, ...]] = ("error", "momentum")
    scope: ClassVar[str] = "flat"

    ratio: float = 0.001
    rows: int = 5
    columns: float = 10.0
    candidates: int = 4
    momentum: float = 0.9

    def __post_init__(self) -> None:
        """Raises: ValueError for arguments out of bounds, an even number of rows among them."""
        super().__post_init__()
        check.integer(self, "rows", self.rows, least=1)
        if self.rows % 2 == 0:  # the median would be a matter of taste
            check.refuse(self, "rows", self.rows, "an odd number")
        if not check.is_number(self.columns) or self.columns < 1:
            check.refuse(self, "columns", self.columns, "a number of at least 1")
        check.integer(self, "candidates", self.candidates, least=1)
        check.below_one(self, "momentum", self.momentum)

    def init(self, spec: Spec, info: Info) -> State:
        """`error`: v, a vector with the gradient's elements; `momentum`: u, another one."""
        state = super().init(spec, info)
        return state | ({"momentum": spec.zeros((spec.size,))} if self.momentum else {})

    def exchange(self, grad: Tensor, state: State, info: Info) -> ExchangeGenerator:
        """Run two rounds: the sketch, then the candidates' values; or one without a sketch."""
        xp = namespace(grad)
        fresh = xp.reshape(grad, (-1,))
        velocity = fresh
        if self.momentum:
            velocity = xp.accumulate_scaled(state["momentum"], self.momentum, fresh)
        total = xp.accumulate(state["error"], velocity)
        size = xp.shape(total)[0]
        columns = self.width(size)
        if not columns:
            mean = yield Allreduce(total)
            return xp.reshape(mean, xp.shape(grad)), self._state(xp.zeros_reusing(total), velocity)
        count, seed = self.kept(size), random.key("sketch", info.name, info.step)
        codes = count_sketch.hashes(xp, size, self.rows, columns, seed, xp.device(grad))
        table = yield Allreduce(xp.sketch(total, codes, columns), reuse=True)
        estimates = xp.unsketch(table, codes, fresh)
        candidates = xp.largest_index(estimates, self.candidates * count)
        values = yield Allreduce(xp.take(total, candidates), reuse=True)
        chosen = xp.largest_index(values, count)
        index = xp.take(candidates, chosen)
        mean = xp.add_at(xp.zeros_reusing(estimates), index, xp.take(values, chosen))
        if self.momentum:
            velocity = xp.clear(velocity, index)
        new = self._state(xp.clear(total, index), velocity)
        return xp.reshape(mean, xp.shape(grad)), new

    def plain(self) -> Compressor | None:
        """Plain momentum, for tensors that are not compressed."""
        return DGC(1.0, self.momentum) if self.momentum else super().plain()

    def width(self, size: int) -> int:
        """Columns of the sketch of `size` elements; 0 where they travel as they are instead."""
        count = self.kept(size)
        columns = min(int(self.columns * count), size)
        return columns if self.rows * columns + self.candidates * count < size else 0

    def _state(self, error: Tensor, velocity: Tensor) -> State:
        return {"error": error} | ({"momentum": velocity} if self.momentum else {})
