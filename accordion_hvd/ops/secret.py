"""Unseeded random noise from the operating system's cryptographic source; it cannot be reproduced.

Noise for integers is rounded to integers. Rounding costs no privacy: an integer plus rounded noise
equals the rounded sum of the integer and the noise, so it is post-processing. It also removes the
low bits of floating-point numbers, from which Mironov ("On Significance of the Least Significant
Bits for Differential Privacy", CCS 2012) recovers the value to which noise was added.
"""

from __future__ import annotations

import os

import numpy as np

_BLOCK = 1 << 16  # values drawn at once, so that intermediate results stay in the cache


def uniform(count: int) -> np.ndarray:
    """Return `count` secret fp64 values in [0, 1), multiples of 2^-24.

    fp32 represents these values exactly.
    """
    return (_words(count) >> np.uint64(40)) * 2.0**-24


def bernoulli(count: int, chance: float) -> np.ndarray:
    """Return `count` secret booleans that are True with probability `chance`, in [0, 1].

    The true probability is `chance` rounded down to a multiple of 2^-64, so it never exceeds it.
    """
    most = int(chance * 2.0**64)  # exact but for the part below 1, which is cut off
    return np.ones(count, bool) if most >> 64 else _words(count) < np.uint64(most)


def normal(count: int) -> np.ndarray:
    """Return `count` secret standard normal fp64 values, by the Box-Muller transform.

    Radii come from 128 random bits, so the tails reach 13 standard deviations. The truncated part
    has a probability of 2^-128.
    """
    pairs = -(-count // 2)
    high, low, angle = _words(3 * pairs).reshape(3, pairs)
    inner = (high + (low + 0.5) * 2.0**-64) * 2.0**-64
    radius = np.sqrt(-2 * np.log(np.minimum(inner, 1.0)))
    angles = (angle >> np.uint64(11)) * (2 * np.pi * 2.0**-53)
    return np.concatenate([radius * np.cos(angles), radius * np.sin(angles)])[:count]


def rounded_normal(count: int, sigma: float, dtype: str) -> np.ndarray:
    """Return `count` secret normal values with standard deviation `sigma`, rounded to `dtype`.

    Values outside the range of `dtype` wrap around, as their sums do: sums are exact modulo 2^bits.
    """
    drawn = np.empty(count, dtype)
    for first in range(0, count, _BLOCK):
        block = drawn[first : first + _BLOCK]
        block[:] = np.rint(sigma * normal(len(block))).astype(np.int64)
    return drawn


def _words(count: int) -> np.ndarray:
    return np.frombuffer(os.urandom(8 * count), np.uint64)
