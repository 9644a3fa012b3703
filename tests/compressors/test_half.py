"""Tests of half precision with values that overflow."""

from __future__ import annotations

import numpy as np
import pytest
from frameworks import Ranks

from accordion_hvd import BF16, FP16


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
def test_half_overflow_reaches_every_rank() -> None:
    means = Ranks(FP16(), 2).step([np.full((3,), 1e6, np.float32)] * 2)
    assert all(np.isinf(mean).all() for mean in means)
    means = Ranks(BF16(), 2).step([np.full((3,), 1e30, np.float32)] * 2)
    assert all(np.isfinite(mean).all() for mean in means)
