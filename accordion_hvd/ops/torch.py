"""PyTorch, on the CPU and on GPUs. Signatures and meaning as in `accordion_hvd.ops.numpy`."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch

from accordion_hvd import _renamed, check
from accordion_hvd.ops import bins, count_sketch, indices, journal, quantization, secret
from accordion_hvd.ops import numpy as oracle
from accordion_hvd.ops import quantization_torch as anywhere
from accordion_hvd.ops.spec import Spec

Tensor: TypeAlias = torch.Tensor
Operation = TypeVar("Operation", bound=Callable[..., Any])


def _numpy_on_cpu(operation: Operation) -> Operation:
    """Have NumPy's operation of this name serve tensors on the CPU; `operation` serves others."""
    plain = getattr(oracle, operation.__name__)

    @functools.wraps(operation)
    def run(first: Any, *others: Any) -> Any:
        tensor = first if isinstance(first, torch.Tensor) else first[0]
        if tensor.device.type != "cpu":
            return operation(first, *others)
        found = plain(*map(_array, (first, *others)))
        return (
            tuple(map(torch.from_numpy, found))
            if isinstance(found, tuple)
            else torch.from_numpy(found)
        )

    return run  # type: ignore[return-value]


def _array(x: Any) -> Any:
    """Tensors, maybe in a sequence, as NumPy arrays; anything else as it is."""
    if isinstance(x, torch.Tensor):
        return (x.float() if x.dtype == torch.bfloat16 else x).detach().numpy()
    return [_array(part) for part in x] if isinstance(x, (list, tuple)) else x


shape = oracle.shape
reshape = oracle.reshape
unstack = oracle.unstack
symbolic = oracle.symbolic
is_nonfinite = oracle.is_nonfinite
where = oracle.where


def spec(x: Tensor) -> Spec:
    """Shape, dtype and device of `x`."""
    import accordion_hvd.ops.torch as xp

    if x.layout != torch.strided:
        check.refuse(x, "layout", x.layout, "torch.strided (dense)")
    return Spec(tuple(x.shape), dtype(x), xp, x.device)


def dtype(x: Tensor) -> str:
    """Return the dtype by name."""
    return str(x.dtype).removeprefix("torch.")


def device(x: Tensor) -> Any:
    """Return the device of `x`, as `zeros` and `arange` take it."""
    return x.device


def zeros(shape: Sequence[int], dtype: str, device: Any = None) -> Tensor:
    """Return a new tensor of zeros."""
    return torch.zeros(tuple(shape), dtype=getattr(torch, dtype), device=device)


def full(shape: Sequence[int], value: float, dtype: str, device: Any = None) -> Tensor:
    """Return a new tensor filled with `value`."""
    return torch.full(tuple(shape), value, dtype=getattr(torch, dtype), device=device)


def arange(count: int, device: Any = None) -> Tensor:
    """0, 1, ..., count - 1 as int64."""
    return torch.arange(count, dtype=torch.int64, device=device)


def asarray(x: np.ndarray, device: Any = None) -> Tensor:
    """Return a NumPy array as a tensor of this framework."""
    return torch.tensor(x, device=device)


def to_numpy(x: Tensor) -> np.ndarray:
    """Return the tensor as a NumPy array on the host (may share memory)."""
    return _array(x.cpu())


def cast(x: Tensor, dtype: str) -> Tensor:
    """Return the tensor in another dtype; itself if it has that dtype already."""
    return x.to(getattr(torch, dtype))


def copy(x: Tensor) -> Tensor:
    """Return a copy."""
    return x.detach().clone(memory_format=torch.contiguous_format)


def transpose(x: Tensor) -> Tensor:
    """Transpose a matrix, or each of several (a view where possible)."""
    return x.mT


def minimum(a: Tensor, b: Tensor) -> Tensor:
    """Return the element-wise minimum."""
    return torch.minimum(a, b)


def maximum(a: Tensor, b: Tensor) -> Tensor:
    """Return the element-wise maximum."""
    return torch.maximum(a, b)


def maximum_of(parts: Sequence[Tensor]) -> Tensor:
    """Return the largest element of several vectors, as a scalar tensor."""
    return torch.cat(list(parts)).max()


def concat(parts: Sequence[Tensor], axis: int = 0) -> Tensor:
    """Tensors one after the other, or side by side: along `axis`."""
    return torch.cat(list(parts), axis)


def split(x: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Cut a vector into parts of these sizes: the inverse of `concat`."""
    return list(torch.split(x, list(sizes)))


def stack(parts: Sequence[Tensor], into: Tensor | None = None) -> Tensor:
    """Equal tensors along a new first dimension; in the memory of `into`, if that fits."""
    first = parts[0]
    if into is not None and into.dtype == first.dtype and into.device == first.device:
        if into.shape == (len(parts), *first.shape):
            return torch.stack(list(parts), out=into)
    return torch.stack(list(parts))


def to_bytes(x: Tensor) -> Tensor:
    """Return the memory of `x` as a vector of uint8."""
    if not x.numel():  # whose strides may be anything
        return torch.empty(0, dtype=torch.uint8, device=x.device)
    return x.contiguous().reshape(-1).view(torch.uint8)


def from_bytes(x: Tensor, dtype: str, shape: Sequence[int]) -> Tensor:
    """Invert `to_bytes`; one extent of `shape` may be -1."""
    kind = getattr(torch, dtype)
    if not x.numel():
        return torch.empty(0, dtype=kind, device=x.device).reshape(tuple(shape))
    if x.storage_offset() % kind.itemsize:
        x = x.clone()  # a view of another dtype must start at a whole element
    return x.view(kind).reshape(tuple(shape))


def accumulate(a: Tensor, b: Tensor) -> Tensor:
    """Return a + b in a's dtype. Consumes `a`."""
    journal.record(lambda: a.sub_(b))
    return a.add_(b)


def accumulate_scaled(a: Tensor, factor: float, b: Tensor) -> Tensor:
    """factor * a + b in a's dtype, for a factor that is not 0. Consumes `a`."""
    journal.record(lambda: a.sub_(b).div_(factor))
    return a.mul_(factor).add_(b)


def subtract(a: Tensor, b: Tensor) -> Tensor:
    """Return a - b in a's dtype. Consumes `a`."""
    journal.record(lambda: a.add_(b))
    return a.sub_(b)


def momentum(m: Tensor, beta: float, x: Tensor) -> Tensor:
    """beta * m + (1 - beta) * x in m's dtype. Consumes `m`."""
    if beta:
        journal.record(lambda: m.sub_(x, alpha=1 - beta).div_(beta))
    else:
        saved = m.clone()
        journal.record(lambda: m.copy_(saved))
    return m.mul_(beta).add_(x, alpha=1 - beta)


def lerp(x: Tensor, beta: float, m: Tensor) -> Tensor:
    """beta * m + (1 - beta) * x in m's dtype. Consumes `x`, for good: a gradient, say."""
    if x.dtype != m.dtype:
        return torch.add(beta * m, x, alpha=1 - beta)
    return x.mul_(1 - beta).add_(m, alpha=beta)


def second_moment(v: Tensor, beta: float, x: Tensor) -> Tensor:
    """beta * v + (1 - beta) * x * x in v's dtype. Consumes `v`: after a `yield` only."""
    wide = x.to(v.dtype)
    return v.mul_(beta).addcmul_(wide, wide, value=1 - beta)


def bounded_ratio(m: Tensor, b: Tensor, eps: float = 0.0) -> Tensor:
    """m / (b + eps), within [-1, 1], 0 for 0 / 0; see `accordion_hvd.ops.numpy`."""
    out = torch.add(b, eps).clamp_min_(quantization.SMALLEST)
    return torch.div(m, out, out=out).clamp_(-1, 1)


def preconditioned(m: Tensor, v: Tensor, rates: Sequence[Any], eps: float, like: Tensor) -> Tensor:
    """rates[0] * m / (sqrt(rates[1] * v) + eps); see `accordion_hvd.ops.numpy`."""
    fits = like.dtype == m.dtype and like.is_contiguous()
    out = like if fits else torch.empty_like(m)
    torch.mul(v, rates[1], out=out)
    torch.div(m, out.sqrt_().add_(eps), out=out)
    return out.mul_(rates[0])


def mask_where_zero(x: Tensor, v: Tensor) -> Tensor:
    """`x`, zero where `v` is not above 0. Consumes `x`."""
    if v.device.type == "cpu" and v.numel() and v.min() > 0:  # ten times as fast as to fill
        return x
    return x.masked_fill_(v <= 0, 0)


def pad_last(x: Tensor, width: int) -> Tensor:
    """`x` with zeros behind the elements of its last dimension, up to `width` of them."""
    return torch.nn.functional.pad(x, (0, width - x.shape[-1]))


def swap_leading(x: Tensor) -> Tensor:
    """`x` with its first two dimensions exchanged."""
    return x.transpose(0, 1).contiguous()


def project(error: Tensor, grad: Tensor, p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """total = error - p^T q + grad, and q total^T; see `accordion_hvd.ops.numpy`."""
    if not _by_blocks(error) or not _by_blocks(grad):
        bad = nonfinite(grad)
        journal.record(lambda: error.add_(p.mT @ q))
        total = accumulate(_deflated(error, p, q), zero_if_nonfinite(grad, bad))
        return total, torch.where(bad == 0, q @ total.mT, float("nan"))
    found = torch.empty_like(p)
    for rows in _blocks(error):
        fresh = grad[rows]
        if not math.isfinite(fresh.sum().item()):
            _unproject(error[: rows.start], grad, p, q)
            return error, found.fill_(float("nan"))
        total = _minus(error[rows], p[:, rows], q).add_(fresh)
        torch.mm(q, total.t(), out=found[:, rows])
    journal.record(lambda: _unproject(error, grad, p, q))
    return error, found


def _unproject(total: Tensor, grad: Tensor, p: Tensor, q: Tensor) -> None:
    """Take back, but for rounding, what `project` has done to the first rows."""
    total.sub_(grad[: len(total)]).addmm_(p[:, : len(total)].t(), q)


def expand(p: Tensor, q: Tensor, like: Tensor) -> Tensor:
    """p^T q, (n, m); see `accordion_hvd.ops.numpy`."""
    if not _by_blocks(like):
        return p.mT * q if p.shape[-2] == 1 else p.mT @ q
    for rows in _blocks(like):
        _product(p[:, rows], q, out=like[rows])
    return like


def deflate(error: Tensor, p: Tensor, q: Tensor) -> Tensor:
    """error - p^T q; see `accordion_hvd.ops.numpy`."""
    return _deflated(copy(error), p, q)


def _deflated(error: Tensor, p: Tensor, q: Tensor) -> Tensor:
    """error - p^T q, in place."""
    if not _by_blocks(error):
        return error.sub_(expand(p, q, error))
    for rows in _blocks(error):
        _minus(error[rows], p[:, rows], q)
    return error


def _minus(error: Tensor, p: Tensor, q: Tensor) -> Tensor:
    """error - p^T q, in place, of a block that fits into the cache."""
    if p.shape[0] > _FEW:
        return error.addmm_(p.t(), q, alpha=-1)
    for i in range(p.shape[0]):
        error.addr_(p[i], q[i], alpha=-1)
    return error


_BLOCK = 1 << 19  # elements that stay in a core's cache together with what is done to them


def _by_blocks(x: Tensor) -> bool:
    """Return whether `x`, one matrix on the CPU, is large enough to process block by block."""
    plain = x.device.type == "cpu" and x.dim() == 2 and x.numel() > _BLOCK
    return plain and x.dtype == torch.float32 and x.is_contiguous()


def _blocks(x: Tensor) -> list[slice]:
    count = max(1, _BLOCK // x.shape[1])
    return [slice(start, start + count) for start in range(0, x.shape[0], count)]


def _product(p: Tensor, q: Tensor, out: Tensor) -> Tensor:
    """p^T q; for a small inner dimension several times faster than a general product."""
    if p.shape[0] > _FEW:
        return torch.mm(p.t(), q, out=out)
    torch.outer(p[0], q[0], out=out)
    for i in range(1, p.shape[0]):
        out.addr_(p[i], q[i])
    return out


_FEW = 6  # rows up to which outer products are faster


def zeros_reusing(x: Tensor) -> Tensor:
    """Zeros, fp32, in the shape of `x`. Consumes `x`."""
    if x.dtype == torch.float32 and x.is_contiguous():
        return x.zero_()
    return torch.zeros(x.shape, dtype=torch.float32, device=x.device)


def clear(x: Tensor, index: Tensor) -> Tensor:
    """Set the vector `x` to zero at `index`. Consumes `x`."""
    taken = x[index]
    journal.record(lambda: x.index_copy_(0, index.long(), taken))
    return x.index_fill_(0, index.long(), 0)


def add_at(x: Tensor, index: Tensor, values: Tensor) -> Tensor:
    """Add `values` to the vector `x` at `index` (no index twice). Consumes `x`."""
    journal.record(lambda: x.index_add_(0, index, values, alpha=-1))
    return x.index_add_(0, index, values)


def take(x: Tensor, index: Tensor) -> Tensor:
    """Return the elements of the vector `x` at `index`."""
    return torch.index_select(x, 0, index)


def sum_at(index: Tensor, values: Tensor, size: int) -> Tensor:
    """`size` int32 values: for each, the sum of `values` (int32) whose `index` (int32) names it."""
    out = torch.zeros(size, dtype=torch.int32, device=index.device)
    return out.index_add_(0, index, values)


def finite(x: Tensor) -> Tensor:
    """`x` as fp32 (in memory of its own), with 0 for each element that is not finite."""
    values = x.float()
    return torch.where(torch.isfinite(values), values, 0.0)


def secret_uniform(count: int, device: Any = None) -> Tensor:
    """`count` fp32 values in [0, 1) that nobody can repeat."""
    return torch.from_numpy(secret.uniform(count)).float().to(device)


def secret_normal(count: int, sigma: float, dtype: str, device: Any = None) -> Tensor:
    """`count` integers that nobody can repeat; see `accordion_hvd.ops.numpy`."""
    return torch.from_numpy(secret.rounded_normal(count, sigma, dtype)).to(device)


@_numpy_on_cpu
def largest_index(x: Tensor, count: int) -> Tensor:
    """Return where the `count` largest magnitudes of each row are: int32, ascending."""
    rows = x.reshape(-1, x.shape[-1])
    index = torch.topk(rows.abs(), min(count, rows.shape[1]), sorted=False).indices
    first = torch.arange(rows.shape[0], device=x.device)[:, None] * rows.shape[1]
    return (index + first).reshape(-1).sort().values.int()


@_numpy_on_cpu
def accumulate_largest(error: Tensor, grad: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """error + grad, and `largest_index` of it; one pass on the CPU. Consumes `error`."""
    total = accumulate(error, grad)
    return total, largest_index(total, count)


@_numpy_on_cpu
def accumulate_reaching(error: Tensor, grad: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    """error + grad, and where its magnitude is at least `limit`. Consumes `error`."""
    total = accumulate(error, grad)
    flat = total.reshape(-1)
    chosen = flat.abs() >= limit if limit > 0 else flat != 0
    return total, chosen.nonzero()[:, 0].int()


@_numpy_on_cpu
def accumulate_outgrown(error: Tensor, grad: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """error + grad, AdaComp's choice of it, and each row's scale. Consumes `error`."""
    total = accumulate(error, grad)
    rows = total.reshape(-1, total.shape[-1])
    most = _in_bins(rows.abs(), width).amax(2)
    limits = torch.where(most > 0, most, torch.inf)[:, :, None]
    pushed = _in_bins((rows + grad.reshape(rows.shape)).abs(), width) >= limits
    chosen = pushed.reshape(rows.shape[0], -1)[:, : rows.shape[1]] & (rows != 0)
    scale = most.mean(1, dtype=torch.float64).float()
    return total, chosen.reshape(-1).nonzero()[:, 0].int(), scale


def _in_bins(rows: Tensor, width: int) -> Tensor:
    """(rows, bins, width), filled up with zeros."""
    padded = torch.nn.functional.pad(rows, (0, -rows.shape[1] % width))
    return padded.reshape(rows.shape[0], -1, width)


@_numpy_on_cpu
def largest_of_bins(x: Tensor, width: int) -> Tensor:
    """Return where the largest magnitude of each bin of `width` elements is: int32."""
    rows = x.reshape(-1, x.shape[-1])
    within = _in_bins(rows.abs(), width).argmax(2)
    index = within + torch.arange(within.shape[1], device=x.device) * width
    first = torch.arange(rows.shape[0], device=x.device)[:, None] * rows.shape[1]
    return (index + first).reshape(-1).int()


def pack_bins(index: Tensor, signs: Tensor, shape: Sequence[int], width: int) -> Tensor:
    """Positions in bins, and signs, in a byte or two each; on the host."""
    negative = to_numpy(signs) < 0
    return torch.from_numpy(bins.pack(to_numpy(index), negative, shape, width)).to(index.device)


def unpack_bins(packed: Tensor, shape: Sequence[int], width: int) -> tuple[Tensor, Tensor]:
    """Invert `pack_bins`, on the host."""
    index, signs = bins.unpack(to_numpy(packed), shape, width)
    return torch.from_numpy(index).to(packed.device), torch.from_numpy(signs).to(packed.device)


@_numpy_on_cpu
def pack_index(index: Tensor, size: int) -> Tensor:
    """Ascending distinct positions below `size` as few bytes; see `accordion_hvd.ops.indices`."""
    low = indices.low_bytes(index.numel(), size)
    if low == 4:
        return to_bytes(index)
    tail = to_bytes(index).reshape(-1, 4)[:, :low].reshape(-1)
    count, length = index.numel(), -(-indices.bitmap_bits(index.numel(), size, low) // 8)
    bits = torch.zeros(8 * length, dtype=torch.uint8, device=index.device)
    bits[(index >> 8 * low).long() + torch.arange(count, device=index.device)] = 1
    weights = 1 << torch.arange(8, dtype=torch.uint8, device=index.device)
    bitmap = (bits.reshape(-1, 8) * weights).sum(1, dtype=torch.uint8)
    return torch.cat([tail, bitmap])


@_numpy_on_cpu
def unpack_index(packed: Tensor, count: int, size: int) -> Tensor:
    """Invert `pack_index`."""
    low = indices.low_bytes(count, size)
    if low == 4:
        return from_bytes(packed, "int32", (count,))
    tail = packed[: low * count].reshape(count, low).int()
    eight = torch.arange(8, dtype=torch.uint8, device=packed.device)
    bits = (packed[low * count :, None] >> eight) & 1
    number = torch.arange(count, dtype=torch.int32, device=packed.device)
    seen = bits.reshape(-1).cumsum(0, dtype=torch.int32)
    index = (torch.searchsorted(seen, number + 1, out_int32=True) - number) << 8 * low
    for byte in range(low):
        index |= tail[:, byte] << 8 * byte
    return torch.where(seen[-1] == count, index, -1)  # another number of them: `invalid_index`


@_numpy_on_cpu
def invalid_index(index: Tensor, size: int) -> Tensor:
    """Return one fp32 element: 0 if `index` ascends from at least 0 to below `size`."""
    outside = (index[:1] < 0).any() | (index[-1:] >= size).any()
    return (outside | (index[1:] <= index[:-1]).any()).float().reshape(1)


def raise_on_invalid(x: Any, doubts: Tensor, senders: Sequence[Any]) -> Any:
    """`x`, if no element of `doubts` differs from 0; see `accordion_hvd.ops.numpy`."""
    return oracle.raise_on_invalid(x, to_numpy(doubts), senders)


@_numpy_on_cpu
def sketch(x: Tensor, codes: Tensor, columns: int) -> Tensor:
    """Return the count sketch (rows, columns) of the vector `x`; see `accordion_hvd.ops.numpy`."""
    return torch.stack([count_sketch.moved(x.float(), row, columns).sum(0) for row in codes])


@_numpy_on_cpu
def unsketch(table: Tensor, codes: Tensor, like: Tensor) -> Tensor:
    """Estimates of the vector of which `table` is the sketch; see `accordion_hvd.ops.numpy`."""
    pairs = zip(table, codes, strict=True)
    rows = [count_sketch.found(*pair, like.numel()) for pair in pairs]
    return torch.stack(rows).median(0).values


def argsort(x: Tensor) -> Tensor:
    """Positions of the elements of a vector in ascending order, int32; stable."""
    return torch.argsort(x, stable=True).int()


def frames(x: Tensor, width: int, step: int) -> Tensor:
    """Pieces of each row of `x`; see `accordion_hvd.ops.numpy`."""
    return x.unfold(-1, width, step).contiguous()


def overlap_add(x: Tensor, step: int) -> Tensor:
    """Apply the adjoint of `frames`; see `accordion_hvd.ops.numpy`."""
    rows, count, width = x.shape
    extra = -(-width // step) - 1
    out = torch.zeros((rows, count + extra, step), dtype=x.dtype, device=x.device)
    for i in range(extra + 1):
        part = x[..., i * step : (i + 1) * step]
        out[:, i : i + count, : part.shape[-1]] += part
    return out.reshape(rows, -1)[:, : (count - 1) * step + width]


def orthogonalize(p: Tensor) -> Tensor:
    """Orthonormal rows that span those of `p` (r, n), r <= n; see `accordion_hvd.ops.numpy`."""
    q, r = torch.linalg.qr(p.mT)
    signs = torch.where(r.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0).to(q.dtype)
    return (q * signs[..., None, :]).mT


def norm(x: Tensor) -> Tensor:
    """Return the 2-norm of all elements, as an fp32 scalar tensor; does not wait for a GPU."""
    return torch.linalg.vector_norm(x, dtype=torch.float64).float()


def nonfinite(x: Tensor) -> Tensor:
    """Return one fp32 element: 0 if all elements of `x` are finite, else 1 (one pass, no copy)."""
    if x.device.type != "cpu" and x.numel():  # extremes cannot overflow, and propagate NaN
        return (~torch.isfinite(torch.stack(torch.aminmax(x)))).any().float().reshape(1)
    total = x.sum(dtype=torch.promote_types(x.dtype, torch.float32))
    finite = math.isfinite(total.item()) or bool(torch.isfinite(x).all())
    return torch.tensor([0.0 if finite else 1.0])  # from a number: a tenth of the time


def zero_if_nonfinite(x: Tensor, bad: Tensor) -> Tensor:
    """`x`, or zeros where `bad` (from `nonfinite`) says that it is not finite."""
    if bad.device.type == "cpu":
        return torch.zeros_like(x) if bool(bad != 0) else x
    return torch.where(bad == 0, x, torch.zeros((), dtype=x.dtype, device=x.device))


def nans_like(x: Tensor) -> Tensor:
    """NaN in the shape and dtype of `x`."""
    return torch.full_like(x, float("nan"))


def to_wire(parts: Sequence[Tensor], wire: str, count: int, into: Tensor | None = None) -> Tensor:
    """Floating-point tensors one after the other, rounded to dtype `wire`, as bytes."""
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
    """Average `ranks` equal parts of bytes from `to_wire`, added in fp32; return such bytes."""
    kind = getattr(torch, wire)
    parts = x.view(kind).view(ranks, -1)
    total = parts[0].float()
    for part in parts[1:]:
        total.add_(part)
    return total.div_(ranks).to(kind).view(torch.uint8)


def from_wire(x: Tensor, wire: str, likes: Sequence[Tensor]) -> list[Tensor]:
    """Invert `to_wire`, in the shapes and dtypes of `likes`, which it consumes."""
    flat, start, results = x.view(getattr(torch, wire)), 0, []
    for like in likes:
        results.append(like.copy_(flat[start : start + like.numel()].view(like.shape)))
        start += like.numel()
    return results


def checksum(x: Tensor) -> Tensor:
    """Return the sum of the bits of all elements, as integers: an int64 scalar tensor."""
    bits = x.detach().contiguous().view(getattr(torch, f"int{8 * x.element_size()}"))
    return bits.sum(dtype=torch.int64)


def clip(x: Tensor, limit: Tensor) -> Tensor:
    """`x` within +-limit (one element). Consumes `x`, for good: after the first `yield`."""
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
column_means = _numpy_on_cpu(anywhere.column_means)
sum_columns = _numpy_on_cpu(anywhere.sum_columns)
subtract_columns = _numpy_on_cpu(anywhere.subtract_columns)


__getattr__ = _renamed.module_attributes(__name__, _renamed.OPERATIONS)
