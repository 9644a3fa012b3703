"""Fuzz tests: functions of drawn inputs, each run with a share of FUZZ_INPUTS inputs."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Callable
from typing import Any

import hypothesis
import numpy as np
from hypothesis import strategies as st

INPUTS = int(os.environ.get("FUZZ_INPUTS", "3000"))
"""Inputs of all fuzz tests together; `make fuzz` sets more."""

ROUND = 2000  # inputs per run; hypothesis stores them, so that long runs need much memory
FEWEST = 20

tried: Counter[str] = Counter()
"""Inputs tried so far, by kind."""

Check = Callable[..., None]
seeds = st.integers(0, 2**32 - 1)


def fuzz(kind: str, share: float, **drawn: Any) -> Callable[[Check], Callable[[], None]]:
    """Turn a function of drawn arguments into a test with a share of all inputs.

    Args:
        kind: description of the inputs, under which they are counted.
        share: part of all inputs.
        drawn: strategy of each argument.
    """

    def decorate(check: Check) -> Callable[[], None]:
        def counted(**arguments: Any) -> None:
            tried[kind] += 1
            check(**arguments)

        def test() -> None:
            left = max(FEWEST, round(share * INPUTS))
            for number in itertools.count():
                settings = hypothesis.settings(
                    max_examples=min(left, ROUND),
                    database=None,
                    deadline=None,
                    suppress_health_check=list(hypothesis.HealthCheck),
                )
                hypothesis.seed(number)(settings(hypothesis.given(**drawn)(counted)))()
                left -= ROUND
                if left <= 0:
                    break

        test.__name__, test.__doc__ = check.__name__, check.__doc__
        return test

    return decorate


def spoiled(data: np.ndarray, rng: np.random.Generator, resize: bool = True) -> np.ndarray:
    """Return bytes like `data` with changes: some bytes, all bytes, floats, or the length."""
    data = data.copy()
    kind = rng.integers(5 if resize else 4)
    if kind == 4:
        return np.resize(data, rng.integers(0, data.size + 20)) if data.size else data
    if not data.size:
        return data
    if kind == 0:
        data[rng.integers(data.size, size=3)] = rng.integers(256, size=3)
    elif kind == 1:
        data[:] = rng.integers(256, size=data.size)
    elif kind == 2:
        data[:] = rng.choice([0, 1, 127, 128, 255])
    elif data.size >= 4:
        at = 4 * rng.integers(data.size // 4)
        data[at : at + 4] = np.array([rng.choice(ODD)], np.float32).view(np.uint8)
    return data


ODD = (np.nan, np.inf, -np.inf, 3e38, -1.0, 0.0, 1e-45)
