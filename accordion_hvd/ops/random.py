"""Random numbers that depend only on their seed: equal on all ranks and in all frameworks."""

from __future__ import annotations

import zlib
from types import ModuleType
from typing import Any

import numpy

_MASK = 0xFFFFFFFF


def normal(shape: tuple[int, ...], seed: str) -> numpy.ndarray:
    """Return standard normal fp32 values from a counter-based generator keyed by `seed`."""
    generator = numpy.random.Generator(numpy.random.Philox(zlib.crc32(seed.encode())))
    return generator.standard_normal(shape, dtype=numpy.float32)


def key(*words: Any) -> Any:
    """Mix strings, integers and integer tensors into one 32-bit seed."""
    mixed: Any = 0x9E3779B9
    for word in words:
        if isinstance(word, str):
            word = zlib.crc32(word.encode())
        mixed = _mix((mixed * 31 + word) & _MASK)
    return mixed


def uniform(xp: ModuleType, count: int, seed: Any, device: Any = None) -> Any:
    """Return `count` fp32 values in [0, 1), from a counter hashed with `seed` (from `key`).

    The hash uses only integer arithmetic, so all frameworks return the same bits, also in a graph.
    """
    return xp.cast(words(xp, count, seed, device) // 256, "float32") * (1.0 / (1 << 24))


def words(xp: ModuleType, count: int, seed: Any, device: Any = None) -> Any:
    """Return `count` integers (int64) of 32 random bits, from a counter hashed with `seed`."""
    return hashed(xp.arange(count, device), seed)


def hashed(counter: Any, seed: Any) -> Any:
    """Return 32 random bits for each integer of `counter`, hashed with `seed` (from `key`)."""
    return _mix((counter * 0x9E3779B1 + seed) & _MASK)


def _mix(value: Any) -> Any:
    """Apply MurmurHash3's 32-bit finalizer to Python integers or int64 tensors (wrapping)."""
    value = value ^ (value // (1 << 16))
    value = (value * 0x85EBCA6B) & _MASK
    value = value ^ (value // (1 << 13))
    value = (value * 0xC2B2AE35) & _MASK
    return value ^ (value // (1 << 16))
