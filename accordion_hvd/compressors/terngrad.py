"""TernGrad: ternary gradients (Wen, Xu, Yan, Wu, Wang, Chen & Li, NeurIPS 2017)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from accordion_hvd import check
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
from accordion_hvd.ops import namespace, random


@dataclass(frozen=True)
class TernGrad(Compressor):
    """Round each element stochastically to -s, 0 or s, where s is the largest magnitude there is.

    Equations 1 to 3 of the paper, with gradient clipping (equation 15), layer by layer, and with
    scaler sharing: s is the maximum over the ranks, so that ternary values can be added and the
    sum of n of them has but 2 n + 1 values. Unbiased (to 2^-17 of s) for the clipped gradient, so
    nothing is kept. The deviation that clipping is measured by is taken about zero (ours).

    The paper's server becomes an alltoall, in which each rank adds one slice, and an allgather of
    the sums (ours); the result is the paper's, to the bit.

    Sent, of a tensor with d elements on n ranks: an allreduce of s, an alltoall of d / 4 bytes, an
    allgather of d / n sums of log2(2 n + 1) bits, rounded up (16 bits from 128 ranks on). So
    traffic hardly grows with the ranks.

    Args:
        clip: at how many standard deviations a gradient is clipped; None: it is not.
    """

    clip: float | None = 2.5

    def __post_init__(self) -> None:
        """Raises: ValueError when clip is neither None nor a positive number."""
        if self.clip is not None and not (check.is_number(self.clip) and self.clip > 0):
            check.refuse(self, "clip", self.clip, "a number above 0, or None")

    def exchange(self, grad: Tensor, state: State, info: Info) -> ExchangeGenerator:
        """Share the scaler; send slices of codes to their owners; gather the sums."""
        xp, ranks = namespace(grad), info.size
        size = math.prod(xp.shape(grad))
        values = xp.cast(xp.reshape(grad, (-1,)), "float32")
        largest = xp.bucket_norms(values, size, "max")
        if self.clip is not None:
            limit = xp.bucket_norms(values, size, "l2") * (self.clip / math.sqrt(size))
            largest = xp.minimum(largest, limit)
        scale = yield Allreduce(largest, op="max")
        if self.clip is not None:
            values = xp.clip(values, limit)
        seed = random.key("terngrad", info.name, info.step, info.rank)
        codes = xp.quantize(values, scale, size, 2, seed)  # 0, 1, 2: four a byte
        part = -(-size // (8 * ranks)) * 8  # elements of a slice
        slices = xp.reshape(xp.pad_last(codes, ranks * part // 4), (ranks, part // 4))
        theirs = yield Alltoall(slices)
        sums = yield Allgather(_packed_sum(theirs, part))
        return _mean(sums, part, scale, grad), state


def _bits(ranks: int) -> int:
    return (2 * ranks).bit_length()


def _packed_sum(rows: Tensor, part: int) -> Tensor:
    """Return the sum of the ranks' codes for a slice of `part` elements."""
    xp = namespace(rows)
    ranks = xp.unstack(rows)
    bits = _bits(len(ranks))
    total = xp.zeros((part,), "uint8" if bits <= 8 else "int16", xp.device(rows))
    for row in ranks:
        total = total + xp.cast(xp.unpack_bits(row, 2, part), xp.dtype(total))
    return xp.pack_bits(total, bits) if bits <= 8 else total


def _mean(sums: tuple[Tensor, ...], part: int, scale: Tensor, like: Tensor) -> Tensor:
    """Decode the sums of slices and divide them by the number of ranks; consumes `like`."""
    xp, ranks, shape = namespace(like), len(sums), namespace(like).shape(like)
    size, bits = math.prod(shape), _bits(len(sums))
    if bits > 8:
        total = xp.cast(xp.concat(list(sums))[:size], "float32") - float(ranks)
        return xp.reshape(total * (scale * (1 / ranks)), shape)
    codes = xp.concat([xp.unpack_bits(packed, bits, part) for packed in sums])[:size]
    return xp.sum_quantized([codes], [scale * (1 / ranks)], size, 8, ranks, like)
