"""Checks of arguments and names; an error names owner, argument, value and what is allowed."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NoReturn


class PayloadError(RuntimeError):
    """Raised if a payload from another rank does not decode."""

    __init__ = Exception.__init__  # else AutoGraph raises another class in its place


def attribute(module: str, engine: Any, name: str) -> Any:
    """Return an attribute of an engine's module, which `module` stands in for.

    Raises:
        AttributeError: if there is none; the message says where this package has that name.
    """
    import accordion_hvd

    try:
        return getattr(engine, name)
    except AttributeError:
        if name.startswith("_") or name not in dir(accordion_hvd):
            raise
        told = f"module {module!r} has no attribute {name!r}; write accordion_hvd.{name}"
        raise AttributeError(told) from None


def is_integer(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)


def integer(owner: Any, name: str, value: Any, *, least: int, most: int | None = None) -> None:
    """Raise ValueError unless `value` is an integer of at least `least` (and at most `most`)."""
    if not is_integer(value) or value < least or (most is not None and value > most):
        allowed = f"of at least {least}" if most is None else f"from {least} to {most}"
        refuse(owner, name, value, f"an integer {allowed}")


def has(owner: Any, name: str, value: Any, keys: Iterable[str]) -> None:
    """Raise ValueError unless `value` is a mapping that has these keys."""
    if not isinstance(value, Mapping):
        refuse(owner, name, value, "a dict")
    for key in keys:
        if key not in value:
            kind = owner if isinstance(owner, str) else type(owner).__name__
            raise ValueError(f"{kind}: the {name} has no {key!r}, but must have it.")


def settle(owner: Any, name: str, value: Any) -> None:
    """Set an argument of a frozen dataclass to its usual form; for `__post_init__` only."""
    object.__setattr__(owner, name, value)


def ratio(owner: Any, name: str, value: Any) -> None:
    """Raise ValueError unless `value` is a number in (0, 1]."""
    if not is_number(value) or not 0 < value <= 1:
        refuse(owner, name, value, "a number in (0, 1]")


def below_one(owner: Any, name: str, value: Any) -> None:
    """Raise ValueError unless `value` is a number in [0, 1)."""
    if not is_number(value) or not 0 <= value < 1:
        refuse(owner, name, value, "a number in [0, 1)")


def at_least(owner: Any, name: str, value: Any, *, least: float) -> None:
    """Raise ValueError unless `value` is a number of at least `least`; infinity is allowed."""
    if not (is_number(value) or value == math.inf) or value < least:
        refuse(owner, name, value, f"a number of at least {least:g}")


def one_of(owner: Any, name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    """Raise ValueError unless `value` is one of `allowed`."""
    if value not in allowed:
        refuse(owner, name, value, "one of " + ", ".join(repr(item) for item in allowed))


def patterns(skip: str | Sequence[str]) -> tuple[str, ...]:
    """Return name patterns as a tuple; a string is one pattern."""
    return (skip,) if isinstance(skip, str) else tuple(skip)


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Return whether `name` matches one of the patterns, such as "encoder.*"."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def first_match(name: str, patterns: Iterable[str]) -> str | None:
    return next((pattern for pattern in patterns if fnmatchcase(name, pattern)), None)


def mapping(owner: Any, name: str, value: Any) -> None:
    """Raise ValueError unless `value` is a mapping or None."""
    if value is not None and not isinstance(value, Mapping):
        refuse(owner, name, value, "a mapping with name patterns as keys")


FLOATS = ("float16", "bfloat16", "float32", "float64")
NUMBERED = 2**31
"""Smallest number of elements that int32 indices cannot address."""


def real(owner: Any, name: str, dtype: str) -> None:
    """Raise ValueError unless tensor `name` has a real floating-point dtype."""
    if dtype not in FLOATS:
        refuse(owner, f"dtype of {name or 'a tensor'}", dtype, "one of " + ", ".join(FLOATS))


def elements(owner: Any, name: str, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless tensor `name` has elements, and int32 indices can address them."""
    label, size = name or "a tensor", math.prod(shape)
    if size == 0:
        refuse(owner, f"shape of {label}", shape, "one with at least one element")
    if size >= NUMBERED:
        allowed = "below 2^31, since indices are int32; to send it uncompressed, name it in skip="
        refuse(owner, f"size of {label}", size, allowed)


def refuse(owner: Any, name: str, value: Any, allowed: str) -> NoReturn:
    """Raise ValueError with the message "OWNER: NAME is VALUE, but must be ALLOWED.".

    Args:
        owner: the object that refuses, which its class represents in the message, or a string.
        name: name of the argument.
        value: its value.
        allowed: description of the allowed values.
    """
    kind = owner if isinstance(owner, str) else type(owner).__name__
    raise ValueError(f"{kind}: {name} is {value!r}, but must be {allowed}.")


def refuse_payload(senders: Sequence[int], why: str = "positions out of range") -> NoReturn:
    """Raise PayloadError with a message that names the senders.

    Args:
        senders: the ranks that sent the corrupt payloads.
        why: description of the fault.
    """
    ranks = sorted(set(senders))
    if len(ranks) == 1:
        raise PayloadError(f"the payload of rank {ranks[0]} does not decode: {why}.")
    numbers = ", ".join(str(rank) for rank in ranks)
    raise PayloadError(f"the payloads of ranks {numbers} do not decode: {why}.")
