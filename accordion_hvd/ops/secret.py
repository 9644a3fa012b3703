"""Noise that nobody can repeat: from the operating system's cryptographic source, never a seed.

What is added to integers is rounded to integers. That costs no privacy, since integers plus rounded
noise are what rounding makes of integers plus noise; and nothing of a floating-point number's low
bits, in which Mironov ("On Significance of the Least Significant Bits for Differential Privacy",
CCS 2012) reads what was added to them, is left.
"""

from __future__ import annotations

import os

import numpy as np


def uniform(count: int) -> np.ndarray:
    """`count` secret fp64 values in [0, 1), multiples of 2^-24, so that fp32 has them too."""
    return (_words(count) >> np.uint64(40)) * 2.0**-24


def normal(count: int) -> np.ndarray:
    """`count` secret standard normal fp64 values, by Box and Muller's transformation.

    Radii come from 128 random bits, so that tails reach to 13 standard deviations: what is cut off
    has a probability of 2^-128.
    """
    pairs = -(-count // 2)
    high, low, angle = _words(3 * pairs).reshape(3, pairs)
    inner = (high + (low + 0.5) * 2.0**-64) * 2.0**-64
    radius = np.sqrt(-2 * np.log(np.minimum(inner, 1.0)))
    angles = (angle >> np.uint64(11)) * (2 * np.pi * 2.0**-53)
    return np.concatenate([radius * np.cos(angles), radius * np.sin(angles)])[:count]


def rounded_normal(count: int, sigma: float, dtype: str) -> np.ndarray:
    """`count` secret normal values of deviation `sigma`, rounded to integers of `dtype`.

    What `dtype` cannot hold wraps around, as sums of it do: modulo 2^bits the sum is exact.
    """
    return np.rint(sigma * normal(count)).astype(np.int64).astype(dtype)


def _words(count: int) -> np.ndarray:
    return np.frombuffer(os.urandom(8 * count), np.uint64)
