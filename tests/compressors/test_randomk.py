"""Tests of RandomK, which draws every element equally often."""

from __future__ import annotations

import numpy as np
from frameworks import Ranks

from accordion_hvd import RandomK


def test_randomk_gives_every_element_its_chance() -> None:
    """Each step sends k different elements; over many steps every element is sent about alike."""
    size, steps = 200, 1000
    world, sent = Ranks(RandomK(0.1), 1), np.zeros(size)
    for _ in range(steps):
        mean = world.step([np.ones(size, np.float32)])[0]
        assert np.count_nonzero(mean) == 20
        sent += mean != 0
    assert abs(sent.mean() - 100) < 1e-9
    assert 50 < sent.min() and sent.max() < 150  # five standard deviations


def test_randomk_draws_all_distances() -> None:
    """One of each half of four elements, from a random first one: 1, 2 or 3 elements apart."""
    world, found = Ranks(RandomK(0.5), 1), set()
    for _ in range(200):
        first, second = np.flatnonzero(world.step([np.ones(4, np.float32)])[0])
        found.add(int(second - first))
    assert found == {1, 2, 3}
