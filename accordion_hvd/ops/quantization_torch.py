"""The operations of `accordion_hvd.ops.quantization` on entire PyTorch tensors, on any device.

No operation synchronizes a GPU. Results equal those on the CPU, except for the summation order of
"l1" and "l2" norms and of columns.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

import numpy as np
import torch

from accordion_hvd.ops import quantization, random

Tensor: TypeAlias = torch.Tensor
Table: TypeAlias = Callable[[], np.ndarray]


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    codes, packed = codes.reshape(-1), []
    for width in quantization.sections(bits):
        low = codes if width == bits else codes & (2**width - 1)
        bytes_ = _padded(low, 8 // width) << _places(width, codes.device)
        packed.append(bytes_.sum(1, dtype=torch.uint8))  # of bits in different places
        codes = codes >> width if width < bits else codes
    return torch.cat(packed) if len(packed) > 1 else packed[0]


def unpack_bits(packed: Tensor, bits: int, count: int) -> Tensor:
    codes, offset, shift = packed, 0, 0
    for width in quantization.sections(bits):
        length = -(-count * width // 8)
        parts = packed[offset : offset + length, None] >> _places(width, packed.device)
        parts = (parts & (2**width - 1) if width < 8 else parts).reshape(-1)[:count]
        codes = codes | parts << shift if shift else parts
        offset, shift = offset + length, shift + width
    return codes


@functools.cache
def _places(width: int, device: torch.device) -> Tensor:
    """Return the first bits of the codes of `width` bits in a byte."""
    return torch.arange(0, 8, width, dtype=torch.uint8, device=device)


def bucket_norms(x: Tensor, bucket: int, kind: str) -> Tensor:
    x = _flat(x)
    rows = _padded(x, min(bucket, x.numel()))
    if kind == "max":
        return rows.abs().amax(1)
    norms = torch.linalg.vector_norm(rows, 2 if kind == "l2" else 1, 1, dtype=torch.float64)
    return (norms / bucket if kind == "mean" else norms).float()


def quantize(x: Tensor, steps: Tensor, bucket: int, bits: int, seed: int | None = None) -> Tensor:
    x = _flat(x)
    zero, middle = torch.zeros_like(steps), quantization.middle(bits)
    shrink = torch.full_like(steps, quantization.SHRINK)
    inverse = torch.where(steps > quantization.LEAST, shrink / steps, zero)
    values = x * _spread(inverse, bucket, x.numel())
    noise = 0.5 if seed is None else _noise(quantization.table, x, seed)
    return pack_bits((values + (noise + middle)).to(torch.uint8), bits)


def sum_quantized(
    parts: Sequence[Tensor],
    steps: Sequence[Tensor],
    bucket: int,
    bits: int,
    middle: float,
    like: Tensor,
) -> Tensor:
    pairs = zip(parts, steps, strict=True)
    return _sum((_values(*pair, bucket, bits, middle, like) for pair in pairs), like)


def subtract_quantized(
    total: Tensor, packed: Tensor, steps: Tensor, bucket: int, bits: int, middle: float
) -> Tensor:
    return total.contiguous().sub_(_values(packed, steps, bucket, bits, middle, total))


def pack_signs(x: Tensor, turn: int | None = None) -> Tensor:
    x = _flat(x)
    if turn is None:
        return pack_bits((x >= 0).to(torch.uint8), 1)
    odd = (torch.arange(x.numel(), dtype=torch.int32, device=x.device) + turn % 2) % 2
    return pack_bits((x > (2 * odd - 1) * quantization.SMALLEST).to(torch.uint8), 1)


def pack_random_signs(x: Tensor, seed: int) -> Tensor:
    x = _flat(x)
    values = _noise(quantization.table, x, seed) + x * 0.5
    return pack_bits((values >= 0.5).to(torch.uint8), 1)


def pack_powers(x: Tensor, seed: int) -> Tensor:
    x = _flat(x)
    bits = x.view(torch.int32)
    magnitude = (bits & 0x7FFFFFFF).clamp_max(0x7F800000)  # NaN as infinity: no sum overflows
    exponents = (magnitude + _noise(quantization.mantissas, x, seed) >> 23).to(torch.uint8)
    return torch.cat([pack_bits((bits < 0).to(torch.uint8), 1), exponents])


def sum_powers(parts: Sequence[Tensor], weight: float, like: Tensor) -> Tensor:
    return _sum((_powers(packed, like) for packed in parts), like).mul_(weight)


def _powers(packed: Tensor, like: Tensor) -> Tensor:
    count = like.numel()
    signs, exponents = unpack_bits(packed[:-count], 1, count), packed[-count:]
    bits = -signs.int() << 31 | exponents.int() << 23
    return bits.view(torch.float32).view(like.shape)


def narrow(x: Tensor, names: Sequence[str], seed: int) -> Tensor:
    rows = _flat(x).view(len(names), -1)
    count = rows.shape[1]
    counters, width = _windows(tuple(names), count, x.device)
    places = random.hashed(counters, seed) % quantization.TABLE
    noise = _table(quantization.sixteens, x.device).unfold(0, width, 1).index_select(0, places)
    bits = rows.nan_to_num_(math.nan, math.inf, -math.inf).view(torch.int32)
    bits += noise.view(len(names), -1)[:, :count]
    return bits.view(torch.int16)[:, 1::2].reshape(x.shape)


def widen(words: Tensor) -> Tensor:
    return words.view(torch.bfloat16).float()


def column_means(x: Tensor, packed: Tensor) -> Tensor:
    bits = unpack_bits(packed, 1, x.numel()).view(x.shape).bool()
    means = []
    for chosen in (~bits, bits):
        total = x.masked_fill(~chosen, 0).sum(-2, dtype=torch.float64)
        means.append(total / chosen.sum(-2).clamp_min(1))
    return torch.stack(means, -2).float()


def sum_columns(parts: Sequence[Tensor], means: Sequence[Tensor], like: Tensor) -> Tensor:
    pairs = zip(parts, means, strict=True)
    return _sum((_columns(*pair, like) for pair in pairs), like)


def subtract_columns(total: Tensor, packed: Tensor, means: Tensor) -> Tensor:
    return total.contiguous().sub_(_columns(packed, means, total))


def _columns(packed: Tensor, means: Tensor, like: Tensor) -> Tensor:
    low, high = means[..., :1, :], means[..., 1:, :]
    bits = unpack_bits(packed, 1, like.numel()).view(like.shape)
    return (bits - 0.5) * (high - low) + (low + high) * 0.5


def _values(
    packed: Tensor, steps: Tensor, bucket: int, bits: int, middle: float, like: Tensor
) -> Tensor:
    codes = unpack_bits(packed, bits, like.numel()).float()
    return ((codes - middle) * _spread(steps, bucket, like.numel())).view(like.shape)


def _sum(values: Iterable[Tensor], like: Tensor) -> Tensor:
    """Return the fp32 sum, in the memory of `like` where possible; consumes `like`."""
    fits = like.dtype == torch.float32 and like.is_contiguous()
    out = (
        like.detach() if fits else torch.empty(like.shape, dtype=torch.float32, device=like.device)
    )
    for i, part in enumerate(values):
        out.copy_(part) if i == 0 else out.add_(part)
    return out


def _spread(steps: Tensor, bucket: int, count: int) -> Tensor:
    if steps.numel() == 1:
        return steps
    return steps[:, None].expand(-1, bucket).reshape(-1)[:count]


def _flat(x: Tensor) -> Tensor:
    """Return a vector of fp32, without a copy where possible."""
    return x.detach().float().contiguous().view(-1)


def _padded(x: Tensor, width: int) -> Tensor:
    """Return rows of `width`, with zeros to complete the last row."""
    missing = -x.numel() % width
    return (torch.nn.functional.pad(x, (0, missing)) if missing else x).view(-1, width)


def _noise(source: Table, x: Tensor, seed: int) -> Tensor:
    """Return the random number of each element from a table."""
    count = x.numel()
    windows = torch.arange(-(-count // quantization.WINDOW), device=x.device)
    places = random.hashed(windows, seed) % quantization.TABLE
    # A view with each window as a row: one index a window, in place of one an element.
    rows = _table(source, x.device).unfold(0, quantization.WINDOW, 1)
    return rows.index_select(0, places).reshape(-1)[:count]


@functools.lru_cache(1 << 12)
def _windows(names: tuple[str, ...], count: int, device: torch.device) -> tuple[Tensor, int]:
    counters, width = quantization.windows(names, count)
    return torch.from_numpy(counters).view(-1).to(device), width


@functools.cache
def _table(source: Table, device: torch.device) -> Tensor:
    values = source()
    if values.dtype == np.uint32:
        values = values.astype(np.int32)
    return torch.from_numpy(values).to(device)
