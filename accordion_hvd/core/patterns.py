"""Patterns of tensor names, in the syntax of file-name patterns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Return whether `name` matches one of the patterns, such as "encoder.*"."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def first_match(name: str, patterns: Iterable[str]) -> str | None:
    return next((pattern for pattern in patterns if fnmatchcase(name, pattern)), None)
