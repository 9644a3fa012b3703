"""STC: sparse ternary compression (Sattler, Wiedemann, Müller & Samek, IEEE TNNLS 2020)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from accordion_hvd.compressors.sparsifier import Chosen, Ratio, SparseCodec, places
from accordion_hvd.core.base import Info, Tensor
from accordion_hvd.core.codec import Message, Reader
from accordion_hvd.ops import namespace


@dataclass(frozen=True)
class STC(Ratio, SparseCodec):
    """Sparse ternary compression: send the signs of the largest elements and one magnitude.

    Each rank selects the `ratio` of its elements that are largest in residual + gradient, and sends
    their indices, their signs, and their mean magnitude. All ranks gather all messages and average
    them. The rest stays in the residual and is added to the next gradient.

    Algorithm 1 of "Robust and Communication-Efficient Federated Learning from Non-IID Data": the
    selected elements become mu sign(x), where mu is the mean of their magnitudes, and all others
    become 0.

    The paper's server compresses the mean a second time, as `DoubleSqueeze(STC())` does; here all
    ranks use the exact mean of the messages (ours). The paper encodes the distances between indices
    with Golomb codes, in 8.1 bits each at a ratio of 0.01; `ops.indices` needs 9.6 bits.

    Args:
        ratio: fraction of the elements to send, in (0, 1]; at least one element is sent. Default:
            0.0025, the 1/400 of the paper's experiments.

    Traffic: about 1.33 k (N - 1) bytes per rank for k elements in a ring of N ranks at a ratio of
    0.01, a quarter of `TopK`'s.
    """

    summary = "STC(0.01)", "0.013 n m, by allgather", "few ranks, slow links"
    contractive: ClassVar[bool] = True

    ratio: float = 0.0025

    def encode_accumulating(self, error: Tensor, x: Tensor, info: Info) -> tuple[Message, Tensor]:
        """Return magnitudes, signs and indices as one vector of bytes, and the sum."""
        xp, shape = namespace(error), namespace(error).shape(error)
        count = self.kept(shape[-1])
        total, index = xp.accumulate_largest(error, x, count)
        values = xp.take(xp.reshape(total, (-1,)), index)
        scale = xp.bucket_norms(values, count, "mean")
        parts = [xp.to_bytes(scale), xp.pack_signs(values), xp.pack_index(index, math.prod(shape))]
        return (xp.concat(parts),), total

    def readers(self, shape: tuple[int, ...]) -> tuple[Reader]:
        """Return a parser of indices, and of signs times the magnitude of their tensor."""
        rows = math.prod(shape[:-1])
        count = rows * self.kept(shape[-1])
        signs = 4 * rows + -(-count // 8)

        def read(payload: Tensor) -> tuple[Chosen, Tensor]:
            xp = namespace(payload)
            index, invalid = places(payload[..., signs:], count, math.prod(shape))
            lead = xp.shape(payload)[:-1]  # (ranks,) if all ranks' payloads are parsed together
            scale = xp.from_bytes(xp.reshape(payload[..., : 4 * rows], (-1,)), "float32", (-1,))
            packed = xp.reshape(payload[..., 4 * rows : signs], (-1,))
            bits = xp.unpack_bits(packed, 1, 8 * -(-count // 8) * math.prod(lead))
            bits = xp.cast(xp.reshape(bits, (*lead, -1))[..., :count], "float32")
            valid = xp.cast(1 - xp.reshape(invalid, (*lead, 1)), "int32")
            row = index * valid // shape[-1]  # 0 keeps invalid rows within `scale`
            if lead:
                first = xp.arange(lead[0], xp.device(payload)) * rows
                row = row + xp.reshape(xp.cast(first, "int32"), (-1, 1))
            scales = xp.reshape(xp.take(scale, xp.reshape(row, (-1,))), (*lead, count))
            values = (bits * 2 - 1) * scales
            return (index, values), invalid

        return (read,)
