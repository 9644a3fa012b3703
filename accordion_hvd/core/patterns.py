"""Patterns of tensor names, in the syntax of file-name patterns."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Return whether `name` matches one of the patterns, such as "encoder.*"."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)
