"""PyTorch, on the CPU and on GPUs. Signatures and meaning as in `accordion_hvd.ops.numpy`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from accordion_hvd.base import Spec
from accordion_hvd.ops import journal
from accordion_hvd.ops.selection import largest

Tensor: TypeAlias = torch.Tensor


def spec(x: Tensor) -> Spec:
    """Shape, dtype and device of `x`."""
    import accordion_hvd.ops.torch as xp

    return Spec(tuple(x.shape), dtype(x), xp, x.device)


def shape(x: Tensor) -> tuple[int, ...]:
    """The static shape."""
    return tuple(x.shape)


def dtype(x: Tensor) -> str:
    """The dtype by name."""
    return str(x.dtype).removeprefix("torch.")


def device(x: Tensor) -> Any:
    """Where `x` lives, as `zeros` and `arange` take it."""
    return x.device


def zeros(shape: Sequence[int], dtype: str, device: Any = None) -> Tensor:
    """A new tensor of zeros."""
    return torch.zeros(tuple(shape), dtype=getattr(torch, dtype), device=device)


def full(shape: Sequence[int], value: float, dtype: str, device: Any = None) -> Tensor:
    """A new tensor filled with `value`."""
    return torch.full(tuple(shape), value, dtype=getattr(torch, dtype), device=device)


def arange(count: int, device: Any = None) -> Tensor:
    """0, 1, ..., count - 1 as int64."""
    return torch.arange(count, dtype=torch.int64, device=device)


def asarray(x: np.ndarray, device: Any = None) -> Tensor:
    """A NumPy array as a tensor of this framework."""
    return torch.tensor(x, device=device)


def to_numpy(x: Tensor) -> np.ndarray:
    """The tensor as a NumPy array on the host (may share memory)."""
    x = x.detach()
    return (x.float() if x.dtype == torch.bfloat16 else x).cpu().numpy()


def cast(x: Tensor, dtype: str) -> Tensor:
    """The tensor in another dtype; itself if it has it already."""
    return x.to(getattr(torch, dtype))


def copy(x: Tensor) -> Tensor:
    """The same values in memory of its own."""
    return x.detach().clone(memory_format=torch.contiguous_format)


def reshape(x: Tensor, shape: Sequence[int]) -> Tensor:
    """The same elements in another shape (a view where possible)."""
    return x.reshape(tuple(shape))


def transpose(x: Tensor) -> Tensor:
    """The transpose of a matrix (a view where possible)."""
    return x.t()


def minimum(a: Tensor, b: Tensor) -> Tensor:
    """The element-wise smaller."""
    return torch.minimum(a, b)


def maximum(a: Tensor, b: Tensor) -> Tensor:
    """The element-wise larger."""
    return torch.maximum(a, b)


def maximum_of(parts: Sequence[Tensor]) -> Tensor:
    """The largest element of several vectors, as a scalar tensor."""
    return torch.cat(list(parts)).max()


def symbolic(x: Tensor) -> bool:
    """Whether `x` has no value yet (in a graph)."""
    return False


def concat(parts: Sequence[Tensor]) -> Tensor:
    """Vectors one after the other."""
    return torch.cat(list(parts))


def split(x: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """The inverse of `concat`."""
    return list(torch.split(x, list(sizes)))


def stack(parts: Sequence[Tensor]) -> Tensor:
    """Equal tensors along a new first dimension."""
    return torch.stack(list(parts))


def to_bytes(x: Tensor) -> Tensor:
    """The memory of `x` as a vector of uint8."""
    return x.contiguous().reshape(-1).view(torch.uint8)


def from_bytes(x: Tensor, dtype: str, shape: Sequence[int]) -> Tensor:
    """The inverse of `to_bytes`; one extent of `shape` may be -1."""
    kind = getattr(torch, dtype)
    if x.storage_offset() % kind.itemsize:
        x = x.clone()  # a view of another dtype must start at a whole element
    return x.view(kind).reshape(tuple(shape))


def accumulate(a: Tensor, b: Tensor) -> Tensor:
    """a + b in a's dtype. Consumes `a`."""
    journal.record(lambda: a.sub_(b))
    return a.add_(b)


def subtract(a: Tensor, b: Tensor) -> Tensor:
    """a - b in a's dtype. Consumes `a`."""
    journal.record(lambda: a.add_(b))
    return a.sub_(b)


def clear(x: Tensor, index: Tensor) -> Tensor:
    """The vector `x` with zeros at `index`. Consumes `x`."""
    taken = x[index]
    journal.record(lambda: x.index_copy_(0, index.long(), taken))
    return x.index_fill_(0, index.long(), 0)


def add_at(x: Tensor, index: Tensor, values: Tensor) -> Tensor:
    """The vector `x` with `values` added at `index` (no index twice). Consumes `x`."""
    journal.record(lambda: x.index_add_(0, index, values, alpha=-1))
    return x.index_add_(0, index, values)


def take(x: Tensor, index: Tensor) -> Tensor:
    """The elements of the vector `x` at `index`."""
    return torch.index_select(x, 0, index)


def largest_index(x: Tensor, count: int) -> Tensor:
    """Where the `count` largest magnitudes of the vector `x` are: int32, ascending; exact."""
    if x.device.type == "cpu" and x.dtype == torch.float32:  # 20 times faster than torch.topk
        return torch.from_numpy(largest(x.detach().numpy(), count))
    index = torch.topk(x.abs(), min(count, x.numel()), sorted=False).indices
    return index.sort().values.int()


def orthogonalize(p: Tensor) -> Tensor:
    """Orthonormal rows that span those of `p` (r, n), r <= n; see `accordion_hvd.ops.numpy`."""
    q, r = torch.linalg.qr(p.t())
    signs = torch.where(r.diagonal() < 0, -1.0, 1.0).to(q.dtype)
    return (q * signs).t()


def norm(x: Tensor) -> Tensor:
    """The 2-norm of all elements, as an fp32 scalar tensor; does not wait for a GPU."""
    return torch.linalg.vector_norm(x, dtype=torch.float64).float()


def badness(x: Tensor) -> Tensor:
    """A vector with one fp32 element: 0 if all elements are finite, else 1 (one pass, no copy)."""
    return (~torch.isfinite(x.sum(dtype=torch.float32))).float().reshape(1)


def without_bad(x: Tensor, bad: Tensor) -> Tensor:
    """`x`, or zeros where `bad` (from `badness`) says that it is not finite."""
    if bad.device.type == "cpu":
        return torch.zeros_like(x) if bool(bad != 0) else x
    return torch.where(bad == 0, x, torch.zeros((), dtype=x.dtype, device=x.device))


def either(bad: Any, first: Tensor, second: Tensor) -> Tensor:
    """`first` if `bad` (from `is_bad`), else `second`."""
    return first if bad else second


def is_bad(flags: Tensor) -> Any:
    """Whether any element is not 0: a bool, or a symbolic scalar in a graph."""
    return bool((flags != 0).any())


def nans_like(x: Tensor) -> Tensor:
    """NaN in the shape and dtype of `x`."""
    return torch.full_like(x, float("nan"))


def wire_bytes(x: Tensor, wire: str) -> Tensor:
    """Floating-point `x`, rounded to dtype `wire`, as a vector of bytes."""
    return to_bytes(x.to(getattr(torch, wire)))


def from_wire(x: Tensor, wire: str, shape: Sequence[int]) -> Tensor:
    """The inverse of `wire_bytes`, as fp32."""
    return from_bytes(x, wire, shape).float()


def checksum(x: Tensor) -> Tensor:
    """The sum of the bits of all elements, as integers: an int64 scalar tensor."""
    bits = x.detach().contiguous().view(getattr(torch, f"int{8 * x.element_size()}"))
    return bits.sum(dtype=torch.int64)
