"""Deprecated names of attributes, which still work and warn with their new names."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any

OPERATIONS = {
    "badness": "nonfinite",
    "either": "where",
    "emptied": "zeros_reusing",
    "insist": "raise_on_invalid",
    "is_bad": "is_nonfinite",
    "masked": "mask_where_zero",
    "misplaced": "invalid_index",
    "mixed": "lerp",
    "padded": "pad_last",
    "swapped": "swap_leading",
    "without_bad": "zero_if_nonfinite",
}
"""Old names of operations in `accordion_hvd.ops`, and their new names."""


def members(cls: type, renamed: Mapping[str, str]) -> None:
    """Bind members that `cls` defines by old names to their new names, with a warning.

    Args:
        cls: a subclass that may have been written for an older version.
        renamed: old names and their new names.
    """
    for old in renamed.keys() & vars(cls).keys():
        warnings.warn(
            f"{cls.__name__} defines {old}, which is called {renamed[old]} now; rename it.",
            DeprecationWarning,
            stacklevel=3,
        )
        setattr(cls, renamed[old], vars(cls)[old])


def module_attributes(module: str, renamed: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a `__getattr__` for `module` that serves old names.

    Args:
        module: the `__name__` of the module.
        renamed: old names and their new names.
    """

    def get(name: str) -> Any:
        if name not in renamed:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        new = renamed[name]
        message = f"{module}.{name} is called {new} now."
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        return getattr(sys.modules[module], new)

    return get


def attribute(old: str, new: str) -> Any:
    """Return a read-only property for the attribute `new` under its old name."""

    def get(self: Any) -> Any:
        message = f"{type(self).__name__}.{old} is called {new} now."
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        return getattr(self, new)

    return property(get, doc=f"Deprecated name of `{new}`.")
