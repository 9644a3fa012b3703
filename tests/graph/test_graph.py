"""Tests of graphs, partitions, and samplers that prefer local nodes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from accordion_hvd.graph import (
    Graph,
    Partition,
    Sampler,
    SecondMomentGuard,
    SkewedSampler,
    partition,
    skew_for,
    tight_skew,
    worst_case_skew,
)
from accordion_hvd.graph.sampler import MODES
from accordion_hvd.graph.skew import normalizer

Array = np.ndarray
SIZES: list[dict[str, Any]] = [{"fanout": 4}, {"layer_size": 40}]
by_size = pytest.mark.parametrize("size", SIZES, ids=lambda size: next(iter(size)))
by_mode = pytest.mark.parametrize("mode", MODES)


def blocks_of_nodes(
    nodes: int = 400,
    degree: int = 12,
    groups: int = 4,
    seed: int = 0,
    normalization: str = "symmetric",
) -> Any:
    """Return a graph with one hub, whose nodes prefer their group, and the group of each node."""
    draw = np.random.default_rng(seed)
    group = draw.integers(0, groups, nodes)
    a = draw.integers(0, nodes, nodes * degree // 2)
    b = draw.integers(0, nodes, len(a))
    kept = (group[a] == group[b]) | (draw.random(len(a)) < 0.25)
    hub = np.stack([np.full(nodes // 2, 7), draw.integers(0, nodes, nodes // 2)])
    edges = np.concatenate([np.stack([a, b])[:, kept], hub], axis=1)
    return Graph.from_edges(edges, nodes, normalization), group.astype(np.int32)


def dense(graph: Graph) -> Array:
    """Return A as a matrix."""
    full = np.diag(graph.own.astype(np.float64))
    rows = np.repeat(np.arange(graph.nodes), graph.degrees)
    full[rows, graph.indices] = graph.weights
    return full


# ------------------------------------------------------------------------------------------ graphs
def test_normalizations() -> None:
    edges = np.array([[0, 1, 2, 3], [1, 2, 0, 0]])
    adjacency = np.zeros((5, 5))  # node 4 has no edges
    adjacency[edges[0], edges[1]] = adjacency[edges[1], edges[0]] = 1
    adjacency += np.eye(5)
    degree = adjacency.sum(1)
    symmetric = dense(Graph.from_edges(edges, 5))
    np.testing.assert_allclose(symmetric, adjacency / np.sqrt(np.outer(degree, degree)), rtol=1e-6)
    mean = dense(Graph.from_edges(edges, 5, "mean"))
    np.testing.assert_allclose(mean, adjacency / degree[:, None], rtol=1e-6)


def test_self_loops_and_duplicates_do_not_count() -> None:
    plain = Graph.from_edges(np.array([[0, 1], [1, 2]]), 4)
    messy = Graph.from_edges(np.array([[1, 1, 0, 2, 2, 3], [0, 0, 1, 2, 1, 3]]), 4)
    assert plain.fingerprint() == messy.fingerprint() and plain.edges == 2
    assert list(plain.degrees) == [1, 2, 1, 0]
    other = Graph.from_edges(np.array([[0, 1], [1, 3]]), 4)
    assert plain.fingerprint() != other.fingerprint()


def test_no_edges_at_all() -> None:
    graph = Graph.from_edges(np.zeros((2, 0)), 3)
    (block,) = Sampler(graph, fanout=2).sample([2, 0])
    np.testing.assert_array_equal(block.sources, [2, 0])
    np.testing.assert_allclose(block.aggregate(np.eye(2)), np.eye(2))
    assert partition(graph, 3).cut == 0


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: Graph.from_edges([[0], [5]], 5), "a node of edges is 5, but must be from 0 to 4"),
        (lambda: Graph.from_edges([[0], [-1]], 5), "a node of edges is -1"),
        (lambda: Graph.from_edges([[0, 1]], 5), "must be integers of shape"),
        (lambda: Graph.from_edges([[0.5], [1]], 5), "must be integers of shape"),
        (lambda: Graph.from_edges([[], []], 0), "nodes is 0"),
        (lambda: Graph.from_edges([[0], [1]], 5, "max"), "normalization is 'max'"),
        (lambda: partition(PATH, 4), "parts is 4, but must be an integer from 1 to 3"),
        (lambda: partition(PATH, 2, "magic"), "method is 'magic'"),
        (lambda: Partition.of(PATH, [0, 1]), "one integer for each of 3 nodes"),
        (lambda: Partition.of(PATH, [0, 1, 2], 2), "an owner in part is 2"),
        (lambda: SkewedSampler(PATH, [0, 0, 2**31], 0, 2), "part is 2147483648, but must be an"),
        (lambda: SkewedSampler(PATH, [0, 0, -1], 0, 2), "an owner in part is -1"),
        (lambda: Sampler(PATH), "fanout is None"),
        (lambda: Sampler(PATH, fanout=0), "fanout is 0"),
        (lambda: Sampler(PATH, fanout=2, layer_size=2), "but not both"),
        (lambda: Sampler(PATH, fanout=2, mode="some"), "mode is 'some'"),
        (lambda: Sampler(PATH, fanout=2).sample([0, 3]), "a node of targets is 3"),
        (lambda: Sampler(PATH, fanout=2).sample([0.5]), "but must be a list of integers"),
        (lambda: Sampler(PATH, fanout=2).sample([0, 1, 0]), "a target is 0"),
        (lambda: SkewedSampler(PATH, [0, 0, 1], 0, 2, budget=0.5), "budget is 0.5"),
        (lambda: SkewedSampler(PATH, [0, 0, 1], 0, 2, budget=2, skew=2), "skew is 2"),
        (lambda: SkewedSampler(PATH, [0, 0, 1], 0, 2, budget=(1, 2)), "one for each of 1 hops"),
        (lambda: SkewedSampler(PATH, [0, 1], 0, 2), "one integer for each of 3 nodes"),
        (lambda: SkewedSampler(PATH, [0, 0, 1], 0, 2, rule="loose"), "rule is 'loose'"),
        (lambda: SkewedSampler(PATH, [0] * 3, 0, 2, skew=2, guard=SecondMomentGuard()), "guard is"),
        (lambda: SecondMomentGuard(every=0), "every is 0"),
    ],
)
def test_refusals(call: Any, told: str) -> None:
    with pytest.raises(ValueError) as refusal:
        call()
    assert told in str(refusal.value) and str(refusal.value).count("\n") == 0


PATH = Graph.from_edges(np.array([[0, 1], [1, 2]]), 3)


# -------------------------------------------------------------------------------------- partitions
def test_partitions() -> None:
    """METIS finds the groups and is repeatable; the baselines cut as many edges as chance does."""
    draw = np.random.default_rng(1)
    group = np.repeat(np.arange(4), 100)
    a, b = draw.integers(0, 400, (2, 6000))
    kept = (group[a] == group[b]) | (draw.random(6000) < 0.05)
    graph = Graph.from_edges(np.stack([a, b])[:, kept], 400)
    found = {method: partition(graph, 4, method, 3) for method in ("random", "hash")}
    for part in found.values():
        assert part.cut_share == pytest.approx(0.75, abs=0.05)
    assert found["random"].balance == 1 and found["hash"].balance < 1.4
    pytest.importorskip("pymetis")
    metis = partition(graph, 4, "metis", 3)
    assert metis.cut_share < 0.2 and metis.balance < 1.1
    rows = np.repeat(metis.owner, graph.degrees)
    assert metis.cut == np.sum(rows != metis.owner[graph.indices]) / 2
    np.testing.assert_array_equal(metis.owner, partition(graph, 4, "metis", 3).owner)
    assert "edges cut" in str(metis) and metis.sizes.sum() == 400


def test_one_part_has_everything() -> None:
    for method in ("metis", "random", "hash"):
        part = partition(PATH, 1, method)
        assert (part.cut, part.balance, list(part.owner)) == (0, 1.0, [0, 0, 0])


# ------------------------------------------------------------------------------------ closed forms
def test_the_closed_forms() -> None:
    """Skews match reference figures at c = 0.595, and their defining equations for all c."""
    for budget, skew, less in (
        (1.1, 1.88, 1.53),
        (1.5, 3.81, 2.67),
        (2, 5.98, 3.96),
        (4, 14.4, 8.96),
    ):
        s = tight_skew(budget, 0.595)
        assert s == pytest.approx(skew, abs=0.05) and normalizer(s, 0.595) == pytest.approx(
            less, abs=0.02
        )
    c, budget = np.linspace(0.001, 0.999, 333), 2.5
    np.testing.assert_allclose(normalizer(worst_case_skew(budget, c), c), budget, rtol=1e-12)
    s = tight_skew(budget, c)
    np.testing.assert_allclose(normalizer(s, c) * (c / s + 1 - c), budget, rtol=1e-10)
    x = np.random.default_rng(0).random(333) * 0.99
    s = tight_skew(budget, c, x)
    np.testing.assert_allclose(normalizer(s, c) * (x / s + 1 - x), budget, rtol=1e-9)
    np.testing.assert_allclose(tight_skew(budget, c, c), tight_skew(budget, c), rtol=1e-9)


@pytest.mark.parametrize("rule", ["tight", "worst", "measured"])
def test_rules_are_monotone_and_finite(rule: str) -> None:
    c = np.linspace(0, 1, 101)
    x = np.clip(c + 0.1, 0, 1)
    assert (skew_for(rule, 1.0, c, x) == 1).all()
    rows = [skew_for(rule, budget, c, x, most=20) for budget in (1, 1.1, 2, 4, 100)]
    for less, more in zip(rows, rows[1:], strict=False):
        assert np.isfinite(more).all() and (more >= less).all() and more.max() <= 20
    assert rows[2][0] == rows[2][-1] == 1  # all nodes are remote, or all are local


@pytest.mark.parametrize("seed", range(4))
def test_the_budget_of_the_second_moment(seed: int) -> None:
    """Skewed probabilities keep the second moment within the budget: M(q) <= D M(p).

    This holds for any features by the worst-case rule. By the tight rule, M(q) = D M(p).
    """
    draw, budget = np.random.default_rng(seed), 2.0
    p = draw.random(60)
    p /= p.sum()
    near = draw.random(60) < 0.4
    c = p[near].sum()

    def skewed(s: float) -> Array:
        weights = np.where(near, s * p, p)
        return weights / weights.sum()

    q = skewed(float(worst_case_skew(budget, c)))
    sizes = draw.exponential(size=(1000, 60)) ** 3
    assert ((sizes**2 / q).sum(1) <= budget * (sizes**2 / p).sum(1) * (1 + 1e-12)).all()
    q = skewed(float(tight_skew(budget, c)))
    assert (p**2 / q).sum() == pytest.approx(budget * (p**2 / p).sum(), rel=1e-12)
    a = sizes[0]
    x = (a**2 / p)[near].sum() / (a**2 / p).sum()
    s = float(tight_skew(budget, c, x))
    assert s == 1 or (a**2 / skewed(s)).sum() == pytest.approx(budget * (a**2 / p).sum())


# ---------------------------------------------------------------------------------- probabilities
@by_mode
@by_size
def test_probabilities(size: Any, mode: str) -> None:
    """q sums to 1, prefers local nodes by the factor s, and has a remote share (1 - c) / kappa."""
    graph, owner = blocks_of_nodes()
    sampler = SkewedSampler(graph, owner, 1, **size, budget=2, mode=mode, rule="tight", most=1e9)
    targets = np.flatnonzero(owner == 1)[:30]
    for nodes, p, q in distributions(sampler, targets):
        near = owner[nodes] == 1
        c = p[near].sum()
        assert q.sum() == pytest.approx(1, abs=1e-12) and p.sum() == pytest.approx(1, abs=1e-12)
        s = float(tight_skew(2, c))
        np.testing.assert_allclose((q / p)[near], s / normalizer(s, c), rtol=1e-9)
        assert q[~near].sum() == pytest.approx((1 - c) / normalizer(s, c), abs=1e-12)


def distributions(sampler: SkewedSampler, targets: Array) -> Any:
    """Yield (nodes, p, q) for each distribution of a layer, from the sampler's own steps."""
    graph = sampler.graph
    if sampler.by_node:
        for v in targets:
            start, stop = graph.indptr[v], graph.indptr[v + 1]
            if stop - start > sampler.sizes[0]:
                places = np.arange(start, stop)
                local, skew = sampler._node_skews(np.array([v]), 0, 0)
                lists = lists_of(sampler, start, stop, local, skew)
                q = lists.probabilities(np.zeros(len(places), np.int64), places)
                yield graph.indices[places], np.full(len(places), 1 / len(places)), q
        return
    columns = np.unique(
        np.concatenate([graph.indices[graph.indptr[v] : graph.indptr[v + 1]] for v in targets])
    )
    squares = (dense(graph) - np.diag(graph.own))[np.ix_(targets, columns)] ** 2
    base = squares.sum(0)
    yield columns, base / base.sum(), sampler._layer_skewed(columns, base, base, 0, 0)


def lists_of(sampler: SkewedSampler, start: int, stop: int, local: Array, skew: Array) -> Any:
    from accordion_hvd.graph.draws import Lists

    degree = np.array([stop - start])
    return Lists(np.array([start]), degree, skew, local, sampler._is_local)


@by_size
def test_the_budget_is_kept_by_what_is_drawn_from(size: Any) -> None:
    """Distributions over local and remote nodes have M(q) = D M(p) for features of equal norm."""
    graph, owner = blocks_of_nodes()
    sampler = SkewedSampler(graph, owner, 1, **size, budget=2, most=1e9)
    matrix, seen = dense(graph) - np.diag(graph.own), 0
    targets = np.flatnonzero(owner == 1)[:30]
    several = distributions(sampler, targets)
    for number, (nodes, p, q) in enumerate(several):
        rows = targets[graph.degrees[targets] > 4][[number]] if sampler.by_node else targets
        squares = (matrix[np.ix_(rows, nodes)] ** 2).sum(0)
        if 0 < p[owner[nodes] == 1].sum() < 1:
            seen += 1
            ratio = (squares / q).sum() / (squares / p).sum()
            assert ratio == pytest.approx(2, rel=1e-6)
    assert seen >= (10 if sampler.by_node else 1)


@by_mode
@by_size
def test_the_trace_says_what_was_drawn(size: Any, mode: str) -> None:
    """The trace has the p and q of the sampled distributions, and the weights of values.

    A weight is 1 over the inclusion probability, or a multiple of 1 / (m q) for i.i.d. draws.
    """
    graph, owner = blocks_of_nodes()
    sampler = SkewedSampler(graph, owner, 1, **size, budget=2, mode=mode)
    targets = np.flatnonzero(owner == 1)[:30]
    (block,) = sampler.sample(targets, trace=True)
    assert block.trace is not None and len(block.trace.columns)
    known = {row for drawn in distributions(sampler, targets) for row in rows_of(*drawn)}
    trace = block.trace
    assert set(rows_of(block.sources[trace.columns], trace.p, trace.q)) <= known
    m = sampler.sizes[0]
    if mode == "iid":
        np.testing.assert_allclose(trace.weight * m * trace.q, np.rint(trace.weight * m * trace.q))
        return
    rates = {
        row: rate
        for nodes, p, q in distributions(sampler, targets)
        for row, rate in zip(rows_of(nodes, p, q), inclusion(mode, q, m), strict=True)
    }
    drawn = rows_of(block.sources[trace.columns], trace.p, trace.q)
    np.testing.assert_allclose(1 / trace.weight, [rates[row] for row in drawn])


def inclusion(mode: str, q: Array, m: int) -> Array:
    """Return the probability of each node to be drawn.

    "fixed": min(1, r q), where bisection finds the r for which the sum is m.
    """
    if mode == "iid":
        return 1 - (1 - q) ** m
    if mode == "bernoulli":
        return np.minimum(1, m * q)
    low, high = 0.0, m / q.min()
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if np.minimum(1, middle * q).sum() < m else (low, middle)
    return np.minimum(1, high * q)


def rows_of(nodes: Array, p: Array, q: Array) -> list[tuple[int, float, float]]:
    return list(zip(nodes.tolist(), np.round(p, 10), np.round(q, 10), strict=True))


# ------------------------------------------------------------------------------------ the estimate
@by_mode
@by_size
@pytest.mark.parametrize("reweight", [True, False])
def test_unbiased(size: Any, mode: str, reweight: bool) -> None:
    """The mean of many estimates is A h, but not without re-weighting (the negative control)."""
    graph, owner = blocks_of_nodes(120, 14)
    sampler = SkewedSampler(
        graph, owner, 0, **size, budget=4, mode=mode, reweight=reweight, rule="tight"
    )
    some = [7, *np.flatnonzero(owner == 0)[:12], *np.flatnonzero(owner == 2)[:4]]
    targets = np.unique(some)
    features = np.random.default_rng(0).standard_normal((120, 3)) + owner[:, None]
    exact, draws = dense(graph)[targets] @ features, 1500 if reweight else 500
    found = np.stack([estimate(sampler, targets, features, step) for step in range(draws)])
    error = (found.mean(0) - exact) / (found.std(0) / np.sqrt(draws) + 1e-9)
    if reweight:
        assert np.abs(error).max() < 4.5, "51 values within their standard errors"
        assert np.mean(error**2) < 2.0
    else:
        assert np.abs(error).max() > 20


def estimate(sampler: Sampler, targets: Array, features: Array, step: int) -> Array:
    (block,) = sampler.sample(targets, step=step)
    return block.aggregate(features[block.sources])


@pytest.mark.parametrize("mode", ["bernoulli", "iid"])
def test_variance_is_what_theory_says(mode: str) -> None:
    """The layer-wise variance, summed over targets, is within 5 % of the theory.

    The theory is (M(q) - ||AH||^2) / m for i.i.d. draws, and sum a^2 (1 / pi - 1) for Bernoulli
    draws.
    """
    graph, owner = blocks_of_nodes(200, 14)
    sampler = SkewedSampler(graph, owner, 0, layer_size=30, budget=2, mode=mode)
    targets = np.flatnonzero(owner == 0)[:25]
    features = np.random.default_rng(0).standard_normal((200, 4))
    ((nodes, _, q),) = distributions(sampler, targets)
    matrix = (dense(graph) - np.diag(graph.own))[np.ix_(targets, nodes)]
    squares = (matrix**2).sum(0) * (features[nodes] ** 2).sum(1)
    if mode == "iid":
        theory = ((squares / q).sum() - ((matrix @ features[nodes]) ** 2).sum()) / 30
    else:
        theory = (squares * (1 / np.minimum(1, 30 * q) - 1)).sum()
    found = np.stack([estimate(sampler, targets, features, step) for step in range(3000)])
    assert found.var(0).sum() == pytest.approx(theory, rel=0.05)


@by_mode
@by_size
def test_remote_rows_are_what_the_formula_says(size: Any, mode: str) -> None:
    """The mean number of remote rows is within 3 % of E[U_rem], which is less for a larger s."""
    graph, owner = blocks_of_nodes(600, 20)
    targets, seen = np.flatnonzero(owner == 1)[:40], []
    for s in (1, 2, 4, 8):
        sampler = SkewedSampler(graph, owner, 1, **size, skew=s, mode=mode)
        away = np.ones(600)  # probability that a node is not drawn, for all targets together
        m = sampler.sizes[0]
        for nodes, _, q in distributions(sampler, targets):
            away[nodes] *= 1 - inclusion(mode, q, m)
        if sampler.by_node:  # low degrees are taken whole
            for v in targets[graph.degrees[targets] <= m]:
                away[graph.indices[graph.indptr[v] : graph.indptr[v + 1]]] = 0
        expected = (1 - away)[owner != 1].sum()
        counts = [
            np.sum(owner[sampler.sample(targets, step=step)[0].sources] != 1)
            for step in range(300 if sampler.by_node else 1500)
        ]
        assert np.mean(counts) == pytest.approx(expected, rel=0.03)
        seen.append(expected)
    assert seen == sorted(seen, reverse=True) and seen[0] > 1.4 * seen[-1]


# ------------------------------------------------------------------- a fixed number of neighbours
STAR = Graph.from_edges(np.stack([np.zeros(12, int), np.arange(1, 13)]), 13, "mean")


def drawn_from(sampler: Sampler, steps: int) -> Array:
    """Return masks of the first node's neighbours in many samples, of shape (steps, neighbours)."""
    masks = np.zeros((steps, sampler.graph.nodes), bool)
    for step in range(steps):
        masks[step, sampler.sample([0], step=step)[0].sources] = True
    return masks[:, 1:]


@pytest.mark.parametrize(("nodes", "fanout"), [(7, 3), (13, 2)])
def test_fixed_size_is_without_replacement(nodes: int, fanout: int) -> None:
    """All subsets of `fanout` neighbours are equally likely, in short and in long lists."""
    edges = np.stack([np.zeros(nodes - 1, int), np.arange(1, nodes)])
    masks = drawn_from(Sampler(Graph.from_edges(edges, nodes), fanout=fanout, mode="fixed"), 3000)
    assert (masks.sum(1) == fanout).all()
    _, counts = np.unique(masks, axis=0, return_counts=True)
    subsets = math.comb(nodes - 1, fanout)
    expected = len(masks) / subsets
    assert len(counts) == subsets
    squares = ((counts - expected) ** 2 / expected).sum()
    assert squares < subsets - 1 + 4 * np.sqrt(2 * (subsets - 1)), "chi-square, 4 deviations"


@pytest.mark.parametrize("fanout", [2, 5])
@pytest.mark.parametrize("skew", [1.0, 6.0, 50.0])
def test_fixed_size_has_the_inclusion_probabilities(fanout: int, skew: float) -> None:
    """Exactly `fanout` neighbours are drawn, each with probability min(1, r q)."""
    owner = (np.arange(13) > 4).astype(int)  # neighbours 1 to 4 of the first node are local
    words: dict[str, Any] = {"skew": skew, "most": 50.0, "mode": "fixed"}
    sampler = SkewedSampler(STAR, owner, 0, fanout=fanout, **words)
    masks = drawn_from(sampler, 1000)
    assert (masks.sum(1) == fanout).all()
    q = np.where(owner[1:] == 0, skew, 1.0)
    rate = inclusion("fixed", q / q.sum(), fanout)
    error = np.sqrt(rate * (1 - rate) / len(masks))
    assert (np.abs(masks.mean(0) - rate) <= 4.5 * error + 1e-12).all()
    (block,) = sampler.sample([0])
    taken = block.sources[block.columns[1:]]
    np.testing.assert_allclose(block.values[1:], 1 / 13 / rate[taken - 1], rtol=1e-6)


@pytest.mark.parametrize("size", [5, 20, 35])
def test_fixed_size_of_a_layer(size: int) -> None:
    graph, owner = blocks_of_nodes(200, 14)
    sampler = SkewedSampler(graph, owner, 0, layer_size=size, budget=2, mode="fixed")
    targets = np.flatnonzero(owner == 0)[:10]
    ((nodes, _, q),) = distributions(sampler, targets)
    assert len(nodes) > 40
    counts = np.zeros(200)
    for step in range(1500):
        (block,) = sampler.sample(targets, step=step, trace=True)
        drawn = block.sources[block.trace.columns]  # type: ignore[union-attr]
        assert len(np.unique(drawn)) == size
        counts[drawn] += 1
    rate = inclusion("fixed", q, size)
    error = np.sqrt(rate * (1 - rate) / 1500)
    assert (np.abs(counts[nodes] / 1500 - rate) <= 4.5 * error + 1e-12).all()


def mean_square(sampler: Sampler, targets: Array, features: Array, draws: int = 600) -> float:
    """Return the mean squared error of the estimate of A h, summed over targets and features."""
    exact = dense(sampler.graph)[targets] @ features
    found = (estimate(sampler, targets, features, step) for step in range(draws))
    return float(np.mean([((values - exact) ** 2).sum() for values in found]))


@pytest.mark.parametrize("normalization", ["mean", "symmetric"])
def test_the_variance_without_replacement(normalization: str) -> None:
    """The variance without replacement follows Cochran (1977), and is below the other modes'.

    It is the sum over targets of d^2 / f (1 - f / d) S^2.
    """
    graph, owner = blocks_of_nodes(300, 14, normalization=normalization)
    targets, fanout = np.flatnonzero(owner == 0)[:40], 4
    features = np.maximum(np.random.default_rng(0).standard_normal((300, 3)), 0)
    full, theory = dense(graph) - np.diag(graph.own), 0.0
    for v in targets[graph.degrees[targets] > fanout]:
        d = graph.degrees[v]
        parts = full[v, full[v] > 0][:, None] * features[full[v] > 0]
        theory += (d * d / fanout * (1 - fanout / d) * parts.var(0, ddof=1)).sum()
    found = {
        mode: mean_square(Sampler(graph, fanout=fanout, mode=mode), targets, features)
        for mode in MODES
    }
    assert found["fixed"] == pytest.approx(theory, rel=0.05)
    assert 1.2 * found["fixed"] < min(found["bernoulli"], found["iid"])


def test_equal_features_and_mean_aggregation() -> None:
    """With equal features, the mean has an error only if the number of neighbours is random."""
    graph, owner = blocks_of_nodes(300, 14, normalization="mean")
    targets, ones = np.flatnonzero(owner == 0)[:40], np.ones((300, 1))
    error = {
        mode: mean_square(Sampler(graph, fanout=4, mode=mode), targets, ones, 50) / 40
        for mode in MODES
    }
    assert error["fixed"] < 1e-12 and error["iid"] < 1e-12 and error["bernoulli"] > 0.05


@by_mode
def test_the_budget_bounds_second_moments_and_not_variances(mode: str) -> None:
    """At D = 2 with equal features, M(q) <= 2 M(p), but the variance more than doubles.

    The second moment of the estimate stays within D, too. The variance rises by (D - 1) M(p) / m
    at most, with equality for i.i.d. draws where the budget is reached.
    """
    graph, owner = blocks_of_nodes(300, 14, normalization="mean")
    targets, ones, m = np.flatnonzero(owner == 0)[:40], np.ones((300, 1)), 4
    words: dict[str, Any] = {"fanout": m, "mode": mode, "most": 1e9}
    base = SkewedSampler(graph, owner, 0, budget=1, **words)
    skewed = SkewedSampler(graph, owner, 0, budget=2, **words)
    before, after = (mean_square(sampler, targets, ones, 800) for sampler in (base, skewed))
    square = ((dense(graph)[targets] @ ones) ** 2).sum()
    assert after + square <= 2 * (before + square)
    full, added = dense(graph) - np.diag(graph.own), 0.0
    for v, (nodes, p, q) in zip(
        targets[graph.degrees[targets] > m], distributions(skewed, targets), strict=True
    ):
        squares = full[v, nodes] ** 2
        moments = (squares / q).sum(), (squares / p).sum()
        assert moments[0] <= 2 * moments[1] * (1 + 1e-9)
        added += (moments[0] - moments[1]) / m
    if mode == "iid":
        assert before < 1e-10 and after == pytest.approx(added, rel=0.1)
    elif mode == "fixed":
        assert before < 1e-10 and 0.01 * added < after < added
    else:
        assert 2 * before < after


# ------------------------------------------------------------------------------------- the limits
@by_mode
@by_size
def test_without_skew_it_is_the_base_sampler(size: Any, mode: str) -> None:
    """Without a skew, samples equal those of the base sampler to the bit.

    There is no skew for s = 1, for D = 1, if all nodes are local, and during the warm-up.
    """
    graph, owner = blocks_of_nodes(3000, 40)
    deep = {key: (value, value) for key, value in size.items()}
    targets = np.arange(0, 3000, 30)
    base = Sampler(graph, **deep, mode=mode, seed=3, rank=2).sample(targets, 1, 5)
    words: dict[str, Any] = {"mode": mode, "seed": 3, **deep}
    alike = [
        SkewedSampler(graph, owner, 2, **words, skew=1),
        SkewedSampler(graph, owner, 2, **words, budget=1),
        SkewedSampler(graph, np.full(3000, 2), 2, **words, budget=4),
        SkewedSampler(graph, owner, 2, **words, budget=4, warmup=10**18),
    ]
    for sampler in alike:
        for mine, theirs in zip(sampler.sample(targets, 1, 5), base, strict=True):
            for key in ("sources", "rows", "columns", "values"):
                np.testing.assert_array_equal(getattr(mine, key), getattr(theirs, key))
    skewed = SkewedSampler(graph, owner, 2, **words, budget=2).sample(targets, 1, 5)
    assert len(skewed[0].rows) != len(base[0].rows) or (skewed[0].sources != base[0].sources).any()


@pytest.mark.parametrize("size", [{"fanout": 10**6}, {"layer_size": 10**6}, {"fanout": [None]}])
@by_mode
def test_everything_is_the_exact_graph(size: Any, mode: str) -> None:
    graph, owner = blocks_of_nodes()
    targets = np.random.default_rng(0).permutation(400)[:50]
    features = np.random.default_rng(1).standard_normal((400, 5))
    sampler = SkewedSampler(graph, owner, 1, **size, budget=4, mode=mode)
    np.testing.assert_allclose(
        estimate(sampler, targets, features, 0), dense(graph)[targets] @ features, atol=1e-6
    )


def test_low_degrees_and_own_terms_are_exact() -> None:
    graph, owner = blocks_of_nodes()
    sampler = SkewedSampler(graph, owner, 1, fanout=4, budget=4)
    few = np.flatnonzero(graph.degrees <= 4)[:20]
    many = np.flatnonzero(graph.degrees > 4)[:20]
    assert len(few)
    (block,) = sampler.sample(np.concatenate([few, many]))
    matrix = np.zeros((block.targets, 400))
    matrix[block.rows, block.sources[block.columns]] = block.values
    targets = block.sources[: block.targets]
    full = dense(graph)[targets]
    np.testing.assert_allclose(matrix[: len(few)], full[: len(few)], atol=1e-7)
    np.testing.assert_allclose(matrix[np.arange(len(targets)), targets], graph.own[targets])
    assert np.abs(matrix[len(few) :] - full[len(few) :]).max() > 0.01


@pytest.mark.parametrize("mode", ["fixed", "bernoulli"])
def test_neighbours_of_a_hub_are_drawn_with_the_right_probabilities(mode: str) -> None:
    """A remote neighbour of a hub is drawn an eighth as often as a local one, as skew=8 demands."""
    nodes, fanout = 4000, 20
    edges = np.stack([np.zeros(nodes - 1, int), np.arange(1, nodes)])
    graph = Graph.from_edges(edges, nodes)
    owner = (np.arange(nodes) >= 1000).astype(int)
    sampler = SkewedSampler(graph, owner, 0, fanout=fanout, skew=8, mode=mode)
    counts = np.zeros(nodes)
    for step in range(2000):
        sources = sampler.sample([0], step=step)[0].sources
        counts[sources] += 1
        assert mode == "bernoulli" or len(sources) == 1 + fanout
    local = 999 / 3999
    far = fanout / 3999 / normalizer(8, local)
    for part, rate in ((counts[1:1000], 8 * far), (counts[1000:], far)):
        expected = 2000 * rate
        assert part.mean() == pytest.approx(expected, rel=0.03)
        assert part.var() == pytest.approx(expected * (1 - rate), rel=0.15)


def test_blocks_fit_together() -> None:
    """The targets of a block are the next block's sources; entries are in order and unique."""
    graph, owner = blocks_of_nodes()
    for size in ({"fanout": (4, 3, 2)}, {"layer_size": (30, 60, 90)}):
        for mode in MODES:
            sampler = SkewedSampler(graph, owner, 0, **size, mode=mode)  # type: ignore[arg-type]
            targets = np.random.default_rng(0).permutation(400)[:25]
            blocks = sampler.sample(targets, 2, 3)
            assert len(blocks) == 3
            np.testing.assert_array_equal(blocks[-1].sources[:25], targets)
            for early, late in zip(blocks, blocks[1:], strict=False):
                np.testing.assert_array_equal(early.sources[: early.targets], late.sources)
            for block in blocks:
                assert (np.diff(block.rows) >= 0).all()
                keys = block.rows * len(block.sources) + block.columns
                assert len(np.unique(keys)) == len(keys) == block.indptr[-1]
                assert len(np.unique(block.sources)) == len(block.sources)
    assert sampler.sample(np.zeros(0, int))[0].sources.size == 0


def test_draws_depend_on_rank_epoch_step_and_hop_alone() -> None:
    graph, owner = blocks_of_nodes()

    def drawn(rank: int = 0, epoch: int = 0, step: int = 0, seed: int = 0) -> bytes:
        sampler = SkewedSampler(graph, np.zeros(400, int), rank, layer_size=20, seed=seed)
        sampler.sample([1, 2, 3], 7, 7)  # what was drawn before does not matter
        return sampler.sample(np.arange(50), epoch, step)[0].sources.tobytes()

    methods = [{}, {"rank": 1}, {"epoch": 1}, {"step": 1}, {"seed": 1}]
    assert len({drawn(**method) for method in methods}) == 5
    assert drawn() == drawn()


# ---------------------------------------------------------------------------- schedule and guard
def test_warmup() -> None:
    graph, owner = blocks_of_nodes()
    sampler = SkewedSampler(graph, owner, 0, layer_size=40, skew=9, warmup=4)
    assert [float(sampler.skews(0.5, 0.5, 0, epoch)) for epoch in range(6)] == [1, 3, 5, 7, 9, 9]


def test_the_guard_measures_the_ratio() -> None:
    """The guard estimates M(q) / M(p).

    Beyond the budget, the guard halves s - 1; within the budget, s recovers.
    """
    graph, owner = blocks_of_nodes(600, 20)
    guard = SecondMomentGuard(growth=1.5)
    sampler = SkewedSampler(graph, owner, 0, layer_size=60, budget=2, mode="iid", guard=guard)
    targets = np.flatnonzero(owner == 0)[:50]
    features = np.random.default_rng(0).standard_normal((600, 3))
    features[owner != 0] *= 6  # remote features are long: the tight rule cannot know
    norms = np.linalg.norm(features, axis=1)
    ((nodes, p, q),) = distributions(sampler, targets)
    matrix = (dense(graph) - np.diag(graph.own))[np.ix_(targets, nodes)]
    squares = (matrix**2).sum(0) * norms[nodes] ** 2
    exact = (squares / q).sum() / (squares / p).sum()
    assert exact > 2
    ratios = []
    for step in range(300):
        guard.factors.clear()
        blocks = sampler.sample(targets, step=step, trace=True)
        ratios += sampler.observe(blocks, [norms[blocks[0].sources]])
    assert np.mean(ratios) == pytest.approx(exact, rel=0.05)
    assert guard.factors[0] == 0.5 and sampler.strength(0, 0) == 0.5
    for step in range(200):
        blocks = sampler.sample(targets, step=step, trace=True)
        sampler.observe(blocks, [norms[blocks[0].sources]])
    ((_, _, q),) = distributions(sampler, targets)
    assert (squares / q).sum() / (squares / p).sum() < 2.5, "the skew has been taken back"
    before = guard.factors[0]
    guard.observe(0, blocks[0].trace, norms[blocks[0].sources], budget=1e9)  # type: ignore[arg-type]
    assert guard.factors[0] > before


def test_the_probe_suspends_the_skew() -> None:
    guard = SecondMomentGuard(tolerance=0.1)
    assert not guard.probe(1.0, 1.05, epoch=3) and guard.factor(0, 3) == 1
    assert guard.probe(1.0, 1.3, epoch=3)
    assert [guard.factor(0, epoch) for epoch in (3, 4, 5)] == [0, 0, 1]
    assert guard.probe(1.0, float("nan"), epoch=5)


# ----------------------------------------------------------------------------------- what it is for
def test_a_linear_network_learns_as_well_from_fewer_rows() -> None:
    """With s = 4, the loss is within 2 % of that of s = 1, for at most half the remote rows.

    Four ranks solve least squares on A X. Without re-weighting, the loss is over 5 % higher.
    """
    graph, owner = blocks_of_nodes(800, 14)
    draw = np.random.default_rng(1)
    features = draw.standard_normal((800, 6)) + draw.standard_normal((4, 6))[owner] / 2
    exact = dense(graph) @ features
    wanted = exact @ draw.standard_normal((6, 1)) + draw.standard_normal((800, 1)) / 2
    parts = [np.flatnonzero(owner == rank) for rank in range(4)]

    def trained(**words: Any) -> tuple[float, int]:
        """Return the mean squared error with all neighbours, and the number of remote rows.

        Gradients are products of two estimates, which must be independent to be unbiased.
        """
        words |= {"layer_size": 120, "mode": "bernoulli"}
        samplers = [SkewedSampler(graph, owner, r, **words) for r in range(4)]
        weights, remote = np.zeros((6, 1)), 0
        for step in range(150):
            total = np.zeros_like(weights)
            for rank, sampler in enumerate(samplers):
                targets = np.random.default_rng([step, rank]).choice(parts[rank], 40, False)
                blocks = [sampler.sample(targets, 0, 2 * step + which)[0] for which in (0, 1)]
                remote += sum(np.sum(owner[block.sources] != rank) for block in blocks)
                one, two = (block.aggregate(features[block.sources]) for block in blocks)
                total += one.T @ (two @ weights - wanted[targets]) / 160
            weights -= 0.5 / (1 + step / 50) * total
        return float(np.mean((exact @ weights - wanted) ** 2)), remote

    base, rows = trained(skew=1)
    skewed, fewer = trained(skew=4)
    biased, _ = trained(skew=4, reweight=False)
    assert skewed < 1.02 * base and 2 * fewer <= rows
    assert biased > 1.05 * base
