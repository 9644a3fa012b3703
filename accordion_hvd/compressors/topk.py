"""Top-k sparsification with error feedback (Aji & Heafield, EMNLP 2017; Stich et al., 2018)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from accordion_hvd import check
from accordion_hvd.compressors.sparsifier import Chosen, Ratio, SparseCodec, decode, encode
from accordion_hvd.core.base import Info, Tensor
from accordion_hvd.core.codec import Message, Reader
from accordion_hvd.ops import namespace
from accordion_hvd.ops.spec import ITEMSIZE

_LARGEST = {"float16": 65504.0, "float32": math.inf}


@dataclass(frozen=True)
class TopK(Ratio, SparseCodec):
    """Top-k sparsification with error feedback: send the largest elements of each tensor.

    Each rank sends the `ratio` of its elements with the largest magnitude in residual + gradient,
    and their indices. All ranks gather all messages and average them. A rank keeps the other
    elements and rounding errors in its residual and adds them to the next gradient, so nothing is
    lost. The selection is exact.

    Args:
        ratio: fraction of the elements to send, in (0, 1]; at least one element is sent. Default:
            0.01.
        wire: dtype of the values sent, "float32" or "float16". Default: "float32".
        chunk: number of elements, 2 to 4096: divide each tensor into chunks of about this size,
            each with elements from all over the tensor, and send the largest of each chunk. A chunk
            fits into an accelerator's fast memory, but the elements are not quite the largest of
            the tensor. Default: None, the largest of the whole tensor.

    Traffic: about 5.2 k (N - 1) bytes per rank for k elements in a ring of N ranks at a ratio of
    0.01 (3.2 with fp16 values), so traffic grows with the number of ranks. An index takes 1.2 bytes
    (`ops.indices`); in a chunk 1.5, or 1 if `chunk` is at most 256.
    """

    summary = "TopK(0.01)", "0.052 n m, by allgather", "few ranks; `chunk=4096` on GPUs"
    contractive: ClassVar[bool] = True

    wire: str = "float32"
    chunk: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check.one_of(self, "wire", self.wire, tuple(_LARGEST))
        if self.chunk is not None:
            check.integer(self, "chunk", self.chunk, least=2, most=4096)

    def encode(self, x: Tensor, info: Info) -> Message:
        """Return indices and values as one vector of bytes."""
        xp = namespace(x)
        if self._chunks(xp.shape(x)[-1]):
            return self._of_chunks(x)
        return self._packed(x, xp.largest_index(x, self.kept(xp.shape(x)[-1])))

    def encode_accumulating(self, error: Tensor, x: Tensor, info: Info) -> tuple[Message, Tensor]:
        """Return the message for error + x, and that sum, in one pass over memory."""
        xp = namespace(error)
        if self._chunks(xp.shape(error)[-1]):
            total = xp.accumulate(error, x)
            return self._of_chunks(total), total
        total, index = xp.accumulate_largest(error, x, self.kept(xp.shape(error)[-1]))
        return self._packed(total, index), total

    def readers(self, shape: tuple[int, ...]) -> tuple[Reader, ...]:
        if self._chunks(shape[-1]):
            return (partial(self._read, shape=shape),)
        count = math.prod(shape[:-1]) * self.kept(shape[-1])
        return (partial(decode, size=math.prod(shape), wire=self.wire, count=count),)

    def _packed(self, x: Tensor, index: Tensor) -> Message:
        xp = namespace(x)
        values = self._rounded(xp.take(xp.reshape(x, (-1,)), index))
        return (encode(index, values, math.prod(xp.shape(x))),)

    def _rounded(self, values: Tensor) -> Tensor:
        """Round values to the wire dtype. The part that fp16 cannot hold stays in the residual."""
        xp, largest = namespace(values), _LARGEST[self.wire]
        if largest == math.inf:
            return values
        limit = xp.full((1,), largest, "float32", xp.device(values))
        return xp.cast(xp.clip(values, limit), self.wire)

    # ----------------------------------------------------------------- the largest of each chunk
    def _chunks(self, size: int) -> int:
        """Return the number of chunks of a tensor; 0 if its largest elements are sent.

        A chunk has `width` elements or one less, so fewer than `width` can be selected in each.
        """
        chunks = -(-size // self.chunk) if self.chunk else 0
        width = -(-size // max(chunks, 1))
        return chunks if self.kept(width) < width else 0

    @property
    def _wide(self) -> bool:
        """Return whether a place in a chunk takes more than 8 bits."""
        return self.chunk is not None and self.chunk > 256

    def _of_chunks(self, x: Tensor) -> Message:
        """Return the values, then the low 8 and the high 4 bits of their places in the chunks."""
        xp, size = namespace(x), namespace(x).shape(x)[-1]
        chunks = self._chunks(size)
        place = xp.largest_of_chunks(x, chunks, self.kept(-(-size // chunks)))
        index, _ = xp.index_of_chunks(place, size)
        values = self._rounded(xp.take(xp.reshape(x, (-1,)), index))
        place = xp.reshape(xp.to_bytes(place), (-1, 4))
        parts = [xp.to_bytes(values), place[:, 0]]
        return (xp.concat(parts + [xp.pack_bits(place[:, 1], 4)] * self._wide),)

    def _read(self, payload: Tensor, shape: tuple[int, ...]) -> tuple[Chosen, Tensor]:
        """Parse a payload of `_of_chunks`, or rows of them, for `Request.decode`."""
        xp, (*_, size) = namespace(payload), shape
        rows, chunks = math.prod(shape[:-1]), self._chunks(size)
        kept, item = self.kept(-(-size // chunks)), ITEMSIZE[self.wire]
        count, lead = rows * kept * chunks, xp.shape(payload)[:-1]
        wanted, length = (item + 1) * count + self._wide * -(-count // 2), xp.shape(payload)[-1]
        if length not in (None, wanted):  # None: unknown in a graph
            raise ValueError(f"{count} elements of chunks do not take {length} bytes")
        place = xp.cast(payload[..., item * count : (item + 1) * count], "int32")
        if self._wide:
            high = xp.reshape(payload[..., (item + 1) * count :], (-1,))
            codes = xp.unpack_bits(high, 4, math.prod(lead) * (count + count % 2))
            place = place + xp.cast(xp.reshape(codes, (*lead, -1)), "int32")[..., :count] * 256
        place = xp.reshape(place, (*lead, rows, kept, chunks))
        index, invalid = xp.index_of_chunks(place, size)
        values = xp.reshape(payload[..., : item * count], (-1,))
        return (index, xp.from_bytes(values, self.wire, (*lead, count))), invalid
