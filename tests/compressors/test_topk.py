"""Tests of TopK and STC against a sort by magnitude."""

from __future__ import annotations

import laws
import numpy as np
import pytest
from frameworks import Ranks, normals

from accordion_hvd import STC, TopK, simulate
from accordion_hvd.check import PayloadError
from accordion_hvd.core.base import Info
from accordion_hvd.core.codec import parse
from accordion_hvd.ops import backend


def test_at_least_one_is_kept() -> None:
    assert [TopK(0.01).kept(size) for size in (1, 99, 100, 250)] == [1, 1, 1, 2]


def test_topk_sends_the_largest() -> None:
    """On one rank, the mean is the largest magnitudes of gradient + residual, found by sorting."""
    world, error = Ranks(TopK(0.1), 1), np.zeros(1200)
    for (gradient,) in normals(laws.SHAPE, 1, steps=5):
        total = error + gradient.reshape(-1)
        largest = np.argsort(-np.abs(total))[:120]
        wanted = np.zeros(1200)
        wanted[largest] = total[largest]
        np.testing.assert_allclose(world.step([gradient])[0].reshape(-1), wanted, atol=1e-6)
        error = total - wanted


@pytest.mark.parametrize("chunk", [100, 700])
def test_topk_sends_the_largest_of_each_chunk(chunk: int) -> None:
    """Chunk j has every n-th element from element j on; one chunk may be shorter."""
    size, chunks = 1197, -(-1197 // chunk)
    kept = int(0.1 * -(-size // chunks))
    world, error = Ranks(TopK(0.1, chunk=chunk), 1), np.zeros(size)
    for (gradient,) in normals((3, 399), 1, steps=5):
        total = error + gradient.reshape(-1)
        wanted = np.zeros(size)
        for j in range(chunks):
            largest = j + chunks * np.argsort(-np.abs(total[j::chunks]))[:kept]
            wanted[largest] = total[largest]
        np.testing.assert_allclose(world.step([gradient])[0].reshape(-1), wanted, atol=1e-6)
        error = total - wanted


def test_wrong_places_in_chunks_are_refused() -> None:
    """Places that do not ascend in a chunk, or lie beyond the tensor, are no message."""
    codec, x = TopK(0.1, chunk=100), np.random.default_rng(0).standard_normal(1197)
    (message,) = codec.encode(x.astype(np.float32), Info())
    count = len(message) // 5
    for place, value in ((0, 255), (count - 1, 0)):
        spoiled = message.copy()
        spoiled[4 * count + place] = value
        with pytest.raises(PayloadError, match="rank 3"):
            parse(codec, (spoiled,), x.shape, 3)


def test_places_of_large_tensors_do_not_wrap_around() -> None:
    """A place of a broken sender, times the number of chunks, may be beyond 2^31."""
    xp = backend("numpy")
    for place, flag in ((1, 0), (255, 1)):
        index, invalid = xp.index_of_chunks(np.full((1, 1, 9_000_000), place, np.int32), 18_000_000)
        assert invalid.tolist() == [flag]
        assert index.min() >= 0 and index.max() < 18_000_000


def test_stc_sends_signs_times_the_mean_magnitude() -> None:
    """Tensors of one shape, which share a call, have magnitudes of their own."""
    world, names = simulate(STC(0.1), 1), ("small", "large")
    error = dict.fromkeys(names, np.zeros(1200))
    for (gradient,) in normals(laws.SHAPE, 1, steps=3):
        given = {"small": gradient, "large": np.float32(1e3) * gradient[::-1]}
        (found,) = world.step([{name: x.copy() for name, x in given.items()}], lr=0.1)
        for name in names:
            total = error[name] + given[name].reshape(-1)
            largest = np.argsort(-np.abs(total))[:120]
            wanted = np.zeros(1200)
            wanted[largest] = np.sign(total[largest]) * np.abs(total[largest]).mean()
            np.testing.assert_allclose(found[name].reshape(-1), wanted, rtol=1e-5)
            error[name] = total - wanted
    assert len(world.exchanges[0].layout.batches) == 1
