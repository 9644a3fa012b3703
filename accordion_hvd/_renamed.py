"""Names of older versions: deprecated ones still work and warn, removed ones are refused."""

from __future__ import annotations

import functools
import re
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

Class = TypeVar("Class", bound=type)

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


def arguments(
    renamed: Mapping[str, str], removed: Mapping[str, tuple[Any, str]]
) -> Callable[[Class], Class]:
    """Return a decorator of classes whose constructors handle arguments of older versions.

    A renamed argument is passed on by its new name, with a warning. A removed argument is ignored
    if it has its old default, as it has in saved configurations.

    Args:
        renamed: old names and their new names.
        removed: for each name the old default, and a sentence that says what to use instead.

    Raises:
        TypeError: from the constructor, if a removed argument has another value, or if an argument
            is given by both names.
    """

    def decorate(cls: Class) -> Class:
        construct: Any = cls.__init__  # type: ignore[misc]

        @functools.wraps(construct)
        def init(self: Any, *args: Any, **options: Any) -> None:
            for old in options.keys() & removed.keys():
                value, (default, advice) = options.pop(old), removed[old]
                if value != default:
                    raise TypeError(
                        f"{cls.__name__}: {old} was removed after version 0.1.0. {advice}"
                    )
            for old in options.keys() & renamed.keys():
                new = renamed[old]
                if new in options:
                    raise TypeError(f"{cls.__name__}: {old} is called {new} now; give one of them.")
                message = f"{cls.__name__}: the argument {old} is called {new} now."
                warnings.warn(message, DeprecationWarning, stacklevel=2)
                options[new] = options.pop(old)
            construct(self, *args, **options)

        cls.__init__ = init  # type: ignore[misc]
        cls.old_arguments = frozenset({*renamed, *removed})  # type: ignore[attr-defined]
        return cls

    return decorate


ARGUMENTS = {"pace": "replica_lr", "whitened": "preconditioned"}
"""Old names of arguments that checkpoints may contain, and their new names."""


def current(text: str) -> str:
    """Return the description of a compression in a checkpoint, with today's names of arguments."""
    return re.sub(r"\b(\w+)(?==)", lambda found: ARGUMENTS.get(found[1], found[1]), text)
