"""Dense inside a machine, compressed between machines: a method around another one.

Reducing and scattering inside, exchanging slices outside and gathering inside is the hierarchical
allreduce of Jia et al. ("Highly Scalable Deep Learning Training System with Mixed-Precision:
Training ImageNet in Four Minutes", 2018). Another method for the slices, with its error, is ours.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from accordion_hvd import check
from accordion_hvd.compressors.compressor_wrapper import CompressorWrapper
from accordion_hvd.compressors.powersgd import PowerSGD, matrix_shape
from accordion_hvd.core.base import (
    Allgather,
    Allreduce,
    Alltoall,
    Compressor,
    ExchangeGenerator,
    Info,
    State,
    Tensor,
)
from accordion_hvd.core.composition import within_group
from accordion_hvd.core.placement import Placement, place
from accordion_hvd.ops import namespace
from accordion_hvd.ops.spec import Spec


@dataclass(frozen=True)
class TwoLevel(CompressorWrapper):
    """Average densely inside each machine, and by another compressor between the machines.

    With L ranks a machine, each rank gets its L-th of the machine's mean (a slice), exchanges it
    by `compressor` with the ranks that have its place on the other machines, and gets all slices
    of the result from its neighbours. So each rank encodes, and keeps the error of, one slice.

    A slice of a matrix is a block of its rows (1-D tensors, and matrices with fewer than L rows,
    are cut as vectors); the last one is filled up with zeros. Where all ranks share a machine the
    plain mean is left; where none do, `compressor` itself.

    Sent, for B bytes of gradient: inside the machine 2 (L - 1) / L B a rank; between machines what
    `compressor` sends for a slice. 16-bit gradients are added, and handed to `compressor`, in fp32.

    Args:
        compressor: what serves between machines.
    """

    compressor: Compressor = PowerSGD()
    topology_aware: ClassVar[bool] = True
    sharded: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Raises: ValueError when `compressor` is none."""
        if not isinstance(self.compressor, Compressor):
            allowed = "a Compressor such as PowerSGD(1)"
            check.refuse(self, "compressor", self.compressor, allowed)
        if self.compressor.private:
            check.refuse(self, "compressor", self.compressor, "one that is not private")
        for aspect in ("target", "output", "scope", "fp16_reduction"):
            object.__setattr__(self, aspect, getattr(self.compressor, aspect))
        batching = "any" if self.compressor.batching == "any" else ""
        object.__setattr__(self, "batching", batching)

    def init(self, spec: Spec, info: Info) -> State:
        """Return the inner state for this rank's slice; nothing where all ranks share a host.

        Raises:
            ValueError: machines have different numbers of ranks.
        """
        self.accept(spec, info.name)
        here = _place(info)
        if len(here.intra) == 1:
            return self.compressor.init(spec, info)
        if len(here.inter) == 1:
            return {}
        return self.compressor.init(_slice(spec, here), _between(info, here))

    def exchange(self, grad: Tensor, state: State, info: Info) -> ExchangeGenerator:
        """Run an alltoall inside the host, the inner rounds between hosts, an allgather."""
        here = _place(info)
        if len(here.intra) == 1:
            return (yield from self.compressor.exchange(grad, state, info))
        if len(here.inter) == 1:
            mean = yield Allreduce(grad, reuse=True)
            return mean, state
        xp, ranks = namespace(grad), len(here.intra)
        shape = xp.shape(grad)
        cut = slice_shape(shape, ranks)
        parts = yield Alltoall(_cut(grad, (ranks, *cut)), group=here.intra)
        talk = self.compressor.exchange(_mean(parts, ranks), state, _between(info, here))
        mean, state = yield from within_group(here.inter, talk)
        means = yield Allgather(mean, group=here.intra)
        return _joined(means, shape), state

    def expand_residual(self, residual: Tensor, spec: Spec, info: Info) -> Tensor:
        """Place this rank's part of the residual in zeros of the whole tensor.

        It counts once a machine: L times as much.

        On another number of ranks, all residuals of slices become such residuals.
        """
        here = _place(info)
        if len(here.intra) == 1:
            return self.compressor.expand_residual(residual, spec, info)
        part, ranks = _slice(spec, here), len(here.intra)
        residual = self.compressor.expand_residual(residual, part, _between(info, here))
        slices = [spec.zeros(part.shape)] * ranks
        slices[here.local_rank] = namespace(residual).reshape(residual, part.shape) * float(ranks)
        return _joined(slices, spec.shape)

    def warm_start(self, state: State, other: Compressor, other_state: State) -> State:
        """Let the inner compressor take over its predecessor's state, if both have slices."""
        if not state or not isinstance(other, TwoLevel):
            return state
        return self.compressor.warm_start(state, other.compressor, other_state)


def slice_shape(shape: tuple[int, ...], ranks: int) -> tuple[int, ...]:
    """Return the shape of each of `ranks` slices of a tensor."""
    rows, width = matrix_shape(shape)
    if len(shape) > 1 and rows >= ranks:
        return -(-rows // ranks), width
    return (-(-math.prod(shape) // ranks),)


def _place(info: Info) -> Placement:
    return place(info.hosts, info.rank, info.size)


def _between(info: Info, here: Placement) -> Info:
    """Return the `Info` for the inner compressor, whose ranks are hosts."""
    return replace(info, rank=here.host, size=len(here.inter), hosts=(), sizes=())


def _slice(spec: Spec, here: Placement) -> Spec:
    return replace(spec, shape=slice_shape(spec.shape, len(here.intra)), dtype=spec.wide)


def _cut(grad: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Slices along a new first dimension; those at the end are filled up with zeros."""
    xp, size = namespace(grad), math.prod(shape)
    if math.prod(xp.shape(grad)) < size:
        grad = xp.pad_last(xp.reshape(grad, (-1,)), size)
    return xp.reshape(grad, shape)


def _mean(parts: Tensor, ranks: int) -> Tensor:
    """Over the first dimension, added in rank order, in fp32 or better."""
    xp = namespace(parts)
    total = xp.cast(parts[0], "float64" if xp.dtype(parts) == "float64" else "float32")
    for rank in range(1, ranks):
        total = xp.accumulate(total, parts[rank])
    return total / ranks


def _joined(slices: Any, shape: tuple[int, ...]) -> Tensor:
    xp = namespace(slices[0])
    flat = xp.concat([xp.reshape(part, (-1,)) for part in slices])
    return xp.reshape(flat[: math.prod(shape)], shape)
