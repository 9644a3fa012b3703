"""TensorFlow, eagerly and in graphs. Signatures and meaning as in `accordion_hvd.ops.numpy`.

TensorFlow's tensors cannot be written in place: what consumes elsewhere makes a new tensor here,
and nothing needs to be undone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from accordion_hvd.base import Spec, Tensor
from accordion_hvd.ops import indices
from accordion_hvd.ops.selection import largest


class UntraceableError(TypeError):
    """A value is wanted within a graph, where there are none yet."""


def spec(x: Tensor) -> Spec:
    """Shape, dtype and device of `x`."""
    import accordion_hvd.ops.tensorflow as xp

    return Spec(shape(x), dtype(x), xp)


def shape(x: Tensor) -> tuple[int, ...]:
    """The static shape."""
    return tuple(x.shape.as_list())


def dtype(x: Tensor) -> str:
    """The dtype by name."""
    return tf.as_dtype(x.dtype).name


def device(x: Tensor) -> Any:
    """Where `x` lives, as `zeros` and `arange` take it."""
    return None


def zeros(shape: Sequence[int], dtype: str, device: Any = None) -> Tensor:
    """A new tensor of zeros."""
    return tf.zeros(tuple(shape), dtype)


def full(shape: Sequence[int], value: float, dtype: str, device: Any = None) -> Tensor:
    """A new tensor filled with `value`."""
    return tf.fill(tuple(shape), tf.constant(value, dtype))


def arange(count: int, device: Any = None) -> Tensor:
    """0, 1, ..., count - 1 as int64."""
    return tf.range(count, dtype=tf.int64)


def asarray(x: np.ndarray, device: Any = None) -> Tensor:
    """A NumPy array as a tensor of this framework."""
    return tf.convert_to_tensor(x)


def to_numpy(x: Tensor) -> np.ndarray:
    """The tensor as a NumPy array on the host (may share memory); not in a graph."""
    if symbolic(x):
        raise UntraceableError(
            "a value is wanted within a graph; this conversation runs eagerly only"
        )
    return (tf.cast(x, tf.float32) if x.dtype == tf.bfloat16 else tf.convert_to_tensor(x)).numpy()


def cast(x: Tensor, dtype: str) -> Tensor:
    """The tensor in another dtype; itself if it has it already."""
    return tf.cast(x, dtype)


def copy(x: Tensor) -> Tensor:
    """The same values in memory of its own."""
    return tf.identity(x)


def reshape(x: Tensor, shape: Sequence[int]) -> Tensor:
    """The same elements in another shape (a view where possible)."""
    return tf.reshape(x, tuple(shape))


def transpose(x: Tensor) -> Tensor:
    """The transpose of a matrix, or of each of several."""
    return tf.linalg.matrix_transpose(x)


def minimum(a: Tensor, b: Tensor) -> Tensor:
    """The element-wise smaller."""
    return tf.minimum(a, b)


def maximum(a: Tensor, b: Tensor) -> Tensor:
    """The element-wise larger."""
    return tf.maximum(a, b)


def maximum_of(parts: Sequence[Tensor]) -> Tensor:
    """The largest element of several vectors, as a scalar tensor."""
    return tf.reduce_max(tf.concat(list(parts), 0))


def symbolic(x: Tensor) -> bool:
    """Whether `x` has no value yet (in a graph)."""
    return not hasattr(x, "numpy")


def concat(parts: Sequence[Tensor]) -> Tensor:
    """Vectors one after the other."""
    return tf.concat(list(parts), 0)


def split(x: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """The inverse of `concat`."""
    return tf.split(x, list(sizes))


def stack(parts: Sequence[Tensor], into: Tensor | None = None) -> Tensor:
    """Equal tensors along a new first dimension."""
    return tf.stack(list(parts))


def unstack(x: Tensor) -> list[Tensor]:
    """The inverse of `stack`."""
    return tf.unstack(x)


def to_bytes(x: Tensor) -> Tensor:
    """The memory of `x` as a vector of uint8."""
    flat = tf.reshape(x, (-1,))
    return flat if x.dtype == tf.uint8 else tf.reshape(tf.bitcast(flat, tf.uint8), (-1,))


def from_bytes(x: Tensor, dtype: str, shape: Sequence[int]) -> Tensor:
    """The inverse of `to_bytes`; one extent of `shape` may be -1."""
    size = tf.as_dtype(dtype).size
    if size > 1:
        x = tf.reshape(x, (-1, size))
    return tf.reshape(tf.bitcast(x, dtype), tuple(shape))


def accumulate(a: Tensor, b: Tensor) -> Tensor:
    """a + b in a's dtype."""
    return a + tf.cast(b, a.dtype)


def subtract(a: Tensor, b: Tensor) -> Tensor:
    """a - b in a's dtype."""
    return a - tf.cast(b, a.dtype)


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


def emptied(x: Tensor) -> Tensor:
    """Zeros, fp32, in the shape of `x`."""
    return tf.zeros(shape(x), tf.float32)


def clear(x: Tensor, index: Tensor) -> Tensor:
    """The vector `x` with zeros at `index`."""
    values = tf.zeros(tf.shape(index), x.dtype)
    return tf.tensor_scatter_nd_update(x, index[:, None], values)


def add_at(x: Tensor, index: Tensor, values: Tensor) -> Tensor:
    """The vector `x` with `values` added at `index` (no index twice)."""
    return tf.tensor_scatter_nd_add(x, index[:, None], tf.cast(values, x.dtype))


def take(x: Tensor, index: Tensor) -> Tensor:
    """The elements of the vector `x` at `index`."""
    return tf.gather(x, index)


def largest_index(x: Tensor, count: int) -> Tensor:
    """Where the `count` largest magnitudes of each row of `x` are: int32, ascending; exact."""
    size = shape(x)[-1]
    count = min(count, size)
    rows = math.prod(shape(x)) // size
    if "GPU" in x.device:
        index = tf.math.top_k(tf.abs(tf.reshape(x, (rows, size))), count, sorted=False).indices
        return tf.sort(tf.reshape(index + size * tf.range(rows)[:, None], (-1,)))
    index = tf.numpy_function(lambda values: largest(values, count), [x], tf.int32)
    return tf.ensure_shape(index, (rows * count,))  # 5 to 24 times faster than top_k


def accumulate_largest(error: Tensor, grad: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """error + grad, and `largest_index` of it."""
    total = accumulate(error, grad)
    return total, largest_index(total, count)


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
    """The inverse of `pack_index`."""
    low = indices.low_bytes(count, size)
    if low == 4:
        return from_bytes(packed, "int32", (count,))
    tail = from_bytes(packed[: low * count], f"uint{8 * low}", (count,))
    bitmap = tf.cast(packed[low * count :], tf.int32)[:, None]
    bits = tf.bitwise.bitwise_and(tf.bitwise.right_shift(bitmap, tf.range(8)), 1)
    places = tf.cast(tf.where(tf.reshape(bits, (-1,)) > 0)[:, 0], tf.int32)
    high = tf.ensure_shape(places, (count,)) - tf.range(count)
    return tf.bitwise.left_shift(high, 8 * low) + tf.cast(tail, tf.int32)


def argsort(x: Tensor) -> Tensor:
    """Positions of the elements of a vector in ascending order, int32; stable."""
    return tf.argsort(x, stable=True)


def frames(x: Tensor, width: int, step: int) -> Tensor:
    """Pieces of each row of `x`; see `accordion_hvd.ops.numpy`."""
    return tf.signal.frame(x, width, step)


def overlap_add(x: Tensor, step: int) -> Tensor:
    """The adjoint of `frames`; see `accordion_hvd.ops.numpy`."""
    return tf.signal.overlap_and_add(x, step)


def orthogonalize(p: Tensor) -> Tensor:
    """Orthonormal rows that span those of `p` (r, n), r <= n; see `accordion_hvd.ops.numpy`."""
    q, r = tf.linalg.qr(transpose(p))
    signs = tf.where(tf.linalg.diag_part(r) < 0, -1.0, 1.0)
    return transpose(q * tf.cast(signs, q.dtype)[..., None, :])


def norm(x: Tensor) -> Tensor:
    """The 2-norm of all elements, as an fp32 scalar tensor."""
    return tf.cast(tf.norm(tf.cast(x, tf.float64)), tf.float32)


def badness(x: Tensor) -> Tensor:
    """A vector with one fp32 element: 0 if all elements are finite, else 1."""
    total = tf.reduce_sum(tf.cast(x, tf.float32))
    return tf.reshape(tf.cast(tf.logical_not(tf.math.is_finite(total)), tf.float32), (1,))


def without_bad(x: Tensor, bad: Tensor) -> Tensor:
    """`x`, or zeros where `bad` (from `badness`) says that it is not finite."""
    return tf.cond(tf.equal(bad[0], 0), lambda: tf.identity(x), lambda: tf.zeros_like(x))


def either(bad: Any, first: Tensor, second: Tensor) -> Tensor:
    """`first` if `bad` (from `is_bad`), else `second`."""
    return tf.cond(bad, lambda: tf.identity(first), lambda: tf.identity(second))


def is_bad(flags: Tensor) -> Any:
    """Whether any element is not 0: a bool, or a symbolic scalar in a graph."""
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
    """The mean of `ranks` equal parts of bytes from `to_wire`, as such bytes; added in fp32."""
    parts = tf.unstack(from_bytes(x, wire, (ranks, -1)), ranks)
    total = tf.cast(parts[0], tf.float32)
    for part in parts[1:]:
        total += tf.cast(part, tf.float32)
    return to_bytes(tf.cast(total / ranks, wire))


def from_wire(x: Tensor, wire: str, likes: Sequence[Tensor]) -> list[Tensor]:
    """The inverse of `to_wire`, in the shapes and dtypes of `likes`."""
    sizes = [math.prod(shape(like)) for like in likes]
    flat = from_bytes(x, wire, (-1,))[: sum(sizes)]
    pieces = zip(tf.split(flat, sizes), likes, strict=True)
    return [tf.cast(tf.reshape(piece, shape(like)), like.dtype) for piece, like in pieces]


def checksum(x: Tensor) -> Tensor:
    """The sum of the bits of all elements, as integers: an int64 scalar tensor."""
    bits = tf.bitcast(x, f"int{8 * x.dtype.size}")
    return tf.reduce_sum(tf.cast(bits, tf.int64))
