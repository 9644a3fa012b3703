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
    """Ternary gradients: round each element stochastically to -s, 0 or s.

    The scaler s is the largest magnitude on any rank. Each rank sends 2 bits per element to the
    ranks that add them up, and all ranks gather the sums. The rounding is unbiased, so there is no
    error feedback.

    Equations 1 to 3 of the paper, layer by layer, with gradient clipping (equation 15) and scaler
    sharing: because s is the maximum over the ranks, ternary values can be added, and the sum of N
    of them has only 2 N + 1 possible values. The result is unbiased (to 2^-17 of s) for the clipped
    gradient.

    Ours: the standard deviation for clipping is taken about zero; the paper's server is replaced by
    an alltoall, after which each rank adds up one slice, and an allgather of the sums. The result
    is identical to the paper's, bit for bit.

    Args:
        clip: clipping threshold of a gradient, in standard deviations; None does not clip. Default:
            2.5.

    Traffic: for d elements on N ranks, an allreduce of s, an alltoall of d / 4 bytes, and an
    allgather of d / N sums of log2(2 N + 1) bits, rounded up (16 bits from 128 ranks on). Traffic
    hardly grows with the number of ranks.
    """

    summary = "TernGrad()", "0.3 n m on 2 ranks, 1.2 n m on 64", "many ranks"
    batching = "alike"

    clip: float | None = 2.5

    def __post_init__(self) -> None:
        if self.clip is not None and not (check.is_number(self.clip) and self.clip > 0):
            check.refuse(self, "clip", self.clip, "a number above 0, or None")

    def exchange(self, grad: Tensor, state: State, info: Info) -> ExchangeGenerator:
        """Reduce the scaler, send slices of codes to their owners, and gather the sums."""
        xp, ranks, total = namespace(grad), info.size, math.prod(namespace(grad).shape(grad))
        size = min(math.prod(info.shape or (total,)), total)  # of each tensor of a stack
        values = xp.cast(xp.reshape(grad, (-1,)), "float32")
        largest = xp.bucket_norms(values, size, "max")
        if self.clip is not None:
            limit = xp.bucket_norms(values, size, "l2") * (self.clip / math.sqrt(size))
            largest = xp.minimum(largest, limit)
        scale = yield Allreduce(largest, op="max")
        if self.clip is not None:
            rows = xp.clip(xp.reshape(values, (-1, size)), xp.reshape(limit, (-1, 1)))
            values = xp.reshape(rows, (-1,))
        seed = random.key("terngrad", info.name, info.step, info.rank)
        codes = xp.quantize(values, scale, size, 2, seed)  # 0, 1, 2: four a byte
        part = -(-total // (8 * ranks)) * 8  # elements of a slice
        slices = xp.reshape(xp.pad_last(codes, ranks * part // 4), (ranks, part // 4))
        received = yield Alltoall(slices)
        sums = yield Allgather(_packed_sum(received, part))
        return _mean(sums, part, scale, size, grad), state


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


def _mean(sums: tuple[Tensor, ...], part: int, scale: Tensor, size: int, like: Tensor) -> Tensor:
    """Decode the sums of slices and divide them by the number of ranks. Consumes `like`."""
    xp, ranks, shape = namespace(like), len(sums), namespace(like).shape(like)
    total, bits = math.prod(shape), _bits(len(sums))
    if bits > 8:
        rows = xp.reshape(xp.concat(list(sums))[:total], (-1, size))
        rows = (xp.cast(rows, "float32") - float(ranks)) * xp.reshape(scale * (1 / ranks), (-1, 1))
        return xp.reshape(rows, shape)
    codes = xp.concat([xp.unpack_bits(packed, bits, part) for packed in sums])[:total]
    return xp.sum_quantized([codes], [scale * (1 / ranks)], size, 8, ranks, like)
