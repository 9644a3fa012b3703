"""Tests of the feature store: the rows that are fetched, their traffic, and refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from frameworks import NUMPY, TORCH, Framework, parameters

from accordion_hvd.check import PayloadError
from accordion_hvd.graph import FeatureStore, Graph, SkewedSampler, partition
from accordion_hvd.graph.rows import wire_of
from accordion_hvd.simulation.one_process import Hub, SimulatedCommunicator, lockstep

Array = np.ndarray
NODES, FEATURES = 60, 5
TABLE = np.random.default_rng(0).standard_normal((NODES, FEATURES)).astype(np.float32)
OWNER = np.random.default_rng(1).integers(0, 3, NODES)
FEW = pytest.mark.parametrize("framework", parameters((NUMPY, TORCH)))


def stores(
    ranks: int = 3,
    owner: Array = OWNER,
    table: Array = TABLE,
    framework: Framework = NUMPY,
    change: Callable[[int, dict[str, Any]], None] = lambda rank, words: None,
    **words: Any,
) -> list[FeatureStore]:
    hub, made = Hub(ranks), []
    for rank in range(ranks):
        link = SimulatedCommunicator(hub, rank, framework.xp)
        mine = {"rows": table[owner == rank], "part": owner, "communicator": link, **words}
        change(rank, mine)
        made.append(FeatureStore(**mine))
    return made


def fetch(ranks: list[FeatureStore], nodes: list[Any]) -> list[Array]:
    links: Any = [store.communicator for store in ranks]
    return lockstep(links, [s.fetching(x) for s, x in zip(ranks, nodes, strict=True)])


def refused(ranks: list[FeatureStore], nodes: list[Any]) -> list[str]:
    """Fetch with each rank in turn as the first one to run, and return each error.

    In one process, only the first error is raised; separate ranks would raise one each.
    """
    said = []
    for first in range(len(ranks)):
        for store in ranks:
            store.communicator.hub.sent.clear()  # type: ignore[attr-defined]
            store.communicator.hub.fetched.clear()  # type: ignore[attr-defined]
        order = [*range(first, len(ranks)), *range(first)]
        with pytest.raises((ValueError, PayloadError)) as refusal:
            fetch([ranks[i] for i in order], [nodes[i] for i in order])
        assert str(refusal.value).count("\n") == 0
        said.append(str(refusal.value))
    return said


# --------------------------------------------------------------------------------- what is fetched
@pytest.mark.parametrize("framework", parameters())
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_rows_are_those_of_the_table(framework: Framework, ranks: int) -> None:
    """Rows come in the order of the nodes asked for, which may repeat or be none."""
    owner = OWNER % ranks
    made = stores(ranks, owner, framework=framework)
    draw = np.random.default_rng(ranks)
    for count in (0, 1, 40, 200):
        nodes = [draw.integers(0, NODES, count + rank) for rank in range(ranks)]
        nodes[0] = nodes[0][:0] if count == 1 else nodes[0]
        for found, wanted in zip(fetch(made, nodes), nodes, strict=True):
            np.testing.assert_array_equal(found, TABLE[wanted])
            assert found.dtype == np.float32


@pytest.mark.parametrize("compression", [None, "dense", "fp16", "bf16", "int8"])
def test_counts(compression: Any) -> None:
    """`stats` counts distinct remote rows and their bytes.

    A feature takes 4, 2 or 1 bytes, and the number of a node takes 4.
    """
    made = stores(compression=compression)
    width = {None: 4, "dense": 4, "fp16": 2, "bf16": 2}.get(compression, 1) * FEATURES
    width += 4 if compression == "int8" else 0
    nodes = [np.random.default_rng(rank).integers(0, NODES, 50) for rank in range(3)]
    found = fetch(made, nodes)
    fetch(made, nodes)
    far = [len(np.unique(x[OWNER[x] != rank])) for rank, x in enumerate(nodes)]
    served = [
        sum(np.sum(OWNER[np.unique(x)] == rank) for peer, x in enumerate(nodes) if peer != rank)
        for rank in range(3)
    ]
    for rank, store in enumerate(made):
        stats = store.stats()
        assert (stats["fetches"], stats["rows"]) == (2, 100)
        assert (stats["remote"], stats["served"]) == (2 * far[rank], 2 * served[rank])
        assert stats["received"] == 2 * (width * far[rank] + 4 * served[rank])
        assert stats["sent"] == 2 * (width * served[rank] + 4 * far[rank])
        near = OWNER[nodes[rank]] == rank
        np.testing.assert_array_equal(found[rank][near], TABLE[nodes[rank]][near])
        error = np.abs(found[rank] - TABLE[nodes[rank]]).max(1)
        largest = np.abs(TABLE[nodes[rank]]).max(1)
        bound = {"fp16": 2**-11, "bf16": 2**-8, "int8": 0.5 / 127}.get(compression, 0)
        assert (error <= largest * bound * (1 + 1e-5)).all()


@pytest.mark.parametrize("word", ["dense", "fp16", "bf16", "int8"])
def test_wires(word: str) -> None:
    """Wires code no rows, rows of zeros, and single features; they decode views of any layout."""
    wire = wire_of(word)
    for rows in (TABLE, np.zeros((3, 4), np.float32), TABLE[:0], TABLE[:, :1].copy()):
        coded = wire.encode(rows)
        assert coded.shape == (len(rows), wire.width(rows.shape[1])) and coded.dtype == np.uint8
        back = wire.decode(coded[::-1], rows.shape[1])
        assert back.shape == rows.shape
        np.testing.assert_allclose(back, rows[::-1], rtol=0.01, atol=0.02)


def test_an_owner_of_nothing_takes_part() -> None:
    owner = np.where(OWNER == 2, 0, OWNER)
    made = stores(owner=owner)
    nodes = [np.arange(NODES)] * 3
    for found in fetch(made, nodes):
        np.testing.assert_array_equal(found, TABLE)
    assert made[2].stats()["remote"] == NODES and made[2].stats()["served"] == 0


def test_one_machine_fetches_nothing() -> None:
    (store,) = stores(1, OWNER * 0)
    np.testing.assert_array_equal(store.fetch(np.arange(NODES)), TABLE)
    stats = store.stats()
    assert stats["remote"] == stats["sent"] == stats["received"] == 0 and stats["rows"] == NODES


def test_prefetching_keeps_the_order() -> None:
    (store,) = stores(1, OWNER * 0)
    futures = [store.prefetch(np.array([i])) for i in range(20)]
    np.testing.assert_array_equal(store.fetch([30]), TABLE[[30]])
    for i, future in enumerate(futures):
        np.testing.assert_array_equal(store.result(future), TABLE[[i]])
    assert store.stats()["fetches"] == 21
    with pytest.raises(ValueError, match="a node is 60, but must be from 0 to 59"):
        store.result(store.prefetch([60]))
    np.testing.assert_array_equal(store.fetch([1]), TABLE[[1]])


@FEW
def test_sampled_batches(framework: Framework) -> None:
    """`stats` counts a sampler's remote sources, and a larger s fetches fewer rows."""
    draw = np.random.default_rng(0)
    group = draw.integers(0, 3, NODES)
    edges = draw.integers(0, NODES, (2, 900))
    edges = edges[:, (group[edges[0]] == group[edges[1]]) | (draw.random(900) < 0.3)]
    graph = Graph.from_edges(edges, NODES)
    part = partition(graph, 3, "random")
    remote = []
    for skew in (1, 8):
        made = stores(owner=part.owner, framework=framework, graph=graph)
        samplers = [SkewedSampler(graph, part, r, layer_size=8, skew=skew) for r in range(3)]
        due = np.zeros(3, int)
        for step in range(10):
            blocks = [
                sampler.sample(np.flatnonzero(part.owner == rank)[:6], 0, step)
                for rank, sampler in enumerate(samplers)
            ]
            sources = [block[0].sources for block in blocks]
            due += [np.sum(part.owner[x] != rank) for rank, x in enumerate(sources)]
            for found, wanted in zip(fetch(made, sources), sources, strict=True):
                np.testing.assert_array_equal(found, TABLE[wanted])
        assert [store.stats()["remote"] for store in made] == list(due)
        remote.append(due.sum())
    assert remote[1] < 0.7 * remote[0]


# -------------------------------------------------------------------------------- what is refused
def test_bad_features_are_told_to_all() -> None:
    def with_nan(rank: int, words: dict[str, Any]) -> None:
        if rank == 1:
            words["rows"] = words["rows"].copy()
            words["rows"][3, 2] = np.nan

    node = np.flatnonzero(OWNER == 1)[3]
    for said in refused(stores(change=with_nan), [[0]] * 3):
        assert said == (
            f"rank 1: FeatureStore: the row of node {node} has NaN or infinity, but features must "
            "be finite."
        )


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"rows": np.zeros((7, FEATURES))}, "rows is '7 rows', but must be"),
        ({"rows": np.zeros(7)}, "rows is 'of shape (7,) and type float64'"),
        ({"rows": np.zeros((int((OWNER == 1).sum()), FEATURES), int)}, "int64"),
        ({"part": OWNER + 1}, "an owner in part is 3"),
        ({"part": OWNER[:-1]}, "another number of nodes than rank 0"),
        ({"compression": "fp16"}, "another compression than rank 0"),
        ({"graph": Graph.from_edges([[0], [2]], NODES)}, "another graph than rank 0"),
        ({"graph": Graph.from_edges([[0], [2]], 3)}, "of the graph's 3"),
        (
            {"rows": np.zeros((int((OWNER == 1).sum()), FEATURES + 1))},
            "rank 1 has another number of features than rank 0",
        ),
        (
            {"rows": np.full((int((OWNER == 1).sum()), FEATURES), 1e5), "compression": "fp16"},
            "beyond 65504",
        ),
    ],
)
def test_ranks_that_differ(change: dict[str, Any], told: str) -> None:
    def changed(rank: int, words: dict[str, Any]) -> None:
        words |= change if rank == 1 else {}

    words = {"graph": Graph.from_edges([[0], [1]], NODES)} if "graph" in change else {}
    for said in refused(stores(change=changed, **words), [[0]] * 3):
        assert told in said


def test_another_partition() -> None:
    other = OWNER.copy()
    i, j = np.flatnonzero(OWNER == 0)[0], np.flatnonzero(OWNER == 2)[0]
    other[i], other[j] = 2, 0

    def changed(rank: int, words: dict[str, Any]) -> None:
        words |= {"part": other} if rank == 2 else {}

    for said in refused(stores(change=changed), [[0]] * 3):
        assert said.startswith("FeatureStore: rank 2 has another partition than rank 0")


@pytest.mark.parametrize("nodes", [[NODES], [-1], [0.5], [[0]]])
def test_nodes_that_do_not_exist(nodes: Any) -> None:
    """A request for a missing node fails on all ranks, and the stores remain usable."""
    made = stores()
    fetch(made, [[0]] * 3)
    said = refused(made, [[0], nodes, [2]])
    assert any("but must be" in text for text in said) or "rank 1 asked" in said[0]
    for store in made:
        store.communicator.hub.sent.clear()  # type: ignore[attr-defined]
    for found in fetch(made, [[5]] * 3):
        np.testing.assert_array_equal(found, TABLE[[5]])


def test_a_request_for_what_is_not_owned_is_doubted() -> None:
    made = stores()
    fetch(made, [[0]] * 3)
    moved = OWNER.copy()
    node = np.flatnonzero(OWNER == 0)[0]
    moved[node] = 2
    made[1].owner = moved  # as if its memory had been damaged
    said = refused(made, [[], [node], []])
    assert any("rank 1" in text and "does not own" in text for text in said)


def test_compressions_that_cannot_be() -> None:
    for word in ("topk:0.01", "powersgd:2"):
        with pytest.raises(ValueError, match="compression is .* but must be None, 'dense', 'fp16'"):
            stores(compression=word)
    with pytest.raises(ValueError, match="communicator is 'jax'"):
        FeatureStore(TABLE, OWNER * 0, "jax")
