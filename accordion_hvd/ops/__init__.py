"""One set of tensor operations, the same names and signatures for NumPy, PyTorch and TensorFlow.

`namespace(x)` picks the module by the tensor's type, so several frameworks live in one process and
none is imported here. NumPy is the oracle: what the others return is compared with it.

Operations that say *consumes* may write their result into their first argument, which must not be
used again. Between `journal.recording()` they note how to be undone.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

_MODULES = {"numpy": "numpy", "torch": "torch", "tensorflow": "tensorflow", "keras": "tensorflow"}
_by_type: dict[type, ModuleType] = {}


def namespace(tensor: Any) -> ModuleType:
    """Return the operations that serve `tensor`.

    Raises:
        TypeError: `tensor` is no NumPy array, PyTorch tensor or TensorFlow tensor.
    """
    kind = type(tensor)
    if kind not in _by_type:
        _by_type[kind] = backend(_owner(tensor))
    return _by_type[kind]


def backend(name: str) -> ModuleType:
    """Return the operations for a framework: "numpy", "torch" or "tensorflow"."""
    return importlib.import_module(f"accordion_hvd.ops.{name}")


def _owner(tensor: Any) -> str:
    for ancestor in type(tensor).__mro__:
        root = ancestor.__module__.partition(".")[0]
        if root in _MODULES and root in sys.modules:
            return _MODULES[root]
    raise TypeError(
        f"{type(tensor).__name__} is not a tensor that accordion_hvd knows; "
        "allowed are numpy.ndarray, torch.Tensor and tf.Tensor"
    )
