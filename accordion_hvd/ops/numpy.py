"""NumPy: the oracle, and the engine of `accordion_hvd.simulation.one_process`."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from accordion_hvd import _renamed, check
from accordion_hvd.ops import bins, count_sketch, indices, quantization, secret, selection
from accordion_hvd.ops.journal import consume
from accordion_hvd.ops.spec import Spec

Array = np.ndarray


def spec(x: Array) -> Spec:
    """Shape, dtype and device of `x`. Raises: ValueError when it is sparse."""
    import accordion_hvd.ops.numpy as xp

    return Spec(tuple(x.shape), str(x.dtype), xp)


def shape(x: Array) -> tuple[int, ...]:
    """Return the static shape."""
    return tuple(x.shape)


def dtype(x: Array) -> str:
    """Return the dtype by name."""
    return str(x.dtype)


def device(x: Array) -> Any:
    """Return the device of `x`, as `zeros` and `arange` take it."""
    return None


def zeros(shape: Sequence[int], dtype: str, device: Any = None) -> Array:
    """Return a new tensor of zeros."""
    return np.zeros(tuple(shape), dtype)


def full(shape: Sequence[int], value: float, dtype: str, device: Any = None) -> Array:
    """Return a new tensor filled with `value`."""
    return np.full(tuple(shape), value, dtype)


def arange(count: int, device: Any = None) -> Array:
    """0, 1, ..., count - 1 as int64."""
    return np.arange(count, dtype=np.int64)


def asarray(x: np.ndarray, device: Any = None) -> Array:
    """Return a NumPy array as a tensor of this framework."""
    return np.array(x)


def to_numpy(x: Array) -> np.ndarray:
    """Return the tensor as a NumPy array on the host (may share memory)."""
    return np.asarray(x)


def cast(x: Array, dtype: str) -> Array:
    """Return the tensor in another dtype; itself if it has that dtype already."""
    return x.astype(dtype, copy=False)


def copy(x: Array) -> Array:
    """Return a copy."""
    return x.copy()


def reshape(x: Array, shape: Sequence[int]) -> Array:
    """Return the elements in another shape (a view where possible)."""
    return x.reshape(tuple(shape))


def transpose(x: Array) -> Array:
    """Transpose a matrix, or each of several (a view where possible)."""
    return np.swapaxes(x, -1, -2)


def minimum(a: Array, b: Array) -> Array:
    """Return the element-wise minimum."""
    return np.minimum(a, b)


def maximum(a: Array, b: Array) -> Array:
    """Return the element-wise maximum."""
    return np.maximum(a, b)


def maximum_of(parts: Sequence[Array]) -> Array:
    """Return the largest element of several vectors, as a scalar tensor."""
    return np.max(np.concatenate(parts))


def symbolic(x: Array) -> bool:
    """Return whether `x` has no value yet (in a graph)."""
    return False


def concat(parts: Sequence[Array], axis: int = 0) -> Array:
    """Tensors one after the other, or side by side: along `axis`."""
    return np.concatenate(parts, axis)


def split(x: Array, sizes: Sequence[int]) -> list[Array]:
    """Cut a vector into parts of these sizes: the inverse of `concat`."""
    return np.split(x, np.cumsum(sizes)[:-1])


def stack(parts: Sequence[Array], into: Array | None = None) -> Array:
    """Equal tensors along a new first dimension; in the memory of `into`, if that fits."""
    return np.stack(parts)


def unstack(x: Array) -> list[Array]:
    """Invert `stack` (views where possible)."""
    return list(x)


def to_bytes(x: Array) -> Array:
    """Return the memory of `x` as a vector of uint8."""
    return np.ascontiguousarray(x).reshape(-1).view(np.uint8)


def from_bytes(x: Array, dtype: str, shape: Sequence[int]) -> Array:
    """Invert `to_bytes`; one extent of `shape` may be -1."""
    return np.frombuffer(x.tobytes(), dtype).reshape(tuple(shape)).copy()


def accumulate(a: Array, b: Array) -> Array:
    """Return a + b in a's dtype. Consumes `a`."""
    out = consume(a, lambda: np.subtract(a, b, out=a))
    return np.add(out, b, out=out)


def accumulate_scaled(a: Array, factor: float, b: Array) -> Array:
    """factor * a + b in a's dtype, for a factor that is not 0. Consumes `a`."""

    def undo() -> None:
        np.subtract(a, b, out=a)
        np.divide(a, factor, out=a)

    out = consume(a, undo if factor else functools.partial(np.copyto, a, a.copy()))
    np.multiply(out, factor, out=out)
    return np.add(out, b, out=out)


def subtract(a: Array, b: Array) -> Array:
    """Return a - b in a's dtype. Consumes `a`."""
    out = consume(a, lambda: np.add(a, b, out=a))
    return np.subtract(out, b, out=out)


def momentum(m: Array, beta: float, x: Array) -> Array:
    """beta * m + (1 - beta) * x in m's dtype. Consumes `m`.

    Rounds alike for x and |x|: |m| <= b remains true, to the bit, where b is given |x|.
    """
    return accumulate_scaled(m, beta, (1 - beta) * x.astype(m.dtype))


def lerp(x: Array, beta: float, m: Array) -> Array:
    """beta * m + (1 - beta) * x in m's dtype. Consumes `x`, for good: a gradient, say."""
    out = consume(x)
    if out.dtype != m.dtype or not out.flags.writeable:
        return beta * m + (1 - beta) * out.astype(m.dtype)
    np.multiply(out, 1 - beta, out=out)
    return np.add(out, beta * m, out=out)


def second_moment(v: Array, beta: float, x: Array) -> Array:
    """beta * v + (1 - beta) * x * x in v's dtype. Consumes `v`, for good: after a `yield` only."""
    out = consume(v)
    np.multiply(out, beta, out=out)
    wide = x.astype(out.dtype)
    return np.add(out, (1 - beta) * wide * wide, out=out)


def bounded_ratio(m: Array, b: Array, eps: float = 0.0) -> Array:
    """m / (b + eps) for |m| <= b, in memory of its own; within [-1, 1] in any case, 0 for 0 / 0."""
    out = np.maximum(b + b.dtype.type(eps), b.dtype.type(quantization.SMALLEST))
    with np.errstate(over="ignore"):
        np.divide(m, out, out=out)
    return np.clip(out, -1, 1, out=out)


def preconditioned(m: Array, v: Array, rates: Sequence[Any], eps: float, like: Array) -> Array:
    """rates[0] * m / (sqrt(rates[1] * v) + eps), in m's dtype: Adam's direction.

    Args:
        m: first moment.
        v: second moment, in the shape of `m`.
        rates: numbers, or tensors to be broadcast: inverse bias corrections.
        eps: added to the root.
        like: in the shape of `m`; its memory may hold the result. Consumed, for good.
    """
    consume(like)
    first, second = (np.asarray(rate, m.dtype) for rate in rates)
    return first * m / (np.sqrt(second * v) + m.dtype.type(eps))


def mask_where_zero(x: Array, v: Array) -> Array:
    """`x`, zero where `v` is not above 0. Consumes `x`, for good: after the first `yield` only."""
    out = consume(x)
    out[v <= 0] = 0
    return out


def pad_last(x: Array, width: int) -> Array:
    """`x` with zeros behind the elements of its last dimension, up to `width` of them."""
    return np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, width - x.shape[-1])])


def swap_leading(x: Array) -> Array:
    """`x` with its first two dimensions exchanged."""
    return np.ascontiguousarray(np.swapaxes(x, 0, 1))


def project(error: Array, grad: Array, p: Array, q: Array) -> tuple[Array, Array]:
    """total = error - p^T q + grad, (n, m), and q total^T, (r, n). Consumes `error`.

    For p (r, n), q (r, m); in one pass over memory where the framework allows it. If `grad` is
    not finite, the second result is not either, and the first means nothing. All may have a
    leading dimension: several matrices of one shape.
    """
    if nonfinite(grad)[0]:
        return error, np.full_like(p, np.nan)
    total = accumulate(subtract(error, transpose(p) @ q), grad)
    return total, q @ transpose(total)


def expand(p: Array, q: Array, like: Array) -> Array:
    """p^T q, (n, m), for p (r, n), q (r, m). Consumes `like`, whose memory it may be in."""
    mean = transpose(p) @ q
    consume(like)
    return mean


def deflate(error: Array, p: Array, q: Array) -> Array:
    """error - p^T q in memory of its own, with the bits that `project` adds its gradient to."""
    return error - transpose(p) @ q


def zeros_reusing(x: Array) -> Array:
    """Zeros, fp32, in the shape of `x`. Consumes `x`, for good: after the first `yield` only."""
    consume(x)
    return np.zeros(x.shape, np.float32)


def clear(x: Array, index: Array) -> Array:
    """Set the vector `x` to zero at `index`. Consumes `x`."""
    taken = x[index]
    out = consume(x, lambda: x.__setitem__(index, taken))
    out[index] = 0
    return out


def add_at(x: Array, index: Array, values: Array) -> Array:
    """Add `values` to the vector `x` at `index` (no index twice). Consumes `x`."""
    out = consume(x, lambda: x.__setitem__(index, x[index] - values))
    out[index] += values
    return out


def take(x: Array, index: Array) -> Array:
    """Return the elements of the vector `x` at `index`."""
    return x[index]


def sum_at(index: Array, values: Array, size: int) -> Array:
    """`size` int32 values: for each, the sum of `values` (int32) whose `index` (int32) names it."""
    out = np.zeros(size, np.int32)
    np.add.at(out, index, values)
    return out


def finite(x: Array) -> Array:
    """`x` as fp32 (in memory of its own), with 0 for each element that is not finite."""
    with np.errstate(over="ignore"):
        values = np.array(x, np.float32)
    values[~np.isfinite(values)] = 0
    return values


def secret_uniform(count: int, device: Any = None) -> Array:
    """`count` fp32 values in [0, 1) that nobody can repeat; see `secret_normal`."""
    return secret.uniform(count).astype(np.float32)


def secret_normal(count: int, sigma: float, dtype: str, device: Any = None) -> Array:
    """`count` integers, rounded from normal values of deviation `sigma`, that nobody can repeat.

    From the operating system's cryptographic source; anew each time, within graphs too. What
    `dtype` cannot hold wraps around. See `accordion_hvd.ops.secret`.
    """
    return secret.rounded_normal(count, sigma, dtype)


def pack_bins(index: Array, signs: Array, shape: Sequence[int], width: int) -> Array:
    """Positions in bins, and signs, in a byte or two each; see `accordion_hvd.ops.bins`."""
    return bins.pack(index, signs < 0, shape, width)


def invalid_index(index: Array, size: int) -> Array:
    """Return one fp32 element: 0 if `index` ascends from at least 0 to below `size`."""
    inside = index.size == 0 or (index[0] >= 0 and index[-1] < size)
    return np.array([not (inside and (index[1:] > index[:-1]).all())], np.float32)


def raise_on_invalid(x: Any, doubts: Array, senders: Sequence[Any]) -> Any:
    """`x` (tensors in lists and tuples), if no element of the vector `doubts` differs from 0.

    `senders` says for each element whose tensor it is about (a rank; in a graph also as a scalar
    tensor); in a graph, the refusal is part of it.

    Raises:
        PayloadError: one differs.
    """
    if np.any(doubts != 0):
        check.refuse_payload([senders[int(i)] for i in np.flatnonzero(doubts)])
    return x


def unsketch(table: Array, codes: Array, like: Array) -> Array:
    """Estimates of the vector of which `table` is the sketch: medians over an odd number of rows.

    fp32, in the shape of the vector `like`. Consumes `like`, for good: after the first `yield`
    only.
    """
    consume(like)
    out = like if like.dtype == np.float32 else np.empty(like.shape, np.float32)
    return count_sketch.estimate(table, codes, out)


def argsort(x: Array) -> Array:
    """Positions of the elements of a vector in ascending order, int32; stable."""
    return np.argsort(x, kind="stable").astype(np.int32)


def frames(x: Array, width: int, step: int) -> Array:
    """Pieces of `width` elements of each row of `x` that begin every `step` elements.

    (rows, (count - 1) * step + width) becomes (rows, count, width).
    """
    pieces = np.lib.stride_tricks.sliding_window_view(x, width, axis=-1)
    return np.ascontiguousarray(pieces[..., ::step, :])


def overlap_add(x: Array, step: int) -> Array:
    """Apply the adjoint of `frames`: add pieces up at their places."""
    rows, count, width = x.shape
    extra = -(-width // step) - 1
    out = np.zeros((rows, count + extra, step), x.dtype)
    for i in range(extra + 1):
        part = x[..., i * step : (i + 1) * step]
        out[:, i : i + count, : part.shape[-1]] += part
    return out.reshape(rows, -1)[:, : (count - 1) * step + width]


def orthogonalize(p: Array) -> Array:
    """Orthonormal rows that span those of `p` (r, n), r <= n, by QR with a positive diagonal.

    Rows that depend on others, zeros among them, are completed to an orthonormal set, so the
    result never holds NaN for finite input. `p` may have a leading dimension.
    """
    q, r = np.linalg.qr(transpose(p))
    diagonal = np.diagonal(r, axis1=-2, axis2=-1)
    signs = np.where(diagonal < 0, -1.0, 1.0).astype(q.dtype)
    return transpose(q * signs[..., None, :])


def norm(x: Array) -> Array:
    """Return the 2-norm of all elements, as an fp32 scalar tensor."""
    return np.asarray(np.linalg.norm(x.reshape(-1).astype(np.float64)), np.float32)


def nonfinite(x: Array) -> Array:
    """Return one fp32 element: 0 if all elements of `x` are finite, else 1.

    The sum of all elements takes one pass and no copy. A finite sum has finite terms; only if the
    sum overflows are the elements examined one by one.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        finite = np.isfinite(np.sum(x, dtype=np.result_type(x, np.float32)))
    return np.array([not (finite or np.isfinite(x).all())], np.float32)


def zero_if_nonfinite(x: Array, bad: Array) -> Array:
    """`x`, or zeros where `bad` (from `nonfinite`) says that it is not finite."""
    return np.zeros_like(x) if bad[0] else x


def where(bad: Any, first: Array, second: Array) -> Array:
    """`first` if `bad` (from `is_nonfinite`), else `second`."""
    return first if bad else second


def is_nonfinite(flags: Array) -> Any:
    """Return whether any element is not 0: a bool, or a symbolic scalar in a graph."""
    return bool((flags != 0).any())


def nans_like(x: Array) -> Array:
    """NaN in the shape and dtype of `x`."""
    return np.full_like(x, np.nan)


def to_wire(parts: Sequence[Array], wire: str, count: int, into: Array | None = None) -> Array:
    """Floating-point tensors one after the other, rounded to dtype `wire`, as bytes.

    Zeros complete them to `count` elements. `into` may be what an earlier call returned: its
    memory may be used.
    """
    flat = np.zeros(count, np.float32)
    np.concatenate([part.reshape(-1) for part in parts], out=flat[: sum(p.size for p in parts)])
    if wire != "bfloat16":
        return to_bytes(flat.astype(wire))
    bits = flat.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16  # to nearest even
    return to_bytes(np.where(np.isnan(flat), np.uint32(0x7FC0), rounded).astype(np.uint16))


def mean_of_wire(x: Array, wire: str, ranks: int) -> Array:
    """Average `ranks` equal parts of bytes from `to_wire`, added in fp32; return such bytes."""
    parts = _of_wire(x, wire).reshape(ranks, -1)
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return to_wire([total / ranks], wire, total.size)


def from_wire(x: Array, wire: str, likes: Sequence[Array]) -> list[Array]:
    """Invert `to_wire`, in the shapes and dtypes of `likes`, which it consumes."""
    pieces = split(_of_wire(x, wire), [*(like.size for like in likes), 0])
    return [
        p.reshape(like.shape).astype(like.dtype) for p, like in zip(pieces, likes, strict=False)
    ]


def _of_wire(x: Array, wire: str) -> Array:
    if wire != "bfloat16":
        return from_bytes(x, wire, (-1,)).astype(np.float32)
    return (from_bytes(x, "uint16", (-1,)).astype(np.uint32) << 16).view(np.float32)


def checksum(x: Array) -> Array:
    """Return the sum of the bits of all elements, as integers: an int64 scalar tensor."""
    bits = np.ascontiguousarray(x).view(f"int{8 * x.dtype.itemsize}")
    return np.asarray(np.sum(bits, dtype=np.int64))


def clip(x: Array, limit: Array) -> Array:
    """`x` within +-limit (one element). Consumes `x`, for good: after the first `yield`."""
    out = consume(x)
    return np.clip(out, -limit, limit, out=out)


# ----------------------------------------------------------- what other modules make of arrays
largest_index = selection.largest_index
accumulate_largest = selection.accumulate_largest
accumulate_reaching = selection.accumulate_reaching
accumulate_outgrown = selection.accumulate_outgrown
largest_of_bins = selection.largest_of_bins
pack_index = indices.pack
unpack_index = indices.unpack
unpack_bins = bins.unpack
sketch = count_sketch.insert
pack_bits = quantization.pack_bits
unpack_bits = quantization.unpack_bits
bucket_norms = quantization.bucket_norms
quantize = quantization.quantize
sum_quantized = quantization.sum_quantized
subtract_quantized = quantization.subtract_quantized
pack_signs = quantization.pack_signs
pack_random_signs = quantization.pack_random_signs
pack_powers = quantization.pack_powers
sum_powers = quantization.sum_powers
column_means = quantization.column_means
sum_columns = quantization.sum_columns
subtract_columns = quantization.subtract_columns


__getattr__ = _renamed.module_attributes(__name__, _renamed.OPERATIONS)
