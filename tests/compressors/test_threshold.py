"""Tests of Threshold: each rank sends the elements whose magnitude reaches the threshold."""

from __future__ import annotations

import numpy as np
import pytest
from frameworks import Framework, Ranks, exact_mean, normals, parameters, same_bits
from laws import step

from accordion_hvd import Threshold, simulate
from accordion_hvd.compressors.sparsifier import decode, encode
from accordion_hvd.ops import indices

SHAPE = (24, 50)


@pytest.mark.parametrize("framework", parameters())
def test_what_reaches_the_value_is_sent(framework: Framework) -> None:
    """Ranks with gradients of very different scales match a computation by brute force."""
    ranks, errors = Ranks(Threshold(1.5), 3, framework), [np.zeros(1200, np.float32)] * 3
    for gradients in normals(SHAPE, 3, steps=5):
        gradients = [g * s for g, s in zip(gradients, (1, 0.01, 3), strict=True)]
        totals = [e + g.reshape(-1) for e, g in zip(errors, gradients, strict=True)]
        sent = [np.where(np.abs(t) >= 1.5, t, 0) for t in totals]
        means = ranks.step([g.astype(np.float32) for g in gradients])
        np.testing.assert_allclose(means[0].reshape(-1), np.mean(sent, 0), atol=1e-6)
        errors = [t - s for t, s in zip(totals, sent, strict=True)]
        for ours, theirs in zip(ranks.residuals(), errors, strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-6)


@pytest.mark.parametrize("framework", parameters())
@pytest.mark.parametrize("silent", [{0}, {1, 2}, {0, 1, 2}])
def test_some_or_all_may_have_nothing_to_send(framework: Framework, silent: set[int]) -> None:
    ranks = Ranks(Threshold(0.1), 3, framework)
    (gradients,) = normals(SHAPE, 3, steps=1)
    gradients = [g * 1e-3 if rank in silent else g for rank, g in enumerate(gradients)]
    means = ranks.step(gradients)
    assert all(same_bits(mean, means[0]) for mean in means)
    for rank in silent:
        np.testing.assert_array_equal(ranks.residuals()[rank], gradients[rank].reshape(-1))
    assert means[0].any() == (len(silent) < 3)


def test_bytes_are_those_of_what_is_sent() -> None:
    """The payload is k values and k packed positions; other ranks' payloads count as received."""
    world, ranks = simulate(Threshold(2.0), 3), 3
    (gradients,) = normals(SHAPE, ranks, steps=1)
    step(world, next(iter(FRAMEWORKS)), [{"w": g} for g in gradients])
    counts = [int((np.abs(g) >= 2.0).sum()) for g in gradients]
    payloads = [4 * k + indices.packed_length(k, 1200) for k in counts]
    assert len(set(payloads)) > 1
    flag = 2 * (ranks - 1) / ranks * 8
    for exchange, payload in zip(world.exchanges, payloads, strict=True):
        stats = exchange.stats()
        assert stats["payload"] == payload + 8
        assert np.isclose(stats["sent"], (ranks - 1) * payload + flag)
        assert np.isclose(stats["received"], sum(payloads) - payload + flag)


FRAMEWORKS = [p.values[0] for p in parameters()]


def test_zero_sends_all() -> None:
    ranks = Ranks(Threshold(0), 2)
    for gradients in normals(SHAPE, 2, steps=3):
        np.testing.assert_allclose(ranks.step(gradients)[0], exact_mean(gradients), atol=1e-6)
        assert not np.any(ranks.residuals())


@pytest.mark.parametrize("size", [1, 50, 1200, 70_001])
def test_a_payload_tells_how_much_it_holds(size: int) -> None:
    rng = np.random.default_rng(size)
    for count in {0, 1, size // 100, size // 3, size - 1, size}:
        index = np.sort(rng.choice(size, count, replace=False)).astype(np.int32)
        values = rng.standard_normal(count).astype(np.float32)
        payload = encode(index, values, size)
        (places, found), doubt = decode(payload, size)
        assert same_bits(places, index) and same_bits(found, values) and not doubt.any()
        with pytest.raises(ValueError, match="bytes"):
            decode(np.append(payload, np.zeros(2, np.uint8)), size)
