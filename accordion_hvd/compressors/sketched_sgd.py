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
    """SketchedSGD: find the largest elements of the ranks' sum from a sketch, then average these.

    The ranks add up count sketches of their accumulated momentum. A sketch is a table whose size
    does not depend on the number of ranks, and from which each rank estimates the largest elements
    of the sum. A second allreduce averages the values of these candidates exactly, and the largest
    k of them are the update. The update includes momentum, so the inner optimizer must be plain
    SGD.

    Each rank computes u = momentum u + g and v = v + u and sketches v. After the update, v and u
    are zero at the k selected elements. As in the paper, biases and small tensors are sent dense,
    with plain momentum (`plain`). Tensors that a sketch would not make smaller are sent dense as
    well, and then u is not zeroed.

    Ours: the ranks' mean instead of their sum; vectors of several tensors, up to 8 MB, instead of
    one vector of the entire model, so that they are sent during the backward pass; new hashes in
    each step, so that no two elements always collide; hashes of blocks of elements instead of
    single elements (`ops.count_sketch`), with the paper's bounds for each element.

    Args:
        ratio: fraction of the elements to send, in (0, 1]; k = ratio * size, at least one element.
            Default: 0.001.
        rows: number of rows of the sketch, odd and at least 1. 5 rows find nearly all large
            elements, 1 row finds few. Default: 5.
        columns: number of columns of the sketch as a multiple of k, at least 1; more columns give
            smaller errors. Default: 10.
        candidates: number of candidates as a multiple of k, an integer of at least 1. Default: 4.
        momentum: momentum coefficient in [0, 1), the paper's rho. Default: 0.9.

    Traffic: an allreduce of 4 rows columns k bytes and one of 4 candidates k bytes; with the
    defaults, 1/18 of the gradient.
    """

    summary = "SketchedSGD()", "0.22 n m", "plain SGD without momentum"
    output = "update"
    per_rank_state: ClassVar[tuple[str, ...]] = ("error", "momentum")
    scope = "flat"

    ratio: float = 0.001
    rows: int = 5
    columns: float = 10.0
    candidates: int = 4
    momentum: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        check.integer(self, "rows", self.rows, least=1)
        if self.rows % 2 == 0:  # the median would not be unique
            check.refuse(self, "rows", self.rows, "an odd number")
        if not check.is_number(self.columns) or self.columns < 1:
            check.refuse(self, "columns", self.columns, "a number of at least 1")
        check.integer(self, "candidates", self.candidates, least=1)
        check.below_one(self, "momentum", self.momentum)

    def init(self, spec: Spec, info: Info) -> State:
        """Return `error`, v, and `momentum`, u: vectors of the gradient's size."""
        state = super().init(spec, info)
        return state | ({"momentum": spec.zeros((spec.size,))} if self.momentum else {})

    def exchange(self, grad: Tensor, state: State, info: Info) -> ExchangeGenerator:
        """Average the sketch, then the candidates' values; or run one dense allreduce."""
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
        state = self._state(xp.clear(total, index), velocity)
        return xp.reshape(mean, xp.shape(grad)), state

    def plain(self) -> Compressor | None:
        return DGC(1.0, self.momentum) if self.momentum else super().plain()

    def width(self, size: int) -> int:
        """Return the columns of a sketch of `size` elements, or 0 if dense is smaller."""
        count = self.kept(size)
        columns = min(int(self.columns * count), size)
        return columns if self.rows * columns + self.candidates * count < size else 0

    def _state(self, error: Tensor, velocity: Tensor) -> State:
        return {"error": error} | ({"momentum": velocity} if self.momentum else {})
