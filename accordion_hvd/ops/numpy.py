"""Tensor operations on NumPy arrays: the reference for the other frameworks.

`accordion_hvd.simulation.one_process` computes with these operations.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from accordion_hvd import check
from accordion_hvd.ops import count_sketch, indices, journal, quantization, secret, selection
from accordion_hvd.ops.journal import consume
from accordion_hvd.ops.spec import BROKEN, FOLDS, LARGEST, Spec

Array = np.ndarray


def spec(x: Array) -> Spec:
    """Return the shape, dtype and device of `x` as a `Spec`."""
    import accordion_hvd.ops.numpy as xp

    return Spec(tuple(x.shape), str(x.dtype), xp)


def shape(x: Array) -> tuple[int, ...]:
    """Return the static shape."""
    return tuple(x.shape)


def dtype(x: Array) -> str:
    """Return the dtype by name."""
    return str(x.dtype)


def device(x: Array) -> Any:
    """Return the device of `x`, in the form that `zeros` and `arange` accept."""
    return None


def zeros(shape: Sequence[int], dtype: str, device: Any = None) -> Array:
    """Return a new tensor of zeros."""
    return np.zeros(tuple(shape), dtype)


def full(shape: Sequence[int], value: float, dtype: str, device: Any = None) -> Array:
    """Return a new tensor filled with `value`."""
    return np.full(tuple(shape), value, dtype)


def arange(count: int, device: Any = None) -> Array:
    """Return 0, 1, ..., count - 1 as int64."""
    return np.arange(count, dtype=np.int64)


def asarray(x: np.ndarray, device: Any = None) -> Array:
    """Return a NumPy array as a tensor of this framework."""
    return np.array(x)


def to_numpy(x: Array) -> np.ndarray:
    """Return the tensor as a NumPy array on the host (may share memory)."""
    return np.asarray(x)


def cast(x: Array, dtype: str) -> Array:
    """Convert the tensor to `dtype`; return it unchanged if it already has that dtype."""
    return x.astype(dtype, copy=False)


def copy(x: Array) -> Array:
    """Return a copy."""
    return x.copy()


def reshape(x: Array, shape: Sequence[int]) -> Array:
    """Return the elements in another shape (a view where possible)."""
    return x.reshape(tuple(shape))


def transpose(x: Array) -> Array:
    """Transpose a matrix, or each matrix of a batch (a view where possible)."""
    return np.swapaxes(x, -1, -2)


def minimum(a: Array, b: Array) -> Array:
    """Return the element-wise minimum."""
    return np.minimum(a, b)


def maximum(a: Array, b: Array) -> Array:
    """Return the element-wise maximum."""
    return np.maximum(a, b)


def maximum_of(parts: Sequence[Array]) -> Array:
    """Return the largest element of several vectors as a scalar tensor."""
    return np.max(np.concatenate(parts))


def symbolic(x: Array) -> bool:
    """Return whether `x` is a symbolic tensor, which has no value yet (in a graph)."""
    return False


def concat(parts: Sequence[Array], axis: int = 0) -> Array:
    """Concatenate tensors along `axis`."""
    return np.concatenate(parts, axis)


def split(x: Array, sizes: Sequence[int]) -> list[Array]:
    """Split a vector into parts of the given sizes; inverse of `concat`."""
    return np.split(x, np.cumsum(sizes)[:-1])


def stack(parts: Sequence[Array], into: Array | None = None) -> Array:
    """Stack equal tensors along a new first dimension, in the memory of `into` if it fits."""
    return np.stack(parts)


def unstack(x: Array) -> list[Array]:
    """Return the slices of `x` along its first dimension; inverse of `stack`."""
    return list(x)


def to_bytes(x: Array) -> Array:
    """Return the memory of `x` as a vector of uint8."""
    return np.ascontiguousarray(x).reshape(-1).view(np.uint8)


def from_bytes(x: Array, dtype: str, shape: Sequence[int]) -> Array:
    """Reinterpret a vector of uint8 as `dtype`; inverse of `to_bytes`.

    One extent of `shape` may be -1.
    """
    return np.frombuffer(x.tobytes(), dtype).reshape(tuple(shape)).copy()


def accumulate(a: Array, b: Array) -> Array:
    """Return a + b in the dtype of `a`. Consumes `a`."""
    out = consume(a, lambda: np.subtract(a, b, out=a))
    return np.add(out, b, out=out)


def accumulate_scaled(a: Array, factor: float, b: Array) -> Array:
    """Return factor * a + b in the dtype of `a`, for a nonzero factor. Consumes `a`."""

    def undo() -> None:
        np.subtract(a, b, out=a)
        np.divide(a, factor, out=a)

    out = consume(a, undo if factor else functools.partial(np.copyto, a, a.copy()))
    np.multiply(out, factor, out=out)
    return np.add(out, b, out=out)


def subtract(a: Array, b: Array) -> Array:
    """Return a - b in the dtype of `a`. Consumes `a`."""
    out = consume(a, lambda: np.add(a, b, out=a))
    return np.subtract(out, b, out=out)


def momentum(m: Array, beta: float, x: Array) -> Array:
    """Return beta * m + (1 - beta) * x in the dtype of `m`. Consumes `m`.

    If |m| <= b, and `b` is updated by the same operation with |x|, then |m| <= b still holds, bit
    by bit.
    """
    return accumulate_scaled(m, beta, (1 - beta) * x.astype(m.dtype))


def lerp(x: Array, beta: float, m: Array) -> Array:
    """Return beta * m + (1 - beta) * x in the dtype of `m`. Consumes `x` irreversibly.

    The consumed tensor may be a gradient.
    """
    out = consume(x)
    if out.dtype != m.dtype or not out.flags.writeable:
        return beta * m + (1 - beta) * out.astype(m.dtype)
    np.multiply(out, 1 - beta, out=out)
    return np.add(out, beta * m, out=out)


def second_moment(v: Array, beta: float, x: Array) -> Array:
    """Return beta * v + (1 - beta) * x * x in the dtype of `v`. Consumes `v` irreversibly."""
    out = consume(v)
    np.multiply(out, beta, out=out)
    wide = x.astype(out.dtype)
    return np.add(out, (1 - beta) * wide * wide, out=out)


def bounded_ratio(m: Array, b: Array, eps: float = 0.0) -> Array:
    """Return m / (b + eps), clipped to [-1, 1], with 0 / 0 = 0.

    Expects |m| <= b. The result is in new memory.
    """
    out = np.maximum(b + b.dtype.type(eps), b.dtype.type(quantization.SMALLEST))
    with np.errstate(over="ignore"):
        np.divide(m, out, out=out)
    return np.clip(out, -1, 1, out=out)


def preconditioned(m: Array, v: Array, rates: Sequence[Any], eps: float, like: Array) -> Array:
    """Return Adam's direction rates[0] * m / (sqrt(rates[1] * v) + eps), in the dtype of `m`.

    Args:
        m: first moment.
        v: second moment, in the shape of `m`.
        rates: inverse bias corrections: numbers, or tensors that are broadcast.
        eps: number added to the square root.
        like: tensor in the shape of `m` whose memory may hold the result. Consumed irreversibly.
    """
    consume(like)
    first, second = (np.asarray(rate, m.dtype) for rate in rates)
    return first * m / (np.sqrt(second * v) + m.dtype.type(eps))


def mask_where_zero(x: Array, v: Array) -> Array:
    """Return `x` with zeros where `v` is not positive. Consumes `x` irreversibly."""
    out = consume(x)
    out[v <= 0] = 0
    return out


def pad_last(x: Array, width: int) -> Array:
    """Pad the last dimension of `x` with zeros to `width` elements."""
    return np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, width - x.shape[-1])])


def swap_leading(x: Array) -> Array:
    """Swap the first two dimensions of `x`."""
    return np.ascontiguousarray(np.swapaxes(x, 0, 1))


def project(
    error: Array, grad: Array, p: Array, q: Array, basis: Array, left: bool = False
) -> tuple[Array, Array]:
    """Return total = error - p^T q + grad, (n, m), and its projection. Consumes `error`.

    The operation takes one pass over memory where the framework allows. If the norm of `grad` is
    `spec.LARGEST` or more, the projection is infinite; if `grad` is not finite, it is NaN. The
    total is then meaningless. All arguments may have a leading batch dimension.

    Args:
        error: (n, m).
        grad: (n, m).
        p: (r, n).
        q: (r, m).
        basis: (r, m); (r, n) if `left`.
        left: whether the projection is basis total, (r, m), instead of basis total^T, (r, n).
    """
    if bad := too_large(grad)[0]:
        return error, np.full_like(q if left else p, np.inf if bad < BROKEN else np.nan)
    total = accumulate(subtract(error, transpose(p) @ q), grad)
    return total, basis @ (total if left else transpose(total))


def fold(x: Array, signs: Array) -> Array:
    """Return a sketch of each row x of `x`, whose norm estimates that of x: fp32, as `signs`.

    For a row of c + 2 `FOLDS` random signs, let a be its first `FOLDS` and b the others. Element
    j < c is sum_i a_i b_{i + j} x_{c i + j}, the sum of up to `FOLDS` blocks of c elements; the
    others are 0. The squared norm has the mean |x|^2 over the signs. Its variance is
    2 sum_j sum_{i != k} (x_{c i + j} x_{c k + j})^2, as if all signs were independent: 2 / c of
    |x|^4 if the columns j have equal norms.
    """
    columns = signs.shape[1] - 2 * FOLDS
    total = np.zeros_like(signs)
    for i in range(FOLDS):
        part = x[:, i * columns : (i + 1) * columns]
        size = part.shape[1]
        total[:, :size] += signs[:, i, None] * (part * signs[:, FOLDS + i : FOLDS + i + size])
    return total


def expand(p: Array, q: Array, like: Array) -> Array:
    """Return p^T q, (n, m), for p (r, n) and q (r, m).

    Consumes `like`, whose memory may hold the result.
    """
    mean = transpose(p) @ q
    consume(like)
    return mean


def deflate(error: Array, p: Array, q: Array) -> Array:
    """Return error - p^T q. Consumes `error` irreversibly.

    The result is bitwise equal to the intermediate value to which `project` adds the gradient.
    """
    out = consume(error)
    return np.subtract(out, transpose(p) @ q, out=out)


def zeros_reusing(x: Array) -> Array:
    """Return fp32 zeros in the shape of `x`. Consumes `x` irreversibly."""
    consume(x)
    return np.zeros(x.shape, np.float32)


def clear(x: Array, index: Array) -> Array:
    """Return the vector `x` with zeros at `index`. Consumes `x`."""
    taken = x[index]
    out = consume(x, lambda: x.__setitem__(index, taken))
    out[index] = 0
    return out


def add_at(x: Array, index: Array, values: Array) -> Array:
    """Return the vector `x` with `values` added at `index`, which has no duplicates.

    Consumes `x`.
    """
    out = consume(x, lambda: x.__setitem__(index, x[index] - values))
    out[index] += values
    return out


def sum_sparse(index: Sequence[Array], values: Sequence[Array], like: Array) -> Array:
    """Return the sum of sparse vectors as fp32, in the shape of `like`.

    Consumes `like` irreversibly.

    Args:
        index: positions of each vector's elements, without duplicates.
        values: these elements, fp32.
        like: tensor of the vectors' size.
    """
    total = journal.room(like)
    flat = total.reshape(-1)
    flat.fill(0)
    for positions, elements in zip(index, values, strict=True):
        flat[positions] += elements
    return total


def take(x: Array, index: Array) -> Array:
    """Return the elements of the vector `x` at `index`."""
    return x[index]


def sum_at(index: Array, values: Array, size: int) -> Array:
    """Sum int32 `values` by their `index` (int32); return `size` int32 sums."""
    out = np.zeros(size, np.int32)
    np.add.at(out, index, values)
    return out


def finite(x: Array) -> Array:
    """Return `x` as fp32, in new memory, with 0 for each non-finite element."""
    with np.errstate(over="ignore"):
        values = np.array(x, np.float32)
    values[~np.isfinite(values)] = 0
    return values


def secret_uniform(count: int, device: Any = None) -> Array:
    """Return `count` secret fp32 values in [0, 1); see `secret_normal`."""
    return secret.uniform(count).astype(np.float32)


def secret_normal(count: int, sigma: float, dtype: str, device: Any = None) -> Array:
    """Return `count` integers, rounded from secret normal values with standard deviation `sigma`.

    The values come from the operating system's cryptographic source and cannot be reproduced.
    They are new at each call, also within a graph. Values outside the range of `dtype` wrap around.
    See `accordion_hvd.ops.secret`.
    """
    return secret.rounded_normal(count, sigma, dtype)


def pack_bins(index: Array, signs: Array, shape: Sequence[int], width: int) -> Array:
    """Pack positions in bins, and signs, into one or two bytes each; see `ops.indices`."""
    return indices.pack_bins(index, signs < 0, shape, width)


def invalid_index(index: Array, size: int) -> Array:
    """Return one fp32 element for `index`, or for each row of it: 0 if it is valid, else 1.

    A valid index is strictly ascending, with all positions in [0, size).
    """
    if index.ndim == 2:
        return np.concatenate([invalid_index(row, size) for row in index])
    inside = index.size == 0 or (index[0] >= 0 and index[-1] < size)
    return np.array([not (inside and (index[1:] > index[:-1]).all())], np.float32)


def raise_on_invalid(x: Any, doubts: Array, senders: Sequence[Any]) -> Any:
    """Return `x` (tensors in lists and tuples), or raise an error if a flag in `doubts` is set.

    In a graph, the check becomes part of the graph.

    Args:
        x: result to return.
        doubts: vector of flags; a nonzero element marks a payload as corrupt.
        senders: rank that sent the payload, for each element of `doubts`. In a graph, a rank may be
            a scalar tensor.

    Raises:
        PayloadError: if an element of `doubts` is nonzero.
    """
    if np.any(doubts != 0):
        check.refuse_payload([senders[int(i)] for i in np.flatnonzero(doubts)])
    return x


def unsketch(table: Array, codes: Array, like: Array) -> Array:
    """Estimate a vector from its count sketch `table`: medians over an odd number of rows.

    Returns fp32 in the shape of the vector `like`. Consumes `like` irreversibly.
    """
    consume(like)
    out = like if like.dtype == np.float32 else np.empty(like.shape, np.float32)
    return count_sketch.estimate(table, codes, out)


def argsort(x: Array) -> Array:
    """Return the int32 indices that sort a vector in ascending order; stable."""
    return np.argsort(x, kind="stable").astype(np.int32)


def frames(x: Array, width: int, step: int) -> Array:
    """Return overlapping frames of each row of `x`.

    A frame has `width` elements, and a new frame starts every `step` elements:
    (rows, (count - 1) * step + width) becomes (rows, count, width).
    """
    pieces = np.lib.stride_tricks.sliding_window_view(x, width, axis=-1)
    return np.ascontiguousarray(pieces[..., ::step, :])


def overlap_add(x: Array, step: int) -> Array:
    """Apply the adjoint of `frames`: add the frames at their positions."""
    rows, count, width = x.shape
    extra = -(-width // step) - 1
    out = np.zeros((rows, count + extra, step), x.dtype)
    for i in range(extra + 1):
        part = x[..., i * step : (i + 1) * step]
        out[:, i : i + count, : part.shape[-1]] += part
    return out.reshape(rows, -1)[:, : (count - 1) * step + width]


def orthogonalize(p: Array) -> Array:
    """Return orthonormal rows that span the rows of `p`, (r, n), r <= n.

    Uses a QR decomposition with a positive diagonal. Linearly dependent rows, including zeros, are
    completed to an orthonormal set, so the result holds no NaN for finite input. `p` may have a
    leading batch dimension.
    """
    q, r = np.linalg.qr(transpose(p))
    diagonal = np.diagonal(r, axis1=-2, axis2=-1)
    signs = np.where(diagonal < 0, -1.0, 1.0).astype(q.dtype)
    return transpose(q * signs[..., None, :])


def norm(x: Array) -> Array:
    """Return the 2-norm of all elements, as an fp32 scalar tensor."""
    return np.asarray(np.linalg.norm(x.reshape(-1).astype(np.float64)), np.float32)


def row_norms(x: Array) -> Array:
    """Return the 2-norm of each row of `x`, computed in its dtype: (..., 1)."""
    return np.sqrt(np.einsum("...i,...i->...", x, x))[..., None]


def power_below(x: Array) -> Array:
    """Return the largest power of two that is at most `x`, for positive fp32 values."""
    return (x.view(np.int32) & 0x7F800000).view(np.float32)


def inner_products(a: Array, b: Array) -> Array:
    """Return the inner product of each row of `a` with that of `b`; fp32, (rows,)."""
    return np.einsum("ij,ij->i", a, b).astype(np.float32)


def nonfinite(x: Array) -> Array:
    """Return the flag of a projection as one fp32 element: 0, `spec.BROKEN` if it has NaN, else 1.

    The sum of all elements takes one pass and no copy. A finite sum has finite terms; only if the
    sum overflows are the elements examined one by one.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        finite = np.isfinite(np.sum(x, dtype=np.result_type(x, np.float32)))
    if finite or np.isfinite(x).all():
        return np.zeros(1, np.float32)
    return np.array([BROKEN if np.isnan(x).any() else 1], np.float32)


def too_large(x: Array) -> Array:
    """Return one fp32 element: 0 if the norm of `x` is less than `spec.LARGEST`, else 1 or more.

    It is 1 if all elements are finite, else `spec.BROKEN`. The sum of the squares takes one pass;
    it is infinite or NaN if an element is. Accelerators bound the norm by the largest element.
    """
    flat = x.reshape(-1).astype(np.result_type(x, np.float32), copy=False)
    with np.errstate(over="ignore", invalid="ignore"):
        if np.dot(flat, flat) < LARGEST**2:
            return np.zeros(1, np.float32)
    return np.array([1 if np.isfinite(x).all() else BROKEN], np.float32)


def zero_if_bad(x: Array, bad: Array) -> Array:
    """Return `x`, or zeros if its flag `bad` (from `too_large`) is not 0."""
    return np.zeros_like(x) if bad[0] else x


def where(condition: Any, first: Array, second: Array) -> Array:
    """Return `first` if `condition` (from `exceeds`) is true, else `second`."""
    return first if condition else second


def exceeds(flags: Array, limit: float) -> Any:
    """Return whether any flag exceeds `limit`: a bool, or a symbolic scalar in a graph."""
    return bool((flags > limit).any())


def filled_if(condition: Any, value: Any, x: Array) -> Array:
    """Return `value` in the shape of `x` if `condition` (from `exceeds`) is true, else `x`."""
    return filled(x, value) if condition else x


def filled(x: Array, value: Any) -> Array:
    """Return a tensor with the shape and dtype of `x` and `value` as each element."""
    return np.full_like(x, value)


def to_wire(parts: Sequence[Array], wire: str, count: int, into: Array | None = None) -> Array:
    """Concatenate tensors, round them to dtype `wire` and return their bytes.

    Zeros pad the result to `count` elements. `into` may be the result of an earlier call, whose
    memory is reused where possible.
    """
    flat = np.zeros(count, np.float32)
    np.concatenate([part.reshape(-1) for part in parts], out=flat[: sum(p.size for p in parts)])
    if wire != "bfloat16":
        return to_bytes(flat.astype(wire))
    bits = flat.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16  # round to nearest, ties to even
    return to_bytes(np.where(np.isnan(flat), np.uint32(0x7FC0), rounded).astype(np.uint16))


def mean_of_wire(x: Array, wire: str, ranks: int) -> Array:
    """Average `ranks` equal parts of bytes from `to_wire` in fp32; return such bytes."""
    parts = _of_wire(x, wire).reshape(ranks, -1)
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return to_wire([total / ranks], wire, total.size)


def from_wire(x: Array, wire: str, likes: Sequence[Array]) -> list[Array]:
    """Decode bytes from `to_wire` into tensors with the shapes and dtypes of `likes`.

    Consumes `likes`.
    """
    pieces = split(_of_wire(x, wire), [*(like.size for like in likes), 0])
    pairs = zip(pieces, likes, strict=False)
    return [piece.reshape(like.shape).astype(like.dtype) for piece, like in pairs]


def _of_wire(x: Array, wire: str) -> Array:
    if wire != "bfloat16":
        return from_bytes(x, wire, (-1,)).astype(np.float32)
    return widen(from_bytes(x, "int16", (-1,)))


def checksum(x: Array) -> Array:
    """Return the sum of the bit patterns of all elements: an int64 scalar tensor."""
    bits = np.ascontiguousarray(x).view(f"int{8 * x.dtype.itemsize}")
    return np.asarray(np.sum(bits, dtype=np.int64))


def clip(x: Array, limit: Array) -> Array:
    """Clip `x` to [-limit, limit]; `limit` broadcasts. Consumes `x` irreversibly."""
    out = consume(x)
    return np.clip(out, -limit, limit, out=out)


# ----------------------------------------------------------- operations from other modules
largest_index = selection.largest_index
accumulate_largest = selection.accumulate_largest
accumulate_reaching = selection.accumulate_reaching
accumulate_outgrown = selection.accumulate_outgrown
largest_of_bins = selection.largest_of_bins
largest_of_chunks = selection.largest_of_chunks
index_of_chunks = selection.index_of_chunks
pack_index = indices.pack
unpack_index = indices.unpack
unpack_bins = indices.unpack_bins
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
narrow = quantization.narrow
widen = quantization.widen
column_means = quantization.column_means
sum_columns = quantization.sum_columns
subtract_columns = quantization.subtract_columns
