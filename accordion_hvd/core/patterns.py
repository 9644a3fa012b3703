"""Patterns of tensor names, as of file names."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Return whether `name` matches one of the file-name patterns."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)
