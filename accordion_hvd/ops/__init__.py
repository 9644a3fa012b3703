"""Tensor operations with the same names and signatures for NumPy, PyTorch and TensorFlow.

`namespace(x)` selects the module by the tensor's type, so several frameworks can be used in one
process, and this module imports none of them. NumPy is the reference: tests compare the results of
the other frameworks with it.

An operation that *consumes* an argument may write its result into that argument's memory; the
caller must not use the argument again. Within `journal.recording()` the operation records how to
undo the change. An operation that consumes an argument *irreversibly* records no undo: call it on
state only after the first `yield` of an exchange generator.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

_MODULES = {"numpy": "numpy", "torch": "torch", "tensorflow": "tensorflow", "keras": "tensorflow"}
_by_type: dict[type, ModuleType] = {}


def namespace(tensor: Any) -> ModuleType:
    """Return the module of operations for the type of `tensor`.

    Raises:
        TypeError: if `tensor` is not a NumPy array, PyTorch tensor or TensorFlow tensor.
    """
    kind = type(tensor)
    if kind not in _by_type:
        _by_type[kind] = backend(_owner(tensor))
    return _by_type[kind]


def backend(name: str) -> ModuleType:
    """Return the operations of a framework: "numpy", "torch" or "tensorflow"."""
    return importlib.import_module(f"accordion_hvd.ops.{name}")


def on_cpu(device: Any) -> bool:
    """Return whether a tensor's device, as its framework describes it, is a CPU."""
    return "cpu" in str(device or "cpu").lower()


def _owner(tensor: Any) -> str:
    for ancestor in type(tensor).__mro__:
        root = ancestor.__module__.partition(".")[0]
        if root in _MODULES and root in sys.modules:
            return _MODULES[root]
    raise TypeError(
        f"{type(tensor).__name__} is not a tensor that accordion_hvd supports; "
        "allowed are numpy.ndarray, torch.Tensor and tf.Tensor"
    )
