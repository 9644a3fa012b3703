"""TensorFlow, eagerly and in graphs. Signatures and meaning as in `accordion_hvd.ops.numpy`.

TensorFlow's tensors cannot be written in place: what consumes elsewhere makes a new tensor here,
and nothing needs to be undone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from accordion_hvd import _renamed, check
from accordion_hvd.ops import bins, count_sketch, indices, journal, quantization, secret
from accordion_hvd.ops import numpy as oracle
from accordion_hvd.ops.spec import Spec, Tensor


class UntraceableError(TypeError):
    """A value is wanted within a graph, where there are none yet."""


def spec(x: Tensor) -> Spec:
    """Shape, dtype and device of `x`."""
    import accordion_hvd.ops.tensorflow as xp

    if isinstance(x, (tf.IndexedSlices, tf.SparseTensor, tf.RaggedTensor)):
        check.refuse("TensorFlow", "a gradient", type(x).__name__, "a dense tensor")
    return Spec(shape(x), dtype(x), xp)


def shape(x: Tensor) -> tuple[int, ...]:
    """Return the static shape."""
    return tuple(x.shape.as_list())


def dtype(x: Tensor) -> str:
    """Return the dtype by name."""
    return tf.as_dtype(x.dtype).name


def device(x: Tensor) -> Any:
    """Return the device of `x`, as `zeros` and `arange` take it."""
    return None


def zeros(shape: Sequence[int], dtype: str, device: Any = None) -> Tensor:
    """Return a new tensor of zeros."""
    return tf.zeros(tuple(shape), dtype)


def full(shape: Sequence[int], value: float, dtype: str, device: Any = None) -> Tensor:
    """Return a new tensor filled with `value`."""
    return tf.fill(tuple(shape), tf.constant(value, dtype))


def arange(count: int, device: Any = None) -> Tensor:
    """0, 1, ..., count - 1 as int64."""
    return tf.range(count, dtype=tf.int64)


def asarray(x: np.ndarray, device: Any = None) -> Tensor:
    """Return a NumPy array as a tensor of this framework."""
    return tf.convert_to_tensor(x)


def to_numpy(x: Tensor) -> np.ndarray:
    """Return the tensor as a NumPy array on the host (may share memory); not in a graph."""
    if symbolic(x):
        raise UntraceableError(
            "a value is wanted within a graph; this conversation runs eagerly only"
        )
    return (tf.cast(x, tf.float32) if x.dtype == tf.bfloat16 else tf.convert_to_tensor(x)).numpy()


def cast(x: Tensor, dtype: str) -> Tensor:
    """Return the tensor in another dtype; itself if it has that dtype already."""
    return tf.cast(x, dtype)


def copy(x: Tensor) -> Tensor:
    """Return a copy."""
    return tf.identity(x)


def reshape(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Return the elements in another shape (a view where possible)."""
    return tf.reshape(x, tuple(shape))


def transpose(x: Tensor) -> Tensor:
    """Transpose a matrix, or each of several."""
    return tf.linalg.matrix_transpose(x)


def minimum(a: Tensor, b: Tensor) -> Tensor:
    """Return the element-wise minimum."""
    return tf.minimum(a, b)


def maximum(a: Tensor, b: Tensor) -> Tensor:
    """Return the element-wise maximum."""
    return tf.maximum(a, b)


def maximum_of(parts: Sequence[Tensor]) -> Tensor:
    """Return the largest element of several vectors, as a scalar tensor."""
    return tf.reduce_max(tf.concat(list(parts), 0))


def symbolic(x: Tensor) -> bool:
    """Return whether `x` has no value yet (in a graph)."""
    return not hasattr(x, "numpy")


def concat(parts: Sequence[Tensor], axis: int = 0) -> Tensor:
    """Tensors one after the other, or side by side: along `axis`."""
    return tf.concat(list(parts), axis)


def split(x: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Cut a vector into parts of these sizes: the inverse of `concat`."""
    return tf.split(x, list(sizes))


def stack(parts: Sequence[Tensor], into: Tensor | None = None) -> Tensor:
    """Equal tensors along a new first dimension."""
    return tf.stack(list(parts))


def unstack(x: Tensor) -> list[Tensor]:
    """Cut a tensor along its first dimension: the inverse of `stack`."""
    return tf.unstack(x)


def to_bytes(x: Tensor) -> Tensor:
    """Return the memory of `x` as a vector of uint8."""
    flat = tf.reshape(x, (-1,))
    return flat if x.dtype == tf.uint8 else tf.reshape(tf.bitcast(flat, tf.uint8), (-1,))


def from_bytes(x: Tensor, dtype: str, shape: Sequence[int]) -> Tensor:
    """Invert `to_bytes`; one extent of `shape` may be -1."""
    size = tf.as_dtype(dtype).size
    if size > 1:
        x = tf.reshape(x, (-1, size))
    return tf.reshape(tf.bitcast(x, dtype), tuple(shape))


def accumulate(a: Tensor, b: Tensor) -> Tensor:
    """Return a + b in a's dtype."""
    return a + tf.cast(b, a.dtype)


def accumulate_scaled(a: Tensor, factor: float, b: Tensor) -> Tensor:
    """factor * a + b in a's dtype, for a factor that is not 0."""
    return a * factor + tf.cast(b, a.dtype)


def subtract(a: Tensor, b: Tensor) -> Tensor:
    """Return a - b in a's dtype."""
    return a - tf.cast(b, a.dtype)


def momentum(m: Tensor, beta: float, x: Tensor) -> Tensor:
    """beta * m + (1 - beta) * x in m's dtype."""
    return beta * m + (1 - beta) * tf.cast(x, m.dtype)


def lerp(x: Tensor, beta: float, m: Tensor) -> Tensor:
    """beta * m + (1 - beta) * x in m's dtype."""
    return momentum(m, beta, x)


def second_moment(v: Tensor, beta: float, x: Tensor) -> Tensor:
    """beta * v + (1 - beta) * x * x in v's dtype."""
    return beta * v + (1 - beta) * tf.square(tf.cast(x, v.dtype))


def bounded_ratio(m: Tensor, b: Tensor, eps: float = 0.0) -> Tensor:
    """m / (b + eps), within [-1, 1], 0 for 0 / 0; see `accordion_hvd.ops.numpy`."""
    return tf.clip_by_value(m / tf.maximum(b + eps, quantization.SMALLEST), -1, 1)


def preconditioned(m: Tensor, v: Tensor, rates: Sequence[Any], eps: float, like: Tensor) -> Tensor:
    """rates[0] * m / (sqrt(rates[1] * v) + eps); see `accordion_hvd.ops.numpy`."""
    return rates[0] * m / (tf.sqrt(rates[1] * v) + eps)


def mask_where_zero(x: Tensor, v: Tensor) -> Tensor:
    """`x`, zero where `v` is not above 0."""
    return tf.where(v > 0, x, tf.zeros_like(x))


def pad_last(x: Tensor, width: int) -> Tensor:
    """`x` with zeros behind the elements of its last dimension, up to `width` of them."""
    return tf.pad(x, [(0, 0)] * (len(x.shape) - 1) + [(0, width - x.shape[-1])])


def swap_leading(x: Tensor) -> Tensor:
    """`x` with its first two dimensions exchanged."""
    order = [1, 0, *range(2, len(x.shape))]
    return tf.transpose(x, order)


def project(error: Tensor, grad: Tensor, p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """total = error - p^T q + grad, and q total^T; see `accordion_hvd.ops.numpy`."""
    total = accumulate(deflate(error, p, q), grad)
    return total, tf.matmul(q, total, transpose_b=True)


def expand(p: Tensor, q: Tensor, like: Tensor) -> Tensor:
    """p^T q, (n, m)."""
    if shape(p)[-2] == 1:
        return transpose(p) * q  # no library's product is as fast with one inner term
    return tf.matmul(p, q, transpose_a=True)


def deflate(error: Tensor, p: Tensor, q: Tensor) -> Tensor:
    """error - p^T q."""
    return error - expand(p, q, error)


def zeros_reusing(x: Tensor) -> Tensor:
    """Zeros, fp32, in the shape of `x`."""
    return tf.zeros(shape(x), tf.float32)


def clear(x: Tensor, index: Tensor) -> Tensor:
    """Return the vector `x` with zeros at `index`."""
    values = tf.zeros(tf.shape(index), x.dtype)
    return tf.tensor_scatter_nd_update(x, index[:, None], values)


def add_at(x: Tensor, index: Tensor, values: Tensor) -> Tensor:
    """Return the vector `x` with `values` added at `index` (no index twice)."""
    return tf.tensor_scatter_nd_add(x, index[:, None], tf.cast(values, x.dtype))


def take(x: Tensor, index: Tensor) -> Tensor:
    """Return the elements of the vector `x` at `index`."""
    return tf.gather(x, index)


def sum_at(index: Tensor, values: Tensor, size: int) -> Tensor:
    """`size` int32 values: for each, the sum of `values` (int32) whose `index` (int32) names it."""
    return tf.math.unsorted_segment_sum(values, index, size)


def finite(x: Tensor) -> Tensor:
    """`x` as fp32, with 0 for each element that is not finite."""
    values = tf.cast(x, tf.float32)
    return tf.where(tf.math.is_finite(values), values, tf.zeros_like(values))


def secret_uniform(count: int, device: Any = None) -> Tensor:
    """`count` fp32 values in [0, 1) that nobody can repeat."""
    return _on_host(oracle.secret_uniform, [count], tf.float32, (count,))


def secret_normal(count: int, sigma: float, dtype: str, device: Any = None) -> Tensor:
    """`count` integers that nobody can repeat; see `accordion_hvd.ops.numpy`."""
    given = [count, sigma, dtype]
    return _on_host(secret.rounded_normal, given, tf.as_dtype(dtype), (count,))


def largest_index(x: Tensor, count: int) -> Tensor:
    """Return where the `count` largest magnitudes of each row are: int32, ascending."""
    size = shape(x)[-1]
    count = min(count, size)
    rows = math.prod(shape(x)) // size
    if "GPU" in x.device:
        index = tf.math.top_k(tf.abs(tf.reshape(x, (rows, size))), count, sorted=False).indices
        return tf.sort(tf.reshape(index + size * tf.range(rows)[:, None], (-1,)))
    # 5 to 24 times faster than top_k
    return _on_host(oracle.largest_index, [x, count], tf.int32, (rows * count,))


def accumulate_largest(error: Tensor, grad: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """error + grad, and `largest_index` of it."""
    total = accumulate(error, grad)
    return total, largest_index(total, count)


def accumulate_reaching(error: Tensor, grad: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    """error + grad, and where its magnitude is at least `limit`; not in a graph."""
    return _accumulated(oracle.accumulate_reaching, error, grad, limit)


def accumulate_outgrown(error: Tensor, grad: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """error + grad, AdaComp's choice of it, and each row's scale; not in a graph."""
    return _accumulated(oracle.accumulate_outgrown, error, grad, width)


def _accumulated(choose: Callable[..., Any], error: Tensor, grad: Tensor, bound: float) -> Any:
    with journal.recording([]):  # a copy needs no undo
        found = choose(np.array(to_numpy(error)), to_numpy(grad), bound)
    return tuple(map(tf.convert_to_tensor, found))


def largest_of_bins(x: Tensor, width: int) -> Tensor:
    """Return where the largest magnitude of each bin of `width` elements is: int32."""
    size = shape(x)[-1]
    count = math.prod(shape(x)) // size * -(-size // width)
    return _on_host(oracle.largest_of_bins, [x, width], tf.int32, (count,))


def pack_bins(index: Tensor, signs: Tensor, shape: Sequence[int], width: int) -> Tensor:
    """Positions in bins, and signs, in a byte or two each; not in a graph."""
    return tf.convert_to_tensor(bins.pack(to_numpy(index), to_numpy(signs) < 0, shape, width))


def unpack_bins(packed: Tensor, shape: Sequence[int], width: int) -> tuple[Tensor, Tensor]:
    """Invert `pack_bins`; not in a graph."""
    return tuple(map(tf.convert_to_tensor, bins.unpack(to_numpy(packed), shape, width)))


def pack_index(index: Tensor, size: int) -> Tensor:
    """Ascending distinct positions below `size` as few bytes; see `accordion_hvd.ops.indices`."""
    count = shape(index)[0]
    low = indices.low_bytes(count, size)
    if low == 4:
        return to_bytes(index)
    tail = to_bytes(tf.cast(tf.bitwise.bitwise_and(index, 256**low - 1), f"uint{8 * low}"))
    places = tf.bitwise.right_shift(index, 8 * low) + tf.range(count)
    length = -(-indices.bitmap_bits(count, size, low) // 8)
    bits = tf.scatter_nd(places[:, None], tf.ones((count,), tf.int32), (8 * length,))
    weights = tf.bitwise.left_shift(tf.ones((8,), tf.int32), tf.range(8))
    bitmap = tf.reduce_sum(tf.reshape(bits, (length, 8)) * weights, 1)
    return tf.concat([tail, tf.cast(bitmap, tf.uint8)], 0)


def unpack_index(packed: Tensor, count: int, size: int) -> Tensor:
    """Invert `pack_index`."""
    low = indices.low_bytes(count, size)
    if low == 4:
        return from_bytes(packed, "int32", (count,))
    tail = from_bytes(packed[: low * count], f"uint{8 * low}", (count,))
    bitmap = tf.cast(packed[low * count :], tf.int32)[:, None]
    bits = tf.bitwise.bitwise_and(tf.bitwise.right_shift(bitmap, tf.range(8)), 1)
    places = tf.cast(tf.where(tf.reshape(bits, (-1,)) > 0)[:, 0], tf.int32)
    right = tf.equal(tf.shape(places)[0], count)
    places = tf.concat([places, tf.zeros((count,), tf.int32)], 0)[:count]
    index = tf.bitwise.left_shift(places - tf.range(count), 8 * low) + tf.cast(tail, tf.int32)
    return tf.where(right, index, -1)  # another number of them: `invalid_index`


def invalid_index(index: Tensor, size: int) -> Tensor:
    """Return one fp32 element: 0 if `index` ascends from at least 0 to below `size`."""
    outside = tf.reduce_any(index[:1] < 0) | tf.reduce_any(index[-1:] >= size)
    return tf.reshape(tf.cast(outside | tf.reduce_any(index[1:] <= index[:-1]), tf.float32), (1,))


def raise_on_invalid(x: Any, doubts: Tensor, senders: Sequence[Any]) -> Any:
    """`x`, if no element of `doubts` differs from 0; see `accordion_hvd.ops.numpy`."""
    if not symbolic(doubts):
        return oracle.raise_on_invalid(x, doubts.numpy(), senders)
    doubted = tf.not_equal(doubts, 0)
    who = tf.boolean_mask(tf.stack([tf.cast(rank, tf.int64) for rank in senders]), doubted)
    right = tf.logical_not(tf.reduce_any(doubted))
    refusal = tf.debugging.Assert(right, ["what these ranks have sent does not decode:", who])
    with tf.control_dependencies([refusal]):
        return tf.nest.map_structure(tf.identity, x)


def sketch(x: Tensor, codes: Tensor, columns: int) -> Tensor:
    """Return the count sketch (rows, columns) of the vector `x`; see `accordion_hvd.ops.numpy`."""
    x, rows = tf.cast(x, tf.float32), shape(codes)[0]
    if "GPU" in x.device:
        return _sketch(x, codes, columns)
    return _on_host(oracle.sketch, [x, codes, columns], tf.float32, (rows, columns))


def _sketch(x: Tensor, codes: Tensor, columns: int) -> Tensor:
    moved = [count_sketch.moved(x, row, columns) for row in tf.unstack(codes)]
    return tf.stack([tf.reduce_sum(row, 0) for row in moved])


def unsketch(table: Tensor, codes: Tensor, like: Tensor) -> Tensor:
    """Estimates of the vector of which `table` is the sketch; see `accordion_hvd.ops.numpy`."""
    if "GPU" in table.device:
        return _unsketch(table, codes, like)
    return _on_host(oracle.unsketch, [table, codes, _room(like)], tf.float32, shape(like))


def _unsketch(table: Tensor, codes: Tensor, like: Tensor) -> Tensor:
    pairs = zip(tf.unstack(table), tf.unstack(codes), strict=True)
    seen = tf.stack([count_sketch.found(*pair, _size(like)) for pair in pairs])
    return tf.sort(seen, 0)[shape(table)[0] // 2]


def argsort(x: Tensor) -> Tensor:
    """Positions of the elements of a vector in ascending order, int32; stable."""
    return tf.argsort(x, stable=True)


def frames(x: Tensor, width: int, step: int) -> Tensor:
    """Pieces of each row of `x`; see `accordion_hvd.ops.numpy`."""
    return tf.signal.frame(x, width, step)


def overlap_add(x: Tensor, step: int) -> Tensor:
    """Apply the adjoint of `frames`; see `accordion_hvd.ops.numpy`."""
    return tf.signal.overlap_and_add(x, step)


def orthogonalize(p: Tensor) -> Tensor:
    """Orthonormal rows that span those of `p` (r, n), r <= n; see `accordion_hvd.ops.numpy`."""
    q, r = tf.linalg.qr(transpose(p))
    signs = tf.where(tf.linalg.diag_part(r) < 0, -1.0, 1.0)
    return transpose(q * tf.cast(signs, q.dtype)[..., None, :])


def norm(x: Tensor) -> Tensor:
    """Return the 2-norm of all elements, as an fp32 scalar tensor."""
    return tf.cast(tf.norm(tf.cast(x, tf.float64)), tf.float32)


def nonfinite(x: Tensor) -> Tensor:
    """Return a vector with one fp32 element: 0 if all elements of `x` are finite, else 1."""
    wide = tf.float64 if x.dtype == tf.float64 else tf.float32
    finite = tf.cond(
        tf.math.is_finite(tf.reduce_sum(tf.cast(x, wide))),
        lambda: tf.constant(True),
        lambda: tf.reduce_all(tf.math.is_finite(x)),
    )
    return tf.reshape(tf.cast(tf.logical_not(finite), tf.float32), (1,))


def zero_if_nonfinite(x: Tensor, bad: Tensor) -> Tensor:
    """`x`, or zeros where `bad` (from `nonfinite`) says that it is not finite."""
    return tf.cond(tf.equal(bad[0], 0), lambda: tf.identity(x), lambda: tf.zeros_like(x))


def where(bad: Any, first: Tensor, second: Tensor) -> Tensor:
    """`first` if `bad` (from `is_nonfinite`), else `second`."""
    return tf.cond(bad, lambda: tf.identity(first), lambda: tf.identity(second))


def is_nonfinite(flags: Tensor) -> Any:
    """Return whether any element is not 0: a bool, or a symbolic scalar in a graph."""
    bad = tf.reduce_any(tf.not_equal(flags, 0))
    return bool(bad) if tf.executing_eagerly() else bad


def nans_like(x: Tensor) -> Tensor:
    """NaN in the shape and dtype of `x`."""
    return tf.fill(tf.shape(x), tf.constant(float("nan"), x.dtype))


def to_wire(parts: Sequence[Tensor], wire: str, count: int, into: Tensor | None = None) -> Tensor:
    """Floating-point tensors one after the other, rounded to dtype `wire`, as bytes."""
    flat = [tf.cast(tf.reshape(part, (-1,)), wire) for part in parts]
    missing = count - sum(math.prod(shape(part)) for part in parts)
    return to_bytes(tf.concat([*flat, tf.zeros((missing,), wire)], 0))


def mean_of_wire(x: Tensor, wire: str, ranks: int) -> Tensor:
    """Average `ranks` equal parts of bytes from `to_wire`, added in fp32; return such bytes."""
    parts = tf.unstack(from_bytes(x, wire, (ranks, -1)), ranks)
    total = tf.cast(parts[0], tf.float32)
    for part in parts[1:]:
        total += tf.cast(part, tf.float32)
    return to_bytes(tf.cast(total / ranks, wire))


def from_wire(x: Tensor, wire: str, likes: Sequence[Tensor]) -> list[Tensor]:
    """Invert `to_wire`, in the shapes and dtypes of `likes`."""
    sizes = [math.prod(shape(like)) for like in likes]
    flat = from_bytes(x, wire, (-1,))[: sum(sizes)]
    pieces = zip(tf.split(flat, sizes), likes, strict=True)
    return [tf.cast(tf.reshape(piece, shape(like)), like.dtype) for piece, like in pieces]


def checksum(x: Tensor) -> Tensor:
    """Return the sum of the bits of all elements, as integers: an int64 scalar tensor."""
    bits = tf.bitcast(x, f"int{8 * x.dtype.size}")
    return tf.reduce_sum(tf.cast(bits, tf.int64))


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """Codes (uint8, below 2^bits; 1 to 8 bits) as few bytes; see `ops.quantization`."""
    size = quantization.packed_length(_size(codes), bits)
    return _on_host(oracle.pack_bits, [codes, bits], tf.uint8, (size,))


def unpack_bits(packed: Tensor, bits: int, count: int) -> Tensor:
    """Invert `pack_bits`."""
    return _on_host(oracle.unpack_bits, [packed, bits, count], tf.uint8, (count,))


def bucket_norms(x: Tensor, bucket: int, kind: str) -> Tensor:
    """Return the "max", "l1" or "l2" norm of each `bucket` elements of `x`; fp32."""
    return _on_host(oracle.bucket_norms, [x, bucket, kind], tf.float32, (-(-_size(x) // bucket),))


def quantize(x: Tensor, steps: Tensor, bucket: int, bits: int, seed: Any = None) -> Tensor:
    """x / step, rounded to integers of `bits` bits, packed; see `accordion_hvd.ops.numpy`."""
    length = quantization.packed_length(_size(x), bits)
    return _on_host(oracle.quantize, [x, steps, bucket, bits, seed], tf.uint8, (length,))


def sum_quantized(
    parts: Sequence[Tensor],
    steps: Sequence[Tensor],
    bucket: int,
    bits: int,
    middle: float,
    like: Tensor,
) -> Tensor:
    """Add up (code - middle) * step over `parts`; see `accordion_hvd.ops.numpy`."""
    given = [parts, steps, bucket, bits, middle, _room(like)]
    return _on_host(oracle.sum_quantized, given, tf.float32, shape(like))


def subtract_quantized(
    total: Tensor, packed: Tensor, steps: Tensor, bucket: int, bits: int, middle: float
) -> Tensor:
    """`total` - (code - middle) * step; see `accordion_hvd.ops.numpy`."""
    run = lambda x, *sent: oracle.subtract_quantized(x.copy(), *sent)  # noqa: E731
    return _on_host(run, [total, packed, steps, bucket, bits, middle], tf.float32, shape(total))


def pack_signs(x: Tensor, turn: Any = None) -> Tensor:
    """Return one bit per element: whether it is at least 0; see `accordion_hvd.ops.numpy`."""
    return _on_host(oracle.pack_signs, [x, turn], tf.uint8, (-(-_size(x) // 8),))


def pack_random_signs(x: Tensor, seed: Any, turn: Any) -> Tensor:
    """Return a random bit per element of `x`; see `accordion_hvd.ops.numpy`."""
    return _on_host(oracle.pack_random_signs, [x, seed, turn], tf.uint8, (-(-_size(x) // 8),))


def pack_powers(x: Tensor, seed: Any) -> Tensor:
    """Elements rounded stochastically to powers of two; see `accordion_hvd.ops.numpy`."""
    length = -(-_size(x) // 8) + _size(x)
    return _on_host(oracle.pack_powers, [x, seed], tf.uint8, (length,))


def sum_powers(parts: Sequence[Tensor], weight: float, like: Tensor) -> Tensor:
    """`weight` times the sum over `parts` from `pack_powers`; see `accordion_hvd.ops.numpy`."""
    return _on_host(oracle.sum_powers, [parts, weight, _room(like)], tf.float32, shape(like))


def column_means(x: Tensor, packed: Tensor) -> Tensor:
    """Means of a column's elements whose bit is 0, and is 1; see `accordion_hvd.ops.numpy`."""
    *front, _, m = shape(x)
    return _on_host(oracle.column_means, [x, packed], tf.float32, (*front, 2, m))


def sum_columns(parts: Sequence[Tensor], means: Sequence[Tensor], like: Tensor) -> Tensor:
    """Add up the bits (`parts`) with `column_means` for them; see `accordion_hvd.ops.numpy`."""
    return _on_host(oracle.sum_columns, [parts, means, _room(like)], tf.float32, shape(like))


def subtract_columns(total: Tensor, packed: Tensor, means: Tensor) -> Tensor:
    """`total` without its bits' `column_means`; see `accordion_hvd.ops.numpy`."""
    run = lambda x, *sent: oracle.subtract_columns(x.copy(), *sent)  # noqa: E731
    return _on_host(run, [total, packed, means], tf.float32, shape(total))


def clip(x: Tensor, limit: Tensor) -> Tensor:
    """`x` within +-limit (one element)."""
    return tf.maximum(tf.minimum(x, limit), -limit)


def _on_host(
    function: Callable[..., Any],
    given: Sequence[Any],
    dtype: tf.DType,
    shape: Sequence[int],
) -> Tensor:
    """NumPy's result of `function` on `given`, in a graph too.

    Of `given`, the values of tensors (and of lists of them) arrive, those of whole numbers as
    integers, and fresh memory for a `_room`; anything else as it is.
    """
    # copies, since callers may change their lists before the graph runs
    given = [list(x) if isinstance(x, (list, tuple)) else x for x in given]
    parts = [x if isinstance(x, list) else [x] for x in given]
    tensors = [x for part in parts for x in part if tf.is_tensor(x)]
    # NumPy has no bfloat16
    tensors = [tf.cast(x, tf.float32) if x.dtype == tf.bfloat16 else x for x in tensors]

    def run(*values: np.ndarray) -> Any:
        rest = iter(values)
        return function(*(_told(x, rest) for x in given))

    return tf.ensure_shape(tf.numpy_function(run, tensors, dtype), tuple(shape))


def _told(x: Any, values: Iterator[np.ndarray]) -> Any:
    """Return the argument that stands for `x`: for each tensor, the next of `values`."""
    if isinstance(x, list):
        return [_told(part, values) for part in x]
    if isinstance(x, tf.TensorSpec):
        return np.empty(x.shape, np.float32)
    if not tf.is_tensor(x):
        return x
    value = next(values)
    return int(value) if value.ndim == 0 and value.dtype.kind == "i" else value


def _room(like: Tensor) -> tf.TensorSpec:
    return tf.TensorSpec(like.shape, tf.float32)


def _size(x: Tensor) -> int:
    return math.prod(shape(x))


__getattr__ = _renamed.module_attributes(__name__, _renamed.OPERATIONS)
