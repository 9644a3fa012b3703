"""Tensor operations on PyTorch tensors, on CPUs and GPUs.

Signatures and semantics are those of `accordion_hvd.ops.numpy`; docstrings say what differs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch

from accordion_hvd import check
from accordion_hvd.ops import count_sketch, indices, journal, quantization, secret
from accordion_hvd.ops import numpy as oracle
from accordion_hvd.ops import quantization_torch as anywhere
from accordion_hvd.ops.spec import BROKEN, FOLDS, LARGEST, Spec

Tensor: TypeAlias = torch.Tensor
_Operation = TypeVar("_Operation", bound=Callable[..., Any])


def _numpy_on_cpu(operation: _Operation) -> _Operation:
    """Run the NumPy operation of the same name on CPU tensors, and `operation` on others."""
    on_numpy = getattr(oracle, operation.__name__)

    @functools.wraps(operation)
    def run(first: Any, *others: Any) -> Any:
        tensor = first if isinstance(first, torch.Tensor) else first[0]
        if tensor.device.type != "cpu":
            return operation(first, *others)
        result = on_numpy(*map(_array, (first, *others)))
        if isinstance(result, tuple):
            return tuple(map(torch.from_numpy, result))
        return torch.from_numpy(result)

    return run  # type: ignore[return-value]


def _array(x: Any) -> Any:
    """Convert tensors, also within a sequence, to NumPy arrays; return other objects unchanged."""
    if isinstance(x, torch.Tensor):
        return (x.float() if x.dtype == torch.bfloat16 else x).detach().numpy()
    return [_array(part) for part in x] if isinstance(x, (list, tuple)) else x


shape = oracle.shape
reshape = oracle.reshape
unstack = oracle.unstack
symbolic = oracle.symbolic
exceeds = oracle.exceeds
where = oracle.where


def spec(x: Tensor) -> Spec:
    """Return the shape, dtype and device of `x` as a `Spec`.

    Raises:
        ValueError: if `x` is sparse.
    """
    import accordion_hvd.ops.torch as xp

    if x.layout != torch.strided:
        check.refuse(x, "layout", x.layout, "torch.strided (dense)")
    return Spec(tuple(x.shape), dtype(x), xp, x.device)


def dtype(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


def device(x: Tensor) -> Any:
    return x.device


def zeros(shape: Sequence[int], dtype: str, device: Any = None) -> Tensor:
    return torch.zeros(tuple(shape), dtype=getattr(torch, dtype), device=device)


def full(shape: Sequence[int], value: float, dtype: str, device: Any = None) -> Tensor:
    return torch.full(tuple(shape), value, dtype=getattr(torch, dtype), device=device)


def arange(count: int, device: Any = None) -> Tensor:
    return torch.arange(count, dtype=torch.int64, device=device)


def asarray(x: np.ndarray, device: Any = None) -> Tensor:
    return torch.tensor(x, device=device)


def to_numpy(x: Tensor) -> np.ndarray:
    return _array(x.cpu())


def cast(x: Tensor, dtype: str) -> Tensor:
    return x.to(getattr(torch, dtype))


def copy(x: Tensor) -> Tensor:
    return x.detach().clone(memory_format=torch.contiguous_format)


def transpose(x: Tensor) -> Tensor:
    return x.mT


def minimum(a: Tensor, b: Tensor) -> Tensor:
    return torch.minimum(a, b)


def maximum(a: Tensor, b: Tensor) -> Tensor:
    return torch.maximum(a, b)


def maximum_of(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(parts)).max()


def concat(parts: Sequence[Tensor], axis: int = 0) -> Tensor:
    return torch.cat(list(parts), axis)


def split(x: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    return list(torch.split(x, list(sizes)))


def stack(parts: Sequence[Tensor], into: Tensor | None = None) -> Tensor:
    first = parts[0]
    if into is not None and into.dtype == first.dtype and into.device == first.device:
        if into.shape == (len(parts), *first.shape):
            return torch.stack(list(parts), out=into)
    return torch.stack(list(parts))


def to_bytes(x: Tensor) -> Tensor:
    if not x.numel():  # strides of an empty tensor are arbitrary
        return torch.empty(0, dtype=torch.uint8, device=x.device)
    return x.contiguous().reshape(-1).view(torch.uint8)


def from_bytes(x: Tensor, dtype: str, shape: Sequence[int]) -> Tensor:
    kind = getattr(torch, dtype)
    if not x.numel():
        return torch.empty(0, dtype=kind, device=x.device).reshape(tuple(shape))
    if x.storage_offset() % kind.itemsize:
        x = x.clone()  # a view of another dtype must be aligned
    return x.view(kind).reshape(tuple(shape))


def accumulate(a: Tensor, b: Tensor) -> Tensor:
    journal.record(lambda: a.sub_(b))
    return a.add_(b)


def accumulate_scaled(a: Tensor, factor: float, b: Tensor) -> Tensor:
    journal.record(lambda: a.sub_(b).div_(factor))
    return a.mul_(factor).add_(b)


def subtract(a: Tensor, b: Tensor) -> Tensor:
    journal.record(lambda: a.add_(b))
    return a.sub_(b)


def momentum(m: Tensor, beta: float, x: Tensor) -> Tensor:
    if beta:
        journal.record(lambda: m.sub_(x, alpha=1 - beta).div_(beta))
    else:
        saved = m.clone()
        journal.record(lambda: m.copy_(saved))
    return m.mul_(beta).add_(x, alpha=1 - beta)


def lerp(x: Tensor, beta: float, m: Tensor) -> Tensor:
    if x.dtype != m.dtype:
        return torch.add(beta * m, x, alpha=1 - beta)
    return x.mul_(1 - beta).add_(m, alpha=beta)


def second_moment(v: Tensor, beta: float, x: Tensor) -> Tensor:
    wide = x.to(v.dtype)
    return v.mul_(beta).addcmul_(wide, wide, value=1 - beta)


def bounded_ratio(m: Tensor, b: Tensor, eps: float = 0.0) -> Tensor:
    out = torch.add(b, eps).clamp_min_(quantization.SMALLEST)
    return torch.div(m, out, out=out).clamp_(-1, 1)


def preconditioned(m: Tensor, v: Tensor, rates: Sequence[Any], eps: float, like: Tensor) -> Tensor:
    fits = like.dtype == m.dtype and like.is_contiguous()
    out = like if fits else torch.empty_like(m)
    torch.mul(v, rates[1], out=out)
    torch.div(m, out.sqrt_().add_(eps), out=out)
    return out.mul_(rates[0])


def mask_where_zero(x: Tensor, v: Tensor) -> Tensor:
    if v.device.type == "cpu" and v.numel() and v.min() > 0:  # ten times as fast as masked_fill_
        return x
    return x.masked_fill_(v <= 0, 0)


def pad_last(x: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(x, (0, width - x.shape[-1]))


def swap_leading(x: Tensor) -> Tensor:
    return x.transpose(0, 1).contiguous()


def project(
    error: Tensor, grad: Tensor, p: Tensor, q: Tensor, basis: Tensor, left: bool = False
) -> tuple[Tensor, Tensor]:
    if error.device.type != "cpu":
        bad = too_large(grad)
        journal.record(lambda: error.add_(p.mT @ q))
        total = accumulate(deflate(error, p, q), zero_if_bad(grad, bad))
        projected = basis @ (total if left else total.mT)
        projected = projected.masked_fill(bad > 0, math.inf)
        return total, projected.masked_fill_(bad > 1, math.nan)
    if not _by_blocks(error) or not _by_blocks(grad):
        if not _fits(grad):
            return error, torch.full_like(q if left else p, _excess(grad))
        journal.record(lambda: error.add_(p.mT @ q))
        total = accumulate(deflate(error, p, q), grad)
        return total, basis @ (total if left else total.mT)
    projected = torch.zeros_like(q) if left else torch.empty_like(p)
    for rows in _blocks(error):
        fresh = grad[rows]
        if not _fits(fresh):
            _unproject(error[: rows.start], grad, p, q)
            return error, projected.fill_(_excess(grad))
        total = _minus(error[rows], p[:, rows], q).add_(fresh)
        if left:
            projected.addmm_(basis[:, rows], total)
        else:
            torch.mm(basis, total.t(), out=projected[:, rows])
    journal.record(lambda: _unproject(error, grad, p, q))
    return error, projected


def _excess(grad: Tensor) -> float:
    """Return each element of the projection of a gradient that does not fit."""
    return math.inf if bool(torch.isfinite(grad).all()) else math.nan


def _unproject(total: Tensor, grad: Tensor, p: Tensor, q: Tensor) -> None:
    """Undo `project` for the first rows, up to rounding."""
    total.sub_(grad[: len(total)]).addmm_(p[:, : len(total)].t(), q)


def fold(x: Tensor, signs: Tensor) -> Tensor:
    (rows, width), total = signs.shape, torch.zeros_like(signs)
    columns = width - 2 * FOLDS
    count = -(-x.shape[1] // columns)
    x = pad_last(x, count * columns).view(rows, count, columns)
    strides = signs.stride(0), 1, 1  # each window begins one further
    windows = signs.as_strided(x.shape, strides, signs.storage_offset() + FOLDS)
    flipped = (x * windows).to(signs.dtype).mT
    total[:, :columns] = (flipped @ signs[:, :count, None]).squeeze(2)
    return total


def expand(p: Tensor, q: Tensor, like: Tensor) -> Tensor:
    if not _by_blocks(like):
        fits = like.is_contiguous() and like.dtype == p.dtype and not like.requires_grad
        out = like if fits else None  # saves an allocation
        return torch.mul(p.mT, q, out=out) if p.shape[-2] == 1 else torch.matmul(p.mT, q, out=out)
    for rows in _blocks(like):
        _product(p[:, rows], q, out=like[rows])
    return like


def deflate(error: Tensor, p: Tensor, q: Tensor) -> Tensor:
    if error.dim() == 3 and p.shape[-2] == 1:  # several times as fast for small matrices
        return error.sub_(p.mT * q)
    if not _by_blocks(error):
        product = error.baddbmm_ if error.dim() == 3 else error.addmm_
        return product(p.mT, q, alpha=-1)
    for rows in _blocks(error):
        _minus(error[rows], p[:, rows], q)
    return error


def _minus(error: Tensor, p: Tensor, q: Tensor) -> Tensor:
    """Subtract p^T q in place from a block that fits into the cache."""
    if p.shape[0] > _FEW:
        return error.addmm_(p.t(), q, alpha=-1)
    for i in range(p.shape[0]):
        error.addr_(p[i], q[i], alpha=-1)
    return error


_BLOCK = 1 << 19  # elements of a block that fits into a core's cache with its operands


def _by_blocks(x: Tensor) -> bool:
    """Return whether `x` is a matrix on the CPU that is worth processing in blocks."""
    plain = x.device.type == "cpu" and x.dim() == 2 and x.numel() > 2 * _BLOCK
    return plain and x.dtype == torch.float32 and x.is_contiguous()


def _blocks(x: Tensor) -> list[slice]:
    count = max(1, _BLOCK // x.shape[1])
    return [slice(start, start + count) for start in range(0, x.shape[0], count)]


def _product(p: Tensor, q: Tensor, out: Tensor) -> Tensor:
    """Return p^T q; for few rows, several times as fast as a general matrix product."""
    if p.shape[0] > _FEW:
        return torch.mm(p.t(), q, out=out)
    torch.outer(p[0], q[0], out=out)
    for i in range(1, p.shape[0]):
        out.addr_(p[i], q[i])
    return out


_FEW = 6  # rows up to which outer products are faster


def zeros_reusing(x: Tensor) -> Tensor:
    if x.dtype == torch.float32 and x.is_contiguous():
        return x.zero_()
    return torch.zeros(x.shape, dtype=torch.float32, device=x.device)


def clear(x: Tensor, index: Tensor) -> Tensor:
    taken = x[index]
    journal.record(lambda: x.index_copy_(0, index.long(), taken))
    return x.index_fill_(0, index.long(), 0)


def add_at(x: Tensor, index: Tensor, values: Tensor) -> Tensor:
    """Return the vector `x` with `values` added at `index`, without duplicates. Consumes `x`."""
    journal.record(lambda: x.index_add_(0, index, values, alpha=-1))
    return x.index_add_(0, index, values)


def sum_sparse(index: Sequence[Tensor], values: Sequence[Tensor], like: Tensor) -> Tensor:
    total = zeros_reusing(like)
    flat = total.view(-1)
    for positions, elements in zip(index, values, strict=True):
        flat.index_add_(0, positions, elements)
    return total


def take(x: Tensor, index: Tensor) -> Tensor:
    return torch.index_select(x, 0, index)


def sum_at(index: Tensor, values: Tensor, size: int) -> Tensor:
    out = torch.zeros(size, dtype=torch.int32, device=index.device)
    return out.index_add_(0, index, values)


def finite(x: Tensor) -> Tensor:
    values = x.float()
    return torch.where(torch.isfinite(values), values, 0.0)


def secret_uniform(count: int, device: Any = None) -> Tensor:
    return torch.from_numpy(secret.uniform(count)).float().to(device)


def secret_normal(count: int, sigma: float, dtype: str, device: Any = None) -> Tensor:
    return torch.from_numpy(secret.rounded_normal(count, sigma, dtype)).to(device)


@_numpy_on_cpu
def largest_index(x: Tensor, count: int) -> Tensor:
    """Return the positions of the `count` largest magnitudes of each row: int32, ascending."""
    rows = x.reshape(-1, x.shape[-1])
    index = torch.topk(rows.abs(), min(count, rows.shape[1]), sorted=False).indices
    first = torch.arange(rows.shape[0], device=x.device)[:, None] * rows.shape[1]
    return (index + first).reshape(-1).sort().values.int()


@_numpy_on_cpu
def accumulate_largest(error: Tensor, grad: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return error + grad and its `largest_index`, in one pass on the CPU. Consumes `error`."""
    total = accumulate(error, grad)
    return total, largest_index(total, count)


@_numpy_on_cpu
def accumulate_reaching(error: Tensor, grad: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    """Return error + grad and the positions where |error + grad| >= limit. Consumes `error`."""
    total = accumulate(error, grad)
    flat = total.reshape(-1)
    chosen = flat.abs() >= limit if limit > 0 else flat != 0
    return total, chosen.nonzero()[:, 0].int()


@_numpy_on_cpu
def accumulate_outgrown(error: Tensor, grad: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return error + grad, AdaComp's positions and scales (`ops.selection`). Consumes `error`."""
    total = accumulate(error, grad)
    rows = total.reshape(-1, total.shape[-1])
    most = _in_bins(rows.abs(), width).amax(2)
    limits = torch.where(most > 0, most, torch.inf)[:, :, None]
    pushed = _in_bins((rows + grad.reshape(rows.shape)).abs(), width) >= limits
    chosen = pushed.reshape(rows.shape[0], -1)[:, : rows.shape[1]] & (rows != 0)
    scale = most.mean(1, dtype=torch.float64).float()
    return total, chosen.reshape(-1).nonzero()[:, 0].int(), scale


def _in_bins(rows: Tensor, width: int) -> Tensor:
    """Return `rows` as (rows, bins, width), padded with zeros."""
    padded = torch.nn.functional.pad(rows, (0, -rows.shape[1] % width))
    return padded.reshape(rows.shape[0], -1, width)


@_numpy_on_cpu
def largest_of_bins(x: Tensor, width: int) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    within = _in_bins(rows.abs(), width).argmax(2)
    index = within + torch.arange(within.shape[1], device=x.device) * width
    first = torch.arange(rows.shape[0], device=x.device)[:, None] * rows.shape[1]
    return (index + first).reshape(-1).int()


@_numpy_on_cpu
def largest_of_chunks(x: Tensor, chunks: int, count: int) -> Tensor:
    rows = x.reshape(-1, x.shape[-1]).abs()
    padded = torch.nn.functional.pad(rows, (0, -rows.shape[1] % chunks), value=-1)
    place = torch.topk(padded.view(len(rows), -1, chunks), count, 1, sorted=False).indices
    return place.sort(1).values.int()


@_numpy_on_cpu
def index_of_chunks(place: Tensor, size: int) -> tuple[Tensor, Tensor]:
    *lead, rows, _, chunks = place.shape
    first, chunk = (torch.arange(n, dtype=torch.int32, device=place.device) for n in (rows, chunks))
    place = place.clamp_max(-(-size // chunks))
    index = place * chunks + chunk
    outside = (index >= size).reshape(*lead, -1).any(-1)
    falling = (place[..., 1:, :] <= place[..., :-1, :]).reshape(*lead, -1).any(-1)
    index = index.clamp_max(size - 1) + first[:, None, None] * size
    return index.reshape(*lead, -1), (outside | falling).float().reshape(-1)


def pack_bins(index: Tensor, signs: Tensor, shape: Sequence[int], width: int) -> Tensor:
    """Pack positions in bins, and signs, into one or two bytes each; on the host."""
    packed = oracle.pack_bins(to_numpy(index), to_numpy(signs), shape, width)
    return torch.from_numpy(packed).to(index.device)


def unpack_bins(packed: Tensor, shape: Sequence[int], width: int) -> tuple[Tensor, Tensor]:
    """Invert `pack_bins`, on the host."""
    index, signs = indices.unpack_bins(to_numpy(packed), shape, width)
    return torch.from_numpy(index).to(packed.device), torch.from_numpy(signs).to(packed.device)


@_numpy_on_cpu
def pack_index(index: Tensor, size: int) -> Tensor:
    low = indices.low_bytes(index.numel(), size)
    if low == 4:
        return to_bytes(index)
    tail = to_bytes(index).reshape(-1, 4)[:, :low].reshape(-1)
    count, length = index.numel(), -(-indices.bitmap_bits(index.numel(), size, low) // 8)
    bits = torch.zeros(8 * length, dtype=torch.uint8, device=index.device)
    ones = (index >> 8 * low).long() + torch.arange(count, device=index.device)
    bits.index_fill_(0, ones, 1)  # unlike an assignment, it copies no 1 from the host
    weights = 1 << torch.arange(8, dtype=torch.uint8, device=index.device)
    bitmap = (bits.reshape(-1, 8) * weights).sum(1, dtype=torch.uint8)
    return torch.cat([tail, bitmap])


@_numpy_on_cpu
def unpack_index(packed: Tensor, count: int, size: int) -> Tensor:
    """Invert `pack_index`, in `packed` or in each row of it."""
    low = indices.low_bytes(count, size)
    if low == 4:
        return from_bytes(packed.reshape(-1), "int32", (*packed.shape[:-1], count))
    lead = packed.shape[:-1]
    tail = packed[..., : low * count].reshape(*lead, count, low).int()
    bit = torch.arange(8, dtype=torch.uint8, device=packed.device)
    bits = (packed[..., low * count :, None] >> bit) & 1
    number = torch.arange(count, dtype=torch.int32, device=packed.device)
    ones = bits.reshape(*lead, -1).cumsum(-1, dtype=torch.int32)
    wanted = (number + 1).expand(*lead, count).contiguous()
    index = (torch.searchsorted(ones, wanted, out_int32=True) - number) << 8 * low
    for byte in range(low):
        index |= tail[..., byte] << 8 * byte
    return torch.where(ones[..., -1:] == count, index, -1)  # -1 fails `invalid_index`


@_numpy_on_cpu
def invalid_index(index: Tensor, size: int) -> Tensor:
    outside = (index[..., :1] < 0).any(-1) | (index[..., -1:] >= size).any(-1)
    return (outside | (index[..., 1:] <= index[..., :-1]).any(-1)).float().reshape(-1)


def raise_on_invalid(x: Any, doubts: Tensor, senders: Sequence[Any]) -> Any:
    return oracle.raise_on_invalid(x, to_numpy(doubts), senders)


@_numpy_on_cpu
def sketch(x: Tensor, codes: Tensor, columns: int) -> Tensor:
    return torch.stack([count_sketch.moved(x.float(), row, columns).sum(0) for row in codes])


@_numpy_on_cpu
def unsketch(table: Tensor, codes: Tensor, like: Tensor) -> Tensor:
    pairs = zip(table, codes, strict=True)
    rows = [count_sketch.found(*pair, like.numel()) for pair in pairs]
    return torch.stack(rows).median(0).values


def argsort(x: Tensor) -> Tensor:
    return torch.argsort(x, stable=True).int()


def frames(x: Tensor, width: int, step: int) -> Tensor:
    return x.unfold(-1, width, step).contiguous()


def overlap_add(x: Tensor, step: int) -> Tensor:
    rows, count, width = x.shape
    extra = -(-width // step) - 1
    out = torch.zeros((rows, count + extra, step), dtype=x.dtype, device=x.device)
    for i in range(extra + 1):
        part = x[..., i * step : (i + 1) * step]
        out[:, i : i + count, : part.shape[-1]] += part
    return out.reshape(rows, -1)[:, : (count - 1) * step + width]


def orthogonalize(p: Tensor) -> Tensor:
    if p.device.type != "cpu":
        return _normalize(p) if p.shape[-2] == 1 else _orthogonalize_by_gram(p)
    if p.shape[-2] == 1:  # several times as fast as QR
        norms = torch.linalg.vector_norm(p, dim=-1, keepdim=True, dtype=torch.float64)
        if norms.min() > 0:
            return (p / norms).to(p.dtype)
    q, r = torch.linalg.qr(p.mT)
    signs = torch.where(r.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0).to(q.dtype)
    return (q * signs[..., None, :]).mT


def _normalize(p: Tensor) -> Tensor:
    """Return `p`, (..., 1, n), with norms of 1, without a host read; zeros become a unit vector."""
    norms = torch.linalg.vector_norm(p, dim=-1, keepdim=True, dtype=torch.float64)
    unit = torch.arange(p.shape[-1], device=p.device) == 0
    return torch.where(norms > 0, p / norms, unit).to(p.dtype)


_NOISE = 1e-7
"""Norm that makes dependent rows independent: above the rounding errors of fp64, as fp32 rounds."""


def _orthogonalize_by_gram(p: Tensor) -> Tensor:
    """Orthogonalize rows by two Cholesky factorizations of their Gram matrices.

    It takes twenty operations for a stack of any size, and no host read; QR takes hundreds. The
    first factorization of rows that are nearly dependent leaves errors of about 1e-2, which the
    second one squares twice (CholeskyQR2; Yamamoto et al. 2015).
    """
    norms = torch.linalg.vector_norm(p, dim=-1, keepdim=True, dtype=torch.float64)
    numbers = torch.arange(p.shape[-2] * p.shape[-1], device=p.device, dtype=torch.float64)
    noise = numbers.square_().cos_().view(p.shape[-2:]).mul_(p.shape[-1] ** -0.5)
    x = torch.where(norms > 0, p / norms, 0.0).add_(noise, alpha=_NOISE)
    for _ in range(2):
        factor, _ = torch.linalg.cholesky_ex(x @ x.mT)
        x = torch.linalg.solve_triangular(factor, x, upper=False)
    return x.to(p.dtype)


_ROW = 4096
"""Elements of a row; the error of their sum in fp32 is that of its result."""

_SAFE = (1e-15, 1e18)
"""Norms between which squares are normal numbers in fp32."""


def norm(x: Tensor) -> Tensor:
    """Return the 2-norm of all elements as an fp32 scalar tensor; does not synchronize a GPU.

    On a CPU, the norms of rows are computed in fp32 and added in fp64, which takes a tenth of the
    time of fp64, unless their squares leave the range of fp32.
    """
    if x.device.type == "cpu" and x.dtype == torch.float32 and x.numel() > _ROW:
        whole = x.reshape(-1)[: x.numel() // _ROW * _ROW]
        rows = torch.linalg.vector_norm(whole.view(-1, _ROW), dim=1).double()
        rest = torch.linalg.vector_norm(x.reshape(-1)[whole.numel() :], dtype=torch.float64)
        result = torch.linalg.vector_norm(torch.cat([rows, rest[None]]))
        if _SAFE[0] < result < _SAFE[1]:
            return result.float()
    return torch.linalg.vector_norm(x, dtype=torch.float64).float()


def row_norms(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True)


def power_below(x: Tensor) -> Tensor:
    return (x.view(torch.int32) & 0x7F800000).view(torch.float32)


def inner_products(a: Tensor, b: Tensor) -> Tensor:
    return torch.linalg.vecdot(a, b)


def nonfinite(x: Tensor) -> Tensor:
    if x.device.type != "cpu" and x.numel():
        return _flag(x, math.inf, nan_only=True)
    total = x.sum(dtype=torch.promote_types(x.dtype, torch.float32))
    if math.isfinite(total.item()) or bool(torch.isfinite(x).all()):
        return torch.tensor([0.0])  # ten times as fast as from a tensor
    return torch.tensor([BROKEN if bool(torch.isnan(x).any()) else 1.0])


def too_large(x: Tensor) -> Tensor:
    if x.device.type != "cpu":
        return _flag(x, LARGEST / max(1, x.numel()) ** 0.5)
    return torch.tensor([0.0 if _fits(x) else 1.0 if bool(torch.isfinite(x).all()) else BROKEN])


def _flag(x: Tensor, limit: float, nan_only: bool = False) -> Tensor:
    """Return the flag of `x` on an accelerator: 0 if all elements are less than `limit`.

    Else it is `BROKEN` if an element is NaN or, without `nan_only`, infinite, and otherwise 1.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    most = torch.linalg.vector_norm(x, math.inf, dtype=wide)  # cannot overflow; propagates NaN
    broken = most.isnan() if nan_only else (most < math.inf).logical_not()
    return (most < limit).logical_not().float().masked_fill_(broken, BROKEN).reshape(1)


def _fits(x: Tensor) -> bool:
    flat = x.reshape(-1).to(torch.promote_types(x.dtype, torch.float32))
    return torch.dot(flat, flat).item() < LARGEST**2


def zero_if_bad(x: Tensor, bad: Tensor) -> Tensor:
    if bad.device.type == "cpu":
        return torch.zeros_like(x) if bool(bad != 0) else x
    return x.masked_fill(bad > 0, 0)


def filled_if(condition: Any, value: Any, x: Tensor) -> Tensor:
    return filled(x, value) if condition else x


def filled(x: Tensor, value: Any) -> Tensor:
    return torch.full_like(x, value)


def to_wire(parts: Sequence[Tensor], wire: str, count: int, into: Tensor | None = None) -> Tensor:
    kind = getattr(torch, wire)
    if into is None or into.numel() != count * kind.itemsize or into.device != parts[0].device:
        into = torch.empty(count * kind.itemsize, dtype=torch.uint8, device=parts[0].device)
    flat, start = into.view(kind), 0
    for part in parts:
        flat[start : start + part.numel()].view(part.shape).copy_(part)
        start += part.numel()
    flat[start:].zero_()
    return into


def mean_of_wire(x: Tensor, wire: str, ranks: int) -> Tensor:
    kind = getattr(torch, wire)
    parts = x.view(kind).view(ranks, -1)
    total = parts[0].float()
    for part in parts[1:]:
        total.add_(part)
    return total.div_(ranks).to(kind).view(torch.uint8)


def from_wire(x: Tensor, wire: str, likes: Sequence[Tensor]) -> list[Tensor]:
    """Decode bytes from `to_wire` into tensors like those of `likes`, which it consumes."""
    flat, start, results = x.view(getattr(torch, wire)), 0, []
    for like in likes:
        results.append(like.copy_(flat[start : start + like.numel()].view(like.shape)))
        start += like.numel()
    return results


def checksum(x: Tensor) -> Tensor:
    bits = x.detach().contiguous().view(getattr(torch, f"int{8 * x.element_size()}"))
    return bits.sum(dtype=torch.int64)


def clip(x: Tensor, limit: Tensor) -> Tensor:
    return x.detach().clamp_(-limit, limit)


pack_bits = _numpy_on_cpu(anywhere.pack_bits)
unpack_bits = _numpy_on_cpu(anywhere.unpack_bits)
bucket_norms = _numpy_on_cpu(anywhere.bucket_norms)
quantize = _numpy_on_cpu(anywhere.quantize)
sum_quantized = _numpy_on_cpu(anywhere.sum_quantized)
subtract_quantized = _numpy_on_cpu(anywhere.subtract_quantized)
pack_signs = _numpy_on_cpu(anywhere.pack_signs)
pack_random_signs = _numpy_on_cpu(anywhere.pack_random_signs)
pack_powers = _numpy_on_cpu(anywhere.pack_powers)
sum_powers = _numpy_on_cpu(anywhere.sum_powers)
narrow = _numpy_on_cpu(anywhere.narrow)
widen = anywhere.widen
column_means = _numpy_on_cpu(anywhere.column_means)
sum_columns = _numpy_on_cpu(anywhere.sum_columns)
subtract_columns = _numpy_on_cpu(anywhere.subtract_columns)
