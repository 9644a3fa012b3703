"""Tests of feature stores on real ranks: fetched rows, counts, and errors on all ranks."""

import harness
import numpy as np

NODES, FEATURES = 240, 7


def INIT() -> None:
    import horovod.torch as hvd

    hvd.init()


def size() -> int:
    import horovod.torch as hvd

    return hvd.size()


def world(compression=None, framework: str = "torch", name: str = "features", **changes):
    """Return a graph, its partition into one part per rank, and this rank's feature store."""
    from accordion_hvd.graph import FeatureStore, Graph, partition

    draw = np.random.default_rng(0)
    group = draw.integers(0, size(), NODES)
    edges = draw.integers(0, NODES, (2, 3000))
    edges = edges[:, (group[edges[0]] == group[edges[1]]) | (draw.random(3000) < 0.2)]
    graph = Graph.from_edges(edges, NODES)
    part = partition(graph, size(), "metis")
    rows = table()[part.owner == harness.RANK]
    words = {"graph": graph, "compression": compression, "name": name} | changes
    return graph, part, FeatureStore(words.pop("rows", rows), part, framework, **words)


def table() -> np.ndarray:
    return np.random.default_rng(1).standard_normal((NODES, FEATURES)).astype(np.float32)


def wanted(rank: int, step: int) -> np.ndarray:
    """Return the nodes whose rows a rank fetches; at step 2, the last rank fetches none."""
    count = 0 if step == 2 and rank == size() - 1 else 30 + 10 * rank
    return np.random.default_rng([rank, step]).integers(0, NODES, count)


def check_rows_and_counts() -> None:
    rows_and_counts("torch")


def rows_and_counts(framework: str) -> None:
    for word, width in ((None, 28), ("fp16", 14), ("int8", 11)):
        _, part, store = world(word, framework)
        remote = served = 0
        for step in range(4):
            mine = wanted(harness.RANK, step)
            found = store.fetch(mine)
            near = part.owner[mine] == harness.RANK
            np.testing.assert_array_equal(found[near], table()[mine[near]])
            np.testing.assert_allclose(found, table()[mine], atol=0.02 if word else 0)
            remote += len(np.unique(mine[~near]))
            for rank in set(range(size())) - {harness.RANK}:
                theirs = np.unique(wanted(rank, step))
                served += int((part.owner[theirs] == harness.RANK).sum())
        stats = store.stats()
        assert (stats["remote"], stats["served"]) == (remote, served)
        assert stats["received"] == width * remote + 4 * served
        assert stats["sent"] == width * served + 4 * remote


def check_prefetching_beside_other_collectives() -> None:
    """Rows come in the order of the requests while gradients are exchanged."""
    import horovod.torch as hvd
    import torch

    _, _, store = world()
    futures = [store.prefetch(wanted(harness.RANK, step)) for step in range(6)]
    for step, future in enumerate(futures):
        total = hvd.allreduce(torch.ones(1000), op=hvd.Sum, name=f"gradient.{step}")
        assert (total == size()).all()
        np.testing.assert_array_equal(store.result(future), table()[wanted(harness.RANK, step)])


def check_a_skewed_sampler_fetches_less() -> None:
    """A skew or a budget reduces the remote rows, which are the sampler's remote sources.

    With a skew of 1, `SkewedSampler` draws the same nodes as `Sampler`.
    """
    from accordion_hvd.graph import Sampler, SkewedSampler

    counts = []
    for method in ({"skew": 1}, {"budget": 2}, {"skew": 8}):
        graph, part, store = world()
        words = {"layer_size": (20, 40), "seed": 5}
        sampler = SkewedSampler(graph, part, harness.RANK, **words, **method)
        base = Sampler(graph, **words, rank=harness.RANK)
        mine, due = np.flatnonzero(part.owner == harness.RANK), 0
        for step in range(10):
            targets = np.random.default_rng([harness.RANK, step]).permutation(mine)[:16]
            blocks = sampler.sample(targets, 0, step)
            if method == {"skew": 1}:
                theirs = base.sample(targets, 0, step)
                np.testing.assert_array_equal(blocks[0].values, theirs[0].values)
            sources = blocks[0].sources
            due += int((part.owner[sources] != harness.RANK).sum())
            np.testing.assert_array_equal(store.fetch(sources), table()[sources])
        assert store.stats()["remote"] == due
        counts.append(everywhere(due))
    assert counts[0] > 1.5 * counts[1] and counts[0] > 1.5 * counts[2]


def everywhere(value: float) -> float:
    import horovod.torch as hvd
    import torch

    return float(hvd.allreduce(torch.tensor([float(value)]), op=hvd.Sum, name="everywhere"))


def refused(call) -> str:
    """Return the message, a single line, of the ValueError that `call` must raise."""
    try:
        call()
    except ValueError as error:
        assert "\n" not in str(error)
        return str(error)
    raise AssertionError("nothing was refused")


def check_bad_features_stop_all_ranks() -> None:
    _, part, _ = world()
    rows = table()[part.owner == harness.RANK]
    if harness.RANK == 1:
        rows[2, 3] = np.nan
    _, _, store = world(rows=rows)
    node = np.flatnonzero(part.owner == 1)[2]
    said = refused(lambda: store.fetch([0]))
    assert said.startswith(f"rank 1: FeatureStore: the row of node {node} has NaN"), said


def check_ranks_with_other_graphs_stop() -> None:
    from accordion_hvd.graph import Graph

    edges = [[0, 1], [1, 2 if harness.RANK else 3]]
    _, _, store = world(graph=Graph.from_edges(edges, NODES))
    said = refused(store.agree)
    assert said.startswith("FeatureStore: rank 1 has another graph than rank 0"), said


def check_a_node_that_does_not_exist_stops_all_ranks() -> None:
    _, _, store = world()
    last = size() - 1
    said = refused(lambda: store.fetch([NODES if harness.RANK == last else 3]))
    if harness.RANK == last:
        assert said == f"FeatureStore: a node is {NODES}, but must be from 0 to {NODES - 1}."
    else:
        assert said == f"FeatureStore: rank {last} asked for nodes that do not exist."
    np.testing.assert_array_equal(store.fetch([3, 5]), table()[[3, 5]])  # the store still works


def check_a_rank_that_owns_nothing() -> None:
    from accordion_hvd.graph import FeatureStore

    owner = np.arange(NODES) % (size() - 1)
    store = FeatureStore(table()[owner == harness.RANK], owner, "torch", name="empty")
    np.testing.assert_array_equal(store.fetch(np.arange(NODES)), table())
    assert store.stats()["served"] == 0 or harness.RANK < size() - 1


def check_the_guard_of_one_rank_is_its_own() -> None:
    """The guard reduces the skew most on the rank whose remote features are 30 times as large."""
    from accordion_hvd.graph import SecondMomentGuard, SkewedSampler

    graph, part, store = world()
    guard = SecondMomentGuard(every=1)
    sampler = SkewedSampler(graph, part, harness.RANK, layer_size=15, budget=1.5, guard=guard)
    mine, seen = np.flatnonzero(part.owner == harness.RANK)[:20], []
    for step in range(10):
        blocks = sampler.sample(mine, 0, step, trace=True)
        norms = np.linalg.norm(store.fetch(blocks[0].sources), axis=1)
        if harness.RANK == 0:
            norms[part.owner[blocks[0].sources] != 0] *= 30
        sampler.observe(blocks, [norms])
        seen.append(sampler.strength(0, 0))
    last = [everywhere(seen[-1] if harness.RANK == rank else 0) for rank in range(size())]
    assert last[0] < min(last[1:]), last


if __name__ == "__main__":
    harness.main(globals())
