"""Refusals: one sentence that names the thing, its value and what is allowed."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any


class PayloadError(RuntimeError):
    """Raised where a payload that a rank has sent does not decode."""

    __init__ = Exception.__init__  # else AutoGraph raises another class in its place


def is_integer(value: Any) -> bool:
    """Return whether `value` is an integer and not a bool."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Return whether `value` is a real, finite number and not a bool."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)


def integer(owner: Any, name: str, value: Any, *, least: int, most: int | None = None) -> None:
    """Raise ValueError unless `value` is an integer of at least `least` (and at most `most`)."""
    if not is_integer(value) or value < least or (most is not None and value > most):
        allowed = f"of at least {least}" if most is None else f"from {least} to {most}"
        refuse(owner, name, value, f"an integer {allowed}")


def ratio(owner: Any, name: str, value: Any) -> None:
    """Raise ValueError unless `value` is a number in (0, 1]."""
    if not is_number(value) or not 0 < value <= 1:
        refuse(owner, name, value, "a number in (0, 1]")


def below_one(owner: Any, name: str, value: Any) -> None:
    """Raise ValueError unless `value` is a number in [0, 1)."""
    if not is_number(value) or not 0 <= value < 1:
        refuse(owner, name, value, "a number in [0, 1)")


def at_least(owner: Any, name: str, value: Any, *, least: float) -> None:
    """Raise ValueError unless `value` is a number (infinity too) of at least `least`."""
    if not (is_number(value) or value == math.inf) or value < least:
        refuse(owner, name, value, f"a number of at least {least:g}")


def one_of(owner: Any, name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    """Raise ValueError unless `value` is one of `allowed`."""
    if value not in allowed:
        refuse(owner, name, value, "one of " + ", ".join(repr(item) for item in allowed))


FLOATS = ("float16", "bfloat16", "float32", "float64")
NUMBERED = 2**31
"""Elements from which int32 does not number them all."""


def real(owner: Any, name: str, dtype: str) -> None:
    """Raise ValueError unless tensor `name` is of real floating-point numbers."""
    if dtype not in FLOATS:
        refuse(owner, f"dtype of {name or 'a tensor'}", dtype, "one of " + ", ".join(FLOATS))


def elements(owner: Any, name: str, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless tensor `name` has elements, and int32 numbers them."""
    what, size = name or "a tensor", math.prod(shape)
    if size == 0:
        refuse(owner, f"shape of {what}", shape, "one with at least one element")
    if size >= NUMBERED:
        allowed = "below 2^31 (positions are int32); name it in skip=, and it travels dense"
        refuse(owner, f"size of {what}", size, allowed)


def refuse(owner: Any, name: str, value: Any, allowed: str) -> None:
    """Raise ValueError: what `name` of `owner` is and what it may be."""
    kind = owner if isinstance(owner, str) else type(owner).__name__
    raise ValueError(f"{kind}: {name} is {value!r}, but must be {allowed}.")


def refuse_payload(senders: Sequence[int], why: str = "positions out of range") -> None:
    """Raise PayloadError: who has sent what cannot be right."""
    who = ", ".join(str(rank) for rank in sorted(set(senders)))
    raise PayloadError(f"what rank {who} has sent does not decode: {why}.")
