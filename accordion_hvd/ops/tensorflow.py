"""Tensor operations on TensorFlow tensors, eager or in graphs.

Signatures and semantics are those of `accordion_hvd.ops.numpy`; docstrings say what differs.
TensorFlow's tensors are immutable: operations that consume an argument elsewhere return a new
tensor here, and need no undo.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from accordion_hvd import check
from accordion_hvd.ops import count_sketch, indices, journal, quantization, secret
from accordion_hvd.ops import numpy as oracle
from accordion_hvd.ops.spec import BROKEN, FOLDS, LARGEST, Spec, Tensor


def _compiled(function: Callable[..., Any], eagerly: bool = True) -> Callable[..., Any]:
    """Compile a function of tensors as one kernel, by XLA, unless there is a GPU.

    On a CPU, each operation of TensorFlow passes over memory by itself, products with a matrix of a
    few rows take up to ten times as long, and scattered additions a hundred times. Without
    `eagerly` it is compiled only in graphs, because shapes may differ in each step.
    """
    whole = tf.function(function, autograph=False, jit_compile=True)
    kernels: dict[Any, Any] = {}  # by shapes; unlike calls of `whole`, they do not warn of traces

    @functools.wraps(function)
    def call(*given: Any) -> Any:
        if _has_gpu() or not (eagerly or symbolic(given[0])):
            return function(*given)
        key = tuple(_outline(x) for x in given)
        if key not in kernels:
            kernels[key] = whole.get_concrete_function(*key)
        return kernels[key](*(tf.convert_to_tensor(x) for x in given if tf.is_tensor(x)))

    return call


_compiled_in_graphs = functools.partial(_compiled, eagerly=False)


def _has_gpu() -> bool:
    """Return whether TensorFlow uses a GPU, on which a graph that is being traced may run."""
    return bool(tf.config.get_visible_devices("GPU"))


def _outline(x: Any) -> Any:
    """Return the shape and dtype of a tensor; anything else unchanged."""
    return tf.TensorSpec(x.shape, x.dtype) if tf.is_tensor(x) else x


class UntraceableError(TypeError):
    """Raised when a graph is traced and an operation needs a tensor's value."""


def spec(x: Tensor) -> Spec:
    """Return the shape, dtype and device of `x` as a `Spec`.

    Raises:
        ValueError: if `x` is sparse or ragged.
    """
    import accordion_hvd.ops.tensorflow as xp

    if isinstance(x, (tf.IndexedSlices, tf.SparseTensor, tf.RaggedTensor)):
        check.refuse("TensorFlow", "a gradient", type(x).__name__, "a dense tensor")
    return Spec(shape(x), dtype(x), xp)


def shape(x: Tensor) -> tuple[int, ...]:
    return tuple(x.shape.as_list())


def dtype(x: Tensor) -> str:
    return tf.as_dtype(x.dtype).name


def device(x: Tensor) -> Any:
    return None


def zeros(shape: Sequence[int], dtype: str, device: Any = None) -> Tensor:
    return tf.zeros(tuple(shape), dtype)


def full(shape: Sequence[int], value: float, dtype: str, device: Any = None) -> Tensor:
    return tf.fill(tuple(shape), tf.constant(value, dtype))


def arange(count: int, device: Any = None) -> Tensor:
    return tf.range(count, dtype=tf.int64)


def asarray(x: np.ndarray, device: Any = None) -> Tensor:
    return tf.convert_to_tensor(x)


def to_numpy(x: Tensor) -> np.ndarray:
    """Return the tensor as a NumPy array on the host (may share memory); not in a graph."""
    if symbolic(x):
        raise UntraceableError(
            "TensorFlow: a value is needed within a graph; this exchange runs only eagerly"
        )
    return (tf.cast(x, tf.float32) if x.dtype == tf.bfloat16 else tf.convert_to_tensor(x)).numpy()


def cast(x: Tensor, dtype: str) -> Tensor:
    return tf.cast(x, dtype)


def copy(x: Tensor) -> Tensor:
    return tf.identity(x)


def reshape(x: Tensor, shape: Sequence[int]) -> Tensor:
    return tf.reshape(x, tuple(shape))


def transpose(x: Tensor) -> Tensor:
    return tf.linalg.matrix_transpose(x)


def minimum(a: Tensor, b: Tensor) -> Tensor:
    return tf.minimum(a, b)


def maximum(a: Tensor, b: Tensor) -> Tensor:
    return tf.maximum(a, b)


def maximum_of(parts: Sequence[Tensor]) -> Tensor:
    return tf.reduce_max(tf.concat(list(parts), 0))


def symbolic(x: Tensor) -> bool:
    return not hasattr(x, "numpy")


def concat(parts: Sequence[Tensor], axis: int = 0) -> Tensor:
    return tf.concat(list(parts), axis)


def split(x: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    return tf.split(x, list(sizes))


def stack(parts: Sequence[Tensor], into: Tensor | None = None) -> Tensor:
    return tf.stack(list(parts))


def unstack(x: Tensor) -> list[Tensor]:
    return tf.unstack(x)


def to_bytes(x: Tensor) -> Tensor:
    flat = tf.reshape(x, (-1,))
    return flat if x.dtype == tf.uint8 else tf.reshape(tf.bitcast(flat, tf.uint8), (-1,))


def from_bytes(x: Tensor, dtype: str, shape: Sequence[int]) -> Tensor:
    size = tf.as_dtype(dtype).size
    if size > 1:
        x = tf.reshape(x, (-1, size))
    return tf.reshape(tf.bitcast(x, dtype), tuple(shape))


def accumulate(a: Tensor, b: Tensor) -> Tensor:
    return a + tf.cast(b, a.dtype)


def accumulate_scaled(a: Tensor, factor: float, b: Tensor) -> Tensor:
    return a * factor + tf.cast(b, a.dtype)


def subtract(a: Tensor, b: Tensor) -> Tensor:
    return a - tf.cast(b, a.dtype)


def momentum(m: Tensor, beta: float, x: Tensor) -> Tensor:
    return beta * m + (1 - beta) * tf.cast(x, m.dtype)


def lerp(x: Tensor, beta: float, m: Tensor) -> Tensor:
    return momentum(m, beta, x)


def second_moment(v: Tensor, beta: float, x: Tensor) -> Tensor:
    return beta * v + (1 - beta) * tf.square(tf.cast(x, v.dtype))


def bounded_ratio(m: Tensor, b: Tensor, eps: float = 0.0) -> Tensor:
    return tf.clip_by_value(m / tf.maximum(b + eps, quantization.SMALLEST), -1, 1)


def preconditioned(m: Tensor, v: Tensor, rates: Sequence[Any], eps: float, like: Tensor) -> Tensor:
    return rates[0] * m / (tf.sqrt(rates[1] * v) + eps)


def mask_where_zero(x: Tensor, v: Tensor) -> Tensor:
    return tf.where(v > 0, x, tf.zeros_like(x))


def pad_last(x: Tensor, width: int) -> Tensor:
    return tf.pad(x, [(0, 0)] * (len(x.shape) - 1) + [(0, width - x.shape[-1])])


def swap_leading(x: Tensor) -> Tensor:
    return tf.transpose(x, [1, 0, *range(2, len(x.shape))])


@_compiled
def project(
    error: Tensor, grad: Tensor, p: Tensor, q: Tensor, basis: Tensor, left: bool = False
) -> tuple[Tensor, Tensor]:
    total = accumulate(error - tf.matmul(p, q, transpose_a=True), grad)
    projected = tf.matmul(basis, total, transpose_b=not left)
    bad = too_large(grad)
    return total, tf.where(bad == 0, projected, tf.where(bad > 1, np.nan, np.inf))


@_compiled
def fold(x: Tensor, signs: Tensor) -> Tensor:
    rows, width = signs.shape
    columns, period = width - 2 * FOLDS, width - FOLDS
    x = tf.pad(tf.cast(x, tf.float32), [(0, 0), (0, FOLDS * columns - x.shape[1])])
    # Rows of a vector that repeats, each a column longer than its period, begin one further each.
    windows = tf.tile(signs[:, FOLDS:], [1, FOLDS + 1])[:, : FOLDS * (period + 1)]
    windows = tf.reshape(windows, (rows, FOLDS, period + 1))[:, :, :columns]
    flipped = tf.reshape(x, (rows, FOLDS, columns)) * windows * signs[:, :FOLDS, None]
    return tf.pad(tf.reduce_sum(flipped, 1), [(0, 0), (0, 2 * FOLDS)])


def expand(p: Tensor, q: Tensor, like: Tensor) -> Tensor:
    return _expand(p, q)


@_compiled
def _expand(p: Tensor, q: Tensor) -> Tensor:
    return tf.matmul(p, q, transpose_a=True)


@_compiled
def deflate(error: Tensor, p: Tensor, q: Tensor) -> Tensor:
    return error - tf.matmul(p, q, transpose_a=True)


def zeros_reusing(x: Tensor) -> Tensor:
    return tf.zeros(shape(x), tf.float32)


@_compiled_in_graphs
def clear(x: Tensor, index: Tensor) -> Tensor:
    values = tf.zeros(tf.shape(index), x.dtype)
    return tf.tensor_scatter_nd_update(x, index[:, None], values)


@_compiled_in_graphs
def add_at(x: Tensor, index: Tensor, values: Tensor) -> Tensor:
    return tf.tensor_scatter_nd_add(x, index[:, None], tf.cast(values, x.dtype))


def sum_sparse(index: Sequence[Tensor], values: Sequence[Tensor], like: Tensor) -> Tensor:
    return tf.reshape(_sum_sparse(*index, *values, _size(like)), shape(like))


@_compiled_in_graphs
def _sum_sparse(*given: Any) -> Tensor:
    """Return the sum, given the indices, the values and the size."""
    *parts, size = given
    index, values = parts[: len(parts) // 2], parts[len(parts) // 2 :]
    total = tf.zeros((size,), tf.float32)
    for positions, elements in zip(index, values, strict=True):
        total = tf.tensor_scatter_nd_add(total, positions[:, None], elements)
    return total


def take(x: Tensor, index: Tensor) -> Tensor:
    return tf.gather(x, index)


def sum_at(index: Tensor, values: Tensor, size: int) -> Tensor:
    return tf.math.unsorted_segment_sum(values, index, size)


def finite(x: Tensor) -> Tensor:
    """Return `x` as fp32 with 0 for each non-finite element."""
    values = tf.cast(x, tf.float32)
    return tf.where(tf.math.is_finite(values), values, tf.zeros_like(values))


def secret_uniform(count: int, device: Any = None) -> Tensor:
    return _on_host(oracle.secret_uniform, [count], tf.float32, (count,))


def secret_normal(count: int, sigma: float, dtype: str, device: Any = None) -> Tensor:
    given = [count, sigma, dtype]
    return _on_host(secret.rounded_normal, given, tf.as_dtype(dtype), (count,))


def largest_index(x: Tensor, count: int) -> Tensor:
    """Return the positions of the `count` largest magnitudes of each row: int32, ascending."""
    size = shape(x)[-1]
    count = min(count, size)
    rows = math.prod(shape(x)) // size
    if "GPU" in x.device:
        index = tf.math.top_k(tf.abs(tf.reshape(x, (rows, size))), count, sorted=False).indices
        return tf.sort(tf.reshape(index + size * tf.range(rows)[:, None], (-1,)))
    # 5 to 24 times faster than top_k
    return _on_host(oracle.largest_index, [x, count], tf.int32, (rows * count,))


def accumulate_largest(error: Tensor, grad: Tensor, count: int) -> tuple[Tensor, Tensor]:
    total = accumulate(error, grad)
    return total, largest_index(total, count)


def accumulate_reaching(error: Tensor, grad: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    """Return error + grad and the positions where |error + grad| >= limit; not in a graph."""
    return _accumulated(oracle.accumulate_reaching, error, grad, limit)


def accumulate_outgrown(error: Tensor, grad: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return error + grad, the positions that AdaComp selects, and the scale of each row.

    Not in a graph; see `accordion_hvd.ops.selection`.
    """
    return _accumulated(oracle.accumulate_outgrown, error, grad, width)


def _accumulated(select: Callable[..., Any], error: Tensor, grad: Tensor, bound: float) -> Any:
    with journal.recording([]):  # a copy needs no undo
        results = select(np.array(to_numpy(error)), to_numpy(grad), bound)
    return tuple(map(tf.convert_to_tensor, results))


def largest_of_bins(x: Tensor, width: int) -> Tensor:
    size = shape(x)[-1]
    count = math.prod(shape(x)) // size * -(-size // width)
    return _on_host(oracle.largest_of_bins, [x, width], tf.int32, (count,))


def largest_of_chunks(x: Tensor, chunks: int, count: int) -> Tensor:
    rows = _size(x) // shape(x)[-1]
    given = [x, chunks, count]
    return _on_host(oracle.largest_of_chunks, given, tf.int32, (rows, count, chunks))


def index_of_chunks(place: Tensor, size: int) -> tuple[Tensor, Tensor]:
    *lead, rows, _, chunks = shape(place)
    place = tf.minimum(place, -(-size // chunks))
    index = place * chunks + tf.range(chunks)
    falling = place[..., 1:, :] <= place[..., :-1, :]
    wrong = [tf.reshape(x, (*lead, -1)) for x in (index >= size, falling)]
    flags = tf.cast(tf.reduce_any(tf.concat(wrong, -1), -1), tf.float32)
    index = tf.minimum(index, size - 1) + tf.range(rows)[:, None, None] * size
    return tf.reshape(index, (*lead, -1)), tf.reshape(flags, (-1,))


def pack_bins(index: Tensor, signs: Tensor, shape: Sequence[int], width: int) -> Tensor:
    """Pack positions in bins, and signs, into one or two bytes each; not in a graph."""
    return tf.convert_to_tensor(oracle.pack_bins(to_numpy(index), to_numpy(signs), shape, width))


def unpack_bins(packed: Tensor, shape: Sequence[int], width: int) -> tuple[Tensor, Tensor]:
    """Invert `pack_bins`; not in a graph."""
    return tuple(map(tf.convert_to_tensor, indices.unpack_bins(to_numpy(packed), shape, width)))


def pack_index(index: Tensor, size: int) -> Tensor:
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
    """Invert `pack_index`, in `packed` or in each row of it."""
    if len(packed.shape) == 2:
        return tf.stack([unpack_index(row, count, size) for row in tf.unstack(packed)])
    low = indices.low_bytes(count, size)
    if low == 4:
        return from_bytes(packed, "int32", (count,))
    tail = from_bytes(packed[: low * count], f"uint{8 * low}", (count,))
    bitmap = tf.cast(packed[low * count :], tf.int32)[:, None]
    bits = tf.bitwise.bitwise_and(tf.bitwise.right_shift(bitmap, tf.range(8)), 1)
    places = tf.cast(tf.where(tf.reshape(bits, (-1,)) > 0)[:, 0], tf.int32)
    complete = tf.equal(tf.shape(places)[0], count)
    places = tf.concat([places, tf.zeros((count,), tf.int32)], 0)[:count]
    index = tf.bitwise.left_shift(places - tf.range(count), 8 * low) + tf.cast(tail, tf.int32)
    return tf.where(complete, index, -1)  # an index of -1 fails `invalid_index`


def invalid_index(index: Tensor, size: int) -> Tensor:
    if len(index.shape) == 2:
        return tf.concat([invalid_index(row, size) for row in tf.unstack(index)], 0)
    outside = tf.reduce_any(index[:1] < 0) | tf.reduce_any(index[-1:] >= size)
    return tf.reshape(tf.cast(outside | tf.reduce_any(index[1:] <= index[:-1]), tf.float32), (1,))


def raise_on_invalid(x: Any, doubts: Tensor, senders: Sequence[Any]) -> Any:
    if not symbolic(doubts):
        return oracle.raise_on_invalid(x, doubts.numpy(), senders)
    invalid = tf.not_equal(doubts, 0)
    ranks = tf.boolean_mask(tf.stack([tf.cast(rank, tf.int64) for rank in senders]), invalid)
    valid = tf.logical_not(tf.reduce_any(invalid))
    check_valid = tf.debugging.Assert(valid, ["a payload does not decode; sent by ranks", ranks])
    with tf.control_dependencies([check_valid]):
        return tf.nest.map_structure(tf.identity, x)


def sketch(x: Tensor, codes: Tensor, columns: int) -> Tensor:
    x, rows = tf.cast(x, tf.float32), shape(codes)[0]
    if "GPU" in x.device:
        return _sketch(x, codes, columns)
    return _on_host(oracle.sketch, [x, codes, columns], tf.float32, (rows, columns))


def _sketch(x: Tensor, codes: Tensor, columns: int) -> Tensor:
    moved = [count_sketch.moved(x, row, columns) for row in tf.unstack(codes)]
    return tf.stack([tf.reduce_sum(row, 0) for row in moved])


def unsketch(table: Tensor, codes: Tensor, like: Tensor) -> Tensor:
    if "GPU" in table.device:
        return _unsketch(table, codes, like)
    return _on_host(oracle.unsketch, [table, codes, _scratch(like)], tf.float32, shape(like))


def _unsketch(table: Tensor, codes: Tensor, like: Tensor) -> Tensor:
    pairs = zip(tf.unstack(table), tf.unstack(codes), strict=True)
    estimates = tf.stack([count_sketch.found(*pair, _size(like)) for pair in pairs])
    return tf.sort(estimates, 0)[shape(table)[0] // 2]


def argsort(x: Tensor) -> Tensor:
    return tf.argsort(x, stable=True)


def frames(x: Tensor, width: int, step: int) -> Tensor:
    return tf.signal.frame(x, width, step)


def overlap_add(x: Tensor, step: int) -> Tensor:
    return tf.signal.overlap_and_add(x, step)


def orthogonalize(p: Tensor) -> Tensor:
    q, r = tf.linalg.qr(transpose(p))
    signs = tf.where(tf.linalg.diag_part(r) < 0, -1.0, 1.0)
    return transpose(q * tf.cast(signs, q.dtype)[..., None, :])


def norm(x: Tensor) -> Tensor:
    return tf.cast(tf.norm(tf.cast(x, tf.float64)), tf.float32)


def row_norms(x: Tensor) -> Tensor:
    rows = x[..., None, :]
    return tf.sqrt(tf.matmul(rows, rows, transpose_b=True))[..., 0]  # reads x once, writes nothing


def power_below(x: Tensor) -> Tensor:
    bits = tf.bitwise.bitwise_and(tf.bitcast(x, tf.int32), 0x7F800000)
    return tf.bitcast(bits, tf.float32)


def inner_products(a: Tensor, b: Tensor) -> Tensor:
    return tf.reduce_sum(a * b, axis=1)


def nonfinite(x: Tensor) -> Tensor:
    wide = tf.float64 if x.dtype == tf.float64 else tf.float32

    def one_by_one() -> Tensor:
        broken = tf.where(tf.reduce_any(tf.math.is_nan(x)), BROKEN, 1.0)
        return tf.where(tf.reduce_all(tf.math.is_finite(x)), 0.0, broken)

    finite = tf.math.is_finite(tf.reduce_sum(tf.cast(x, wide)))
    return tf.reshape(tf.cond(finite, lambda: tf.constant(0.0), one_by_one), (1,))


def too_large(x: Tensor) -> Tensor:
    wide = tf.cast(x, tf.float64 if x.dtype == tf.float64 else tf.float32)
    fits = tf.reduce_sum(tf.square(wide)) < LARGEST**2
    flag = tf.cond(  # graphs turn "not NaN < x" into "NaN >= x"
        fits,
        lambda: tf.constant(0.0),
        lambda: tf.where(tf.reduce_all(tf.math.is_finite(x)), 1.0, BROKEN),
    )
    return tf.reshape(flag, (1,))


def zero_if_bad(x: Tensor, bad: Tensor) -> Tensor:
    return tf.cond(tf.equal(bad[0], 0), lambda: tf.identity(x), lambda: tf.zeros_like(x))


def where(condition: Any, first: Tensor, second: Tensor) -> Tensor:
    return tf.cond(condition, lambda: tf.identity(first), lambda: tf.identity(second))


def exceeds(flags: Tensor, limit: float) -> Any:
    found = tf.reduce_any(flags > limit)
    return bool(found) if tf.executing_eagerly() else found


def filled_if(condition: Any, value: Any, x: Tensor) -> Tensor:
    return tf.cond(condition, lambda: filled(x, value), lambda: tf.identity(x))


def filled(x: Tensor, value: Any) -> Tensor:
    return tf.fill(tf.shape(x), tf.cast(value, x.dtype))


def to_wire(parts: Sequence[Tensor], wire: str, count: int, into: Tensor | None = None) -> Tensor:
    flat = [tf.cast(tf.reshape(part, (-1,)), wire) for part in parts]
    missing = count - sum(math.prod(shape(part)) for part in parts)
    return to_bytes(tf.concat([*flat, tf.zeros((missing,), wire)], 0))


def mean_of_wire(x: Tensor, wire: str, ranks: int) -> Tensor:
    parts = tf.unstack(from_bytes(x, wire, (ranks, -1)), ranks)
    total = tf.cast(parts[0], tf.float32)
    for part in parts[1:]:
        total += tf.cast(part, tf.float32)
    return to_bytes(tf.cast(total / ranks, wire))


def from_wire(x: Tensor, wire: str, likes: Sequence[Tensor]) -> list[Tensor]:
    sizes = [math.prod(shape(like)) for like in likes]
    flat = from_bytes(x, wire, (-1,))[: sum(sizes)]
    pieces = zip(tf.split(flat, sizes), likes, strict=True)
    return [tf.cast(tf.reshape(piece, shape(like)), like.dtype) for piece, like in pieces]


def checksum(x: Tensor) -> Tensor:
    bits = tf.bitcast(x, f"int{8 * x.dtype.size}")
    return tf.reduce_sum(tf.cast(bits, tf.int64))


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    size = quantization.packed_length(_size(codes), bits)
    return _on_host(oracle.pack_bits, [codes, bits], tf.uint8, (size,))


def unpack_bits(packed: Tensor, bits: int, count: int) -> Tensor:
    return _on_host(oracle.unpack_bits, [packed, bits, count], tf.uint8, (count,))


def bucket_norms(x: Tensor, bucket: int, kind: str) -> Tensor:
    return _on_host(oracle.bucket_norms, [x, bucket, kind], tf.float32, (-(-_size(x) // bucket),))


def quantize(x: Tensor, steps: Tensor, bucket: int, bits: int, seed: Any = None) -> Tensor:
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
    given = [parts, steps, bucket, bits, middle, _scratch(like)]
    return _on_host(oracle.sum_quantized, given, tf.float32, shape(like))


def subtract_quantized(
    total: Tensor, packed: Tensor, steps: Tensor, bucket: int, bits: int, middle: float
) -> Tensor:
    run = lambda x, *sent: oracle.subtract_quantized(x.copy(), *sent)  # noqa: E731
    return _on_host(run, [total, packed, steps, bucket, bits, middle], tf.float32, shape(total))


def pack_signs(x: Tensor, turn: Any = None) -> Tensor:
    return _on_host(oracle.pack_signs, [x, turn], tf.uint8, (-(-_size(x) // 8),))


def pack_random_signs(x: Tensor, seed: Any) -> Tensor:
    return _on_host(oracle.pack_random_signs, [x, seed], tf.uint8, (-(-_size(x) // 8),))


def pack_powers(x: Tensor, seed: Any) -> Tensor:
    length = -(-_size(x) // 8) + _size(x)
    return _on_host(oracle.pack_powers, [x, seed], tf.uint8, (length,))


def sum_powers(parts: Sequence[Tensor], weight: float, like: Tensor) -> Tensor:
    return _on_host(oracle.sum_powers, [parts, weight, _scratch(like)], tf.float32, shape(like))


def narrow(x: Tensor, names: Sequence[str], seed: Any) -> Tensor:
    return _on_host(oracle.narrow, [x, names, seed], tf.int16, shape(x))


def widen(words: Tensor) -> Tensor:
    return tf.cast(tf.bitcast(words, tf.bfloat16), tf.float32)


def column_means(x: Tensor, packed: Tensor) -> Tensor:
    *front, _, m = shape(x)
    return _on_host(oracle.column_means, [x, packed], tf.float32, (*front, 2, m))


def sum_columns(parts: Sequence[Tensor], means: Sequence[Tensor], like: Tensor) -> Tensor:
    return _on_host(oracle.sum_columns, [parts, means, _scratch(like)], tf.float32, shape(like))


def subtract_columns(total: Tensor, packed: Tensor, means: Tensor) -> Tensor:
    run = lambda x, *sent: oracle.subtract_columns(x.copy(), *sent)  # noqa: E731
    return _on_host(run, [total, packed, means], tf.float32, shape(total))


def clip(x: Tensor, limit: Tensor) -> Tensor:
    return tf.maximum(tf.minimum(x, limit), -limit)


def _on_host(
    function: Callable[..., Any], given: Sequence[Any], dtype: tf.DType, shape: Sequence[int]
) -> Tensor:
    """Return NumPy's result of `function` on `given`, also in a graph.

    `function` receives the values of tensors (and of lists of tensors). Integer scalars arrive as
    Python integers, a `_scratch` as newly allocated memory, and other arguments unchanged.
    """
    # copies, since callers may change their lists before the graph runs
    given = [list(x) if isinstance(x, (list, tuple)) else x for x in given]
    parts = [x if isinstance(x, list) else [x] for x in given]
    tensors = [x for part in parts for x in part if tf.is_tensor(x)]
    # NumPy has no bfloat16
    tensors = [tf.cast(x, tf.float32) if x.dtype == tf.bfloat16 else x for x in tensors]

    def run(*values: np.ndarray) -> Any:
        remaining = iter(values)
        return function(*(_argument(x, remaining) for x in given))

    return tf.ensure_shape(tf.numpy_function(run, tensors, dtype), tuple(shape))


def _argument(x: Any, values: Iterator[np.ndarray]) -> Any:
    """Return the argument that stands for `x`; each tensor takes the next of `values`."""
    if isinstance(x, list):
        return [_argument(part, values) for part in x]
    if isinstance(x, tf.TensorSpec):
        return np.empty(x.shape, np.float32)
    if not tf.is_tensor(x):
        return x
    value = next(values)
    return int(value) if value.ndim == 0 and value.dtype.kind == "i" else value


def _scratch(like: Tensor) -> tf.TensorSpec:
    return tf.TensorSpec(like.shape, tf.float32)


def _size(x: Tensor) -> int:
    return math.prod(shape(x))
