"""Averaging in two levels: dense within each host, compressed between hosts.

The reduce-scatter within a host, the exchange of slices between hosts and the allgather within a
host are the hierarchical allreduce of Jia et al. ("Highly Scalable Deep Learning Training System
with Mixed-Precision: Training ImageNet in Four Minutes", 2018). Compressing the slices, with
error feedback, is ours.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from accordion_hvd import check
from accordion_hvd.compressors.dense import Dense
from accordion_hvd.compressors.powersgd import PowerSGD, matrix_shape
from accordion_hvd.compressors.wrappers import CompressorWrapper
from accordion_hvd.core.base import (
    Allgather,
    Alltoall,
    Compressor,
    ExchangeGenerator,
    Info,
    Placement,
    Private,
    State,
    Tensor,
    place,
)
from accordion_hvd.core.running import within_group
from accordion_hvd.ops import namespace
from accordion_hvd.ops.spec import Spec


@dataclass(frozen=True)
class TwoLevel(CompressorWrapper):
    """Average densely within each host, and with an inner compressor between hosts.

    Each rank receives one slice of its host's mean gradient. The inner compressor averages the
    slice over the rank and its counterparts on the other hosts. The rank then gathers the other
    slices from the ranks of its host. It thus encodes one slice, and keeps the residual of that
    slice only.

    With L ranks per host there are L slices. The slice of a matrix is a block of rows; 1-D tensors,
    and matrices with fewer than L rows, are sliced as vectors. The last slice is padded with zeros.
    If all ranks share one host, the result is the dense mean, or what the inner compressor has for
    exempt tensors (`plain`). If no ranks share a host, the inner compressor serves alone.

    Args:
        compressor: the inner compressor, which serves between hosts. Default: `PowerSGD()`.

    Traffic per rank, for B bytes of gradient: 2 (L - 1) / L B within the host, and the inner
    compressor's traffic for one slice between hosts. All hosts must have the same number of ranks.
    16-bit gradients are added, and passed to the inner compressor, in fp32.
    """

    summary = "TwoLevel(TopK(0.01))", "4 n m within a host; inner between", "several ranks per host"
    compressor: Compressor = PowerSGD()
    topology_aware: ClassVar[bool] = True
    sharded: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not isinstance(self.compressor, Compressor):
            check.refuse(self, "compressor", self.compressor, "a Compressor such as PowerSGD(1)")
        if isinstance(self.compressor, Private):
            check.refuse(self, "compressor", self.compressor, "one that is not private")

    @property
    def batching(self) -> str:  # type: ignore[override]
        return "any" if self.compressor.batching == "any" else ""

    def init(self, spec: Spec, info: Info) -> State:
        """Return the inner state for this rank's slice, or that of `plain` on one host."""
        self.accept(spec, info.name)
        placement = _placement(info)
        if (alone := self._alone(placement)) is not None:
            return alone.init(spec, info)
        return self.compressor.init(_slice(spec, placement), _between(info, placement))

    def exchange(self, grad: Tensor, state: State, info: Info) -> ExchangeGenerator:
        """Run an alltoall within the host, the inner exchange between hosts, an allgather."""
        placement = _placement(info)
        if (alone := self._alone(placement)) is not None:
            return (yield from alone.exchange(grad, state, info))
        xp, ranks = namespace(grad), len(placement.intra)
        shape = xp.shape(grad)
        cut = slice_shape(shape, ranks)
        parts = yield Alltoall(_cut(grad, (ranks, *cut)), group=placement.intra)
        exchange = self.compressor.exchange(_mean(parts, ranks), state, _between(info, placement))
        mean, state = yield from within_group(placement.inter, exchange)
        means = yield Allgather(mean, group=placement.intra)
        return _joined(means, shape), state

    def expand_residual(self, residual: Tensor, spec: Spec, info: Info) -> Tensor:
        """Return this rank's part of the residual of the full tensor, with zeros elsewhere.

        The slice is multiplied by L, because it holds the mean over the L ranks of its host. When
        the number of ranks changes, the residuals of all slices are expanded like this.
        """
        placement = _placement(info)
        if (alone := self._alone(placement)) is not None:
            return alone.expand_residual(residual, spec, info)
        part, ranks = _slice(spec, placement), len(placement.intra)
        residual = self.compressor.expand_residual(residual, part, _between(info, placement))
        slices = [spec.zeros(part.shape)] * ranks
        residual = namespace(residual).reshape(residual, part.shape) * float(ranks)
        slices[placement.local_rank] = residual
        return _joined(slices, spec.shape)

    def _alone(self, placement: Placement) -> Compressor | None:
        """Return the compressor that serves if there is one host or one rank per host."""
        if len(placement.intra) == 1:
            return self.compressor
        return self.plain() or Dense() if len(placement.inter) == 1 else None

    def same_part(self, other: Compressor) -> bool:
        return isinstance(other, TwoLevel) and self.compressor.same_part(other.compressor)

    def warm_start(self, state: State, other: Compressor, other_state: State) -> State:
        if not state or not isinstance(other, TwoLevel):
            return state
        return self.compressor.warm_start(state, other.compressor, other_state)


def slice_shape(shape: tuple[int, ...], ranks: int) -> tuple[int, ...]:
    rows, width = matrix_shape(shape)
    if len(shape) > 1 and rows >= ranks:
        return -(-rows // ranks), width
    return (-(-math.prod(shape) // ranks),)


def _placement(info: Info) -> Placement:
    return place(info.hosts, info.rank, info.size)


def _between(info: Info, placement: Placement) -> Info:
    """Return the `Info` of the inner exchange, in which each host is one rank."""
    return replace(info, rank=placement.host, size=len(placement.inter), hosts=(), sizes=())


def _slice(spec: Spec, placement: Placement) -> Spec:
    return replace(spec, shape=slice_shape(spec.shape, len(placement.intra)), dtype=spec.wide)


def _cut(grad: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return the slices along a new first dimension, padded with zeros."""
    xp, size = namespace(grad), math.prod(shape)
    if math.prod(xp.shape(grad)) < size:
        grad = xp.pad_last(xp.reshape(grad, (-1,)), size)
    return xp.reshape(grad, shape)


def _mean(parts: Tensor, ranks: int) -> Tensor:
    """Return the mean over the first dimension, added in rank order in fp32 or better."""
    xp = namespace(parts)
    total = xp.cast(parts[0], "float64" if xp.dtype(parts) == "float64" else "float32")
    for rank in range(1, ranks):
        total = xp.accumulate(total, parts[rank])
    return total / ranks


def _joined(slices: Any, shape: tuple[int, ...]) -> Tensor:
    xp = namespace(slices[0])
    flat = xp.concat([xp.reshape(part, (-1,)) for part in slices])
    return xp.reshape(flat[: math.prod(shape)], shape)
