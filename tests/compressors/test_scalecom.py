"""Tests of ScaleCom: one leader, a filter, and traffic that does not grow with the ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from frameworks import NUMPY, Framework, Ranks, exact_mean, normals, parameters, same_bits
from laws import step

from accordion_hvd import Compressor, ScaleCom, TopK, simulate

SHAPE = (24, 50)


def paper(
    gradients: list[np.ndarray], residues: list[np.ndarray], leader: int, scalecom: ScaleCom
) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    """Return the mean, the mask of sent elements, and the new residuals m, by steps 2 to 6."""
    p = [m + g for m, g in zip(residues, gradients, strict=True)]
    size, width = p[0].size, round(1 / scalecom.ratio)
    large = np.abs(p[leader])
    if scalecom.selection == "exact":
        chosen = np.argsort(-large, kind="stable")[: int(scalecom.ratio * size)]
    else:
        chosen = [s + large[s : s + width].argmax() for s in range(0, size, width)]
    mask = np.zeros(size, bool)
    mask[chosen] = True
    sent = [np.where(mask, x, 0) for x in p]
    beta = scalecom.beta
    new = [(1 - beta) * m + beta * (x - c) for m, x, c in zip(residues, p, sent, strict=True)]
    return np.mean(sent, 0), mask, new


@pytest.mark.parametrize("framework", parameters())
@pytest.mark.parametrize("selection", ["bins", "exact"])
@pytest.mark.parametrize("beta", [1.0, 0.3, 0.1])
def test_it_follows_the_paper(beta: float, selection: str, framework: Framework) -> None:
    """Means, sent elements and residuals follow the paper, for three ranks that lead in turn."""
    scalecom = ScaleCom(0.03, beta, selection)
    ours, residues = Ranks(scalecom, 3, framework), [np.zeros(1200)] * 3
    for number, gradients in enumerate(normals(SHAPE, 3, steps=8)):
        flat = [g.reshape(-1).astype(np.float64) for g in gradients]
        wanted, mask, residues = paper(flat, residues, number % 3, scalecom)
        means = ours.step(gradients)
        np.testing.assert_allclose(means[2].reshape(-1), wanted, atol=1e-5)
        np.testing.assert_array_equal(means[0].reshape(-1) != 0, mask)
        for carried, m in zip(ours.residuals(), residues, strict=True):
            np.testing.assert_allclose(carried * beta, m, atol=2e-5)


@pytest.mark.parametrize("beta", [1.0, 0.3, 0.1])
def test_nothing_is_lost_on_any_rank(beta: float) -> None:
    """At each position, the values sent plus m / beta are the sum of the rank's gradients."""
    ours, total, sent = Ranks(ScaleCom(0.1, beta), 1), np.zeros(1200), np.zeros(1200)
    for gradients in normals(SHAPE, 1, steps=60):
        total += gradients[0].reshape(-1)
        sent += ours.step(gradients)[0].reshape(-1)
        carried = ours.residuals()[0]
        assert carried is not None
        scale = max(1.0, np.abs(carried).max())
        np.testing.assert_allclose(sent + carried, total, atol=2e-5 * scale)


def test_alone_and_without_a_filter_it_is_topk() -> None:
    ours, topk = Ranks(ScaleCom(0.1, selection="exact"), 1), Ranks(TopK(0.1), 1)
    for gradients in normals(SHAPE, 1, steps=5):
        assert same_bits(ours.step(gradients)[0], topk.step(gradients)[0])


def test_the_residue_is_filtered() -> None:
    """Each step that does not send an element of constant gradient g adds beta g to its m.

    A step that sends the element leaves (1 - beta) m.
    """
    scalecom, size = ScaleCom(0.5, 0.25), 2
    ours = Ranks(scalecom, 1)
    for number in range(1, 5):  # the first of each two is always larger
        ours.step([np.array([100.0, 1.0], np.float32)])
        carried = ours.residuals()[0]
        assert carried is not None and carried.shape == (size,)
        np.testing.assert_allclose(carried[1] * 0.25, 0.25 * number)
        assert carried[0] == 0
    before = ours.residuals()[0]
    assert before is not None
    ours.step([np.array([0.0, 0.0], np.float32)])
    after = ours.residuals()[0]
    assert after is not None
    np.testing.assert_allclose(after[1], 0.75 * before[1])


def test_each_bin_gives_one_and_the_largest_is_among_them() -> None:
    ours = Ranks(ScaleCom(1 / 48), 2)
    for number, gradients in enumerate(normals((23, 53), 2, steps=4)):
        carried = ours.residuals()[number % 2] if ours.states else 0.0
        large = np.abs(gradients[number % 2].reshape(-1) + carried)
        mean = ours.step(gradients)[0].reshape(-1)
        assert mean[large.argmax()] != 0
        counts = [np.count_nonzero(mean[s : s + 48]) for s in range(0, mean.size, 48)]
        assert set(counts) == {1}


def test_alike_ranks_stay_alike() -> None:
    ours = Ranks(ScaleCom(0.1, 0.1), 3)
    for (gradient,) in normals(SHAPE, 1, steps=5):
        ours.step([gradient] * 3)
    carried = ours.residuals()
    assert all(same_bits(x, carried[0]) for x in carried[1:])


def moved(compressor: Compressor, ranks: int) -> tuple[float, float]:
    """Return the payload of one step, and the bytes that a rank sends and receives in it."""
    world = simulate(compressor, ranks)
    rng = np.random.default_rng(0)
    grads = [{"w": rng.standard_normal((40, 50)).astype(np.float32)} for _ in range(ranks)]
    step(world, NUMPY, grads)
    stats = world.exchanges[-1].stats()
    return stats["payload"], stats["sent"] + stats["received"]


def test_traffic_does_not_grow_with_the_ranks() -> None:
    """ScaleCom's traffic grows only by a ring's factor (n - 1) / n, and TopK's grows with n - 1."""
    found = {n: moved(ScaleCom(0.02), n) for n in (4, 16, 64)}
    topk = {n: moved(TopK(0.02), n) for n in (4, 16, 64)}
    assert len({payload for payload, _ in found.values()}) == 1
    for n in (16, 64):
        ring = ((n - 1) / n) / (3 / 4)
        assert np.isclose(found[n][1], found[4][1] * ring)
        assert topk[n][1] > topk[4][1] * (n - 1) / 3 * 0.9


@pytest.mark.parametrize(("times", "least"), [(80, 65), (500, 400)])
def test_the_paper_s_rates_are_reached(times: int, least: float) -> None:
    world = simulate(ScaleCom(1 / times), 8)
    rng = np.random.default_rng(0)
    step(world, NUMPY, [{"w": rng.standard_normal((400, 500)).astype("f")} for _ in range(8)])
    assert world.exchanges[0].stats()["ratio"] > least


def test_the_guide() -> None:
    rates = {flops: 1 / ScaleCom.guided(flops).ratio for flops in (500, 196, 195, 128, 127, 0)}
    assert rates == {500: 25, 196: 25, 195: 50, 128: 50, 127: 400, 0: 400}
    assert ScaleCom.guided(10, beta=0.1) == ScaleCom(1 / 400, 0.1)
    for bad in (-1, float("nan"), "a", None):
        with pytest.raises(ValueError, match="ScaleCom: flops is"):
            ScaleCom.guided(bad)  # type: ignore[arg-type]


def test_bad_filters_break_the_law() -> None:
    """Negative control: setting m to 0 at sent elements, which is right only for beta = 1."""

    class Zeroing(ScaleCom):
        def exchange(self, grad: Any, state: Any, info: Any) -> Any:
            mean, new = yield from super().exchange(grad, state, info)
            new["error"][mean.reshape(-1) != 0] = 0
            return mean, new

    ours, lost = Ranks(Zeroing(0.1, 0.3), 2), np.zeros(1200)
    for gradients in normals(SHAPE, 2, steps=5):
        lost += (exact_mean(gradients) - ours.step(gradients)[0]).reshape(-1)
    assert np.abs(lost - ours.mean_residual(1200)).max() > 0.01


@pytest.mark.parametrize("framework", parameters())
def test_the_residue_survives_a_large_gradient(framework: Framework) -> None:
    """(1 - beta) m stays where an element is sent, even if g is so large that m + g rounds to g."""
    scalecom, rng = ScaleCom(0.1, 0.1, "exact"), np.random.default_rng(0)
    ours, small = Ranks(scalecom, 1, framework), rng.normal(size=SHAPE).astype(np.float32)
    ours.step([small])
    before = ours.residuals()[0].reshape(-1).copy()
    large = np.where(rng.random(SHAPE) < 0.1, np.float32(1e9), np.float32(0))
    sent = ours.step([large])[0].reshape(-1) != 0
    after = ours.residuals()[0].reshape(-1)
    assert (before[sent] != 0).any()
    np.testing.assert_allclose(after[sent], 0.9 * before[sent], rtol=1e-6)
