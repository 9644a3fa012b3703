"""Properties of a tensor without its values."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from accordion_hvd.ops.random import normal

Tensor = Any
"""A tensor of NumPy, PyTorch or TensorFlow."""

ITEMSIZE = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "bool": 1}
"""Bytes per element for each dtype."""
ITEMSIZE |= {f"{sign}int{bits}": bits // 8 for bits in (8, 16, 32, 64) for sign in ("", "u")}

LARGEST = 1e15
"""Norm from which on a gradient is not exchanged: products of states would overflow in fp32."""

BROKEN = 2.0**60
"""Flag of a gradient that is not finite; more than the sum of the flags, 1, of large ones."""

FOLDS = 64
"""Number of blocks of a vector that `fold` adds."""


@dataclass(frozen=True)
class Spec:
    """Properties of a tensor without its values; argument of `Compressor.init`.

    Attributes:
        shape: shape of the gradient.
        dtype: name of the gradient's dtype. State is fp32, whatever this dtype is.
        xp: module of operations for the gradient (`accordion_hvd.ops`).
        device: device of the gradient, as its framework describes it.
    """

    shape: tuple[int, ...]
    dtype: str
    xp: ModuleType
    device: Any = None

    @property
    def size(self) -> int:
        """Return the number of elements."""
        return math.prod(self.shape)

    @property
    def wide(self) -> str:
        """Return the dtype of high-precision state: fp64 for fp64, else fp32."""
        return "float64" if self.dtype == "float64" else "float32"

    def zeros(self, shape: tuple[int, ...], dtype: str = "float32") -> Tensor:
        """Return a tensor of zeros on the gradient's device."""
        return self.xp.zeros(shape, dtype, self.device)

    def normal(self, shape: tuple[int, ...], seed: str) -> Tensor:
        """Return standard normal fp32 values that depend only on `seed`.

        The values are equal on all ranks and in all frameworks.
        """
        return self.xp.asarray(normal(shape, seed), self.device)
