"""Training of a GCN with several samplers, in PyTorch or Keras."""

from __future__ import annotations

import importlib
import itertools
import time
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np

from accordion_hvd.comm.agreement import gather
from accordion_hvd.graph import (
    Block,
    FeatureStore,
    Graph,
    Partition,
    Sampler,
    SecondMomentGuard,
    SkewedSampler,
    partition,
)
from accordion_hvd.graph.store import communicator_of
from accordion_hvd.graph.structure import Array
from examples.data import GraphData
from examples.graph.config import GraphSettings
from examples.results import Row, write_json

FORMAT = 1
COUNTED = ("remote", "sent", "received")


class Network(Protocol):
    """A GCN and its optimizer in one framework; see `torch_model` and `keras_model`.

    Attributes:
        exchange: the exchange of the optimizer; None if there is only one rank.
    """

    exchange: Any

    def step(self, blocks: tuple[Block, ...], x: Array, labels: Array, share: float) -> float:
        """Take one optimizer step and return the loss: the sum over the batch times `share`."""

    def layer(self, number: int, block: Block, x: Array) -> Array:
        """Return the output of one layer without dropout."""


class Comparison:
    """The graph, its partition and the feature store, which all trainings share. Collective.

    Args:
        settings: settings of the comparison.
        data: the graph and its features.
    """

    def __init__(self, settings: GraphSettings, data: GraphData) -> None:
        self.settings, self.data = settings, data
        self.frame = importlib.import_module(f"examples.graph.{settings.framework}_model")
        self.hvd = self.frame.hvd
        self.hvd.init()
        self.rank, self.size = self.hvd.rank(), self.hvd.size()
        self.frame.prepare()
        self.graph = Graph.from_edges(data.edges, data.nodes)
        self.part: Partition = partition(self.graph, self.size, settings.partition)
        self.mine = np.flatnonzero(self.part.owner == self.rank)
        self.train = data.train[self.part.owner[data.train] == self.rank]
        most = np.bincount(self.part.owner[data.train], minlength=self.size).max()
        self.steps = -(-int(most) // settings.batch_size)
        self.store = self._store(data.features[self.mine], "features", settings.rows_as())
        self.store.agree()
        self.exact = self._exact_block()
        self.link = communicator_of(self.frame.FRAMEWORK)

    def _store(self, rows: Array, name: str, wire: str | None = None) -> FeatureStore:
        return FeatureStore(
            rows, self.part, self.frame.FRAMEWORK, graph=self.graph, compression=wire, name=name
        )

    def _exact_block(self) -> tuple[Block, Array]:
        """Return the exact block of this rank's nodes and its features, for evaluations."""
        (block,) = Sampler(self.graph, fanout=[None]).sample(self.mine)
        store = self._store(self.data.features[self.mine], "evaluation")
        return block, store.fetch(block.sources)

    # -------------------------------------------------------------------------------- one training
    def run(self, method: dict[str, float], seed: int) -> Row:
        """Train once, and return the entry for `result.json`."""
        settings = self.settings
        guard = SecondMomentGuard() if settings.guard and "budget" in method else None
        options = settings.sampler() | method | {"seed": seed, "guard": guard}
        sampler = SkewedSampler(self.graph, self.part, self.rank, **options)
        depth = len(settings.sizes)
        sizes = [self.store.features, *[settings.width] * (depth - 1), self.data.classes]
        network: Network = self.frame.build(settings, sizes, seed)
        rows, batches = list[Row](), self._batches(sampler, seed)
        self.counted = self.store.stats()
        for epoch in range(settings.epochs):
            rows.append({"epoch": epoch, **self._epoch(network, sampler, batches, epoch)})
            last = epoch + 1 == settings.epochs
            if (epoch + 1) % settings.evaluate == 0 or last:
                rows[-1] |= self._accuracies(network)
        best = max(
            (row for row in rows if "validation" in row),
            key=lambda row: (row["validation"], row["epoch"]),
        )
        stats = network.exchange.stats() if network.exchange is not None else {"sent": 0.0}
        return {
            **method,
            "seed": seed,
            "accuracy": best["test"],
            "last_accuracy": rows[-1]["test"],
            **{key: sum(row[key] for row in rows) / len(rows) for key in COUNTED},
            "seconds": float(np.median([row["seconds"] for row in rows])),
            "waited": float(np.median([row["waited"] for row in rows])),
            "gradients_sent": stats["sent"] / len(rows),
            "epochs": rows,
        }

    def _epoch(
        self, network: Network, sampler: SkewedSampler, batches: Iterator[Any], epoch: int
    ) -> Row:
        """Train for one epoch; return counts over all ranks and seconds of the slowest rank."""
        began, loss = time.perf_counter(), 0.0
        for step, (targets, blocks, x) in enumerate(itertools.islice(batches, self.steps)):
            share = self.size / self._batch_of_all(step)
            loss += network.step(blocks, x, self.data.labels[targets], share) / self.steps
            if sampler.guard is not None and sampler.guard.due(epoch * self.steps + step):
                inputs = np.linalg.norm(x, axis=1)
                sampler.observe(blocks, [inputs, *[None] * (sampler.hops - 1)])
        seconds, after = time.perf_counter() - began, self.store.stats()
        local = {key: after[key] - self.counted[key] for key in (*COUNTED, "waited")}
        self.counted = after  # an unfinished fetch counts in the next epoch, when it ends
        sums = [loss / self.size, *(local[key] for key in COUNTED)]
        gathered = self._gather([*sums, seconds, local["waited"]])
        counts = gathered[:, : len(sums)].sum(0).tolist()
        slowest = gathered[:, len(sums) :].max(0).tolist()
        return dict(zip(("loss", *COUNTED, "seconds", "waited"), [*counts, *slowest], strict=True))

    def _batches(
        self, sampler: SkewedSampler, seed: int
    ) -> Iterator[tuple[Array, tuple[Block, ...], Array]]:
        """Yield targets, blocks and features of all steps of a training.

        Ranks own different numbers of training nodes but take equally many steps, so a rank with
        fewer nodes has smaller batches. With `prefetch`, the rows of the next batch are fetched
        during the computation of the current one.
        """
        trace, waiting = sampler.guard is not None, None
        for epoch in range(self.settings.epochs):
            order = np.random.default_rng([seed, epoch, self.rank]).permutation(self.train)
            for step, targets in enumerate(np.array_split(order, self.steps)):
                blocks = sampler.sample(targets, epoch, step, trace)
                if not self.settings.prefetch:
                    yield targets, blocks, self.store.fetch(blocks[0].sources)
                    continue
                rows = self.store.prefetch(blocks[0].sources)
                previous, waiting = waiting, (targets, blocks, rows)
                if previous is not None:
                    yield *previous[:2], self.store.result(previous[2])
        if waiting is not None:
            yield *waiting[:2], self.store.result(waiting[2])

    def _batch_of_all(self, step: int) -> int:
        """Return the number of training nodes of all ranks in a step."""
        counts = np.bincount(self.part.owner[self.data.train], minlength=self.size)
        return int(sum(len(part) for part in (_part(n, self.steps, step) for n in counts)))

    # ---------------------------------------------------------------------------------- evaluation
    def _accuracies(self, network: Network) -> Row:
        """Return validation and test accuracy with all neighbours.

        For each layer, a rank computes the values of its own nodes and fetches those of others.
        """
        block, x = self.exact
        values = np.zeros(0)
        for number in range(len(self.settings.sizes)):
            values = network.layer(number, block, x)
            if number + 1 < len(self.settings.sizes):
                x = self._store(values, "evaluation").fetch(block.sources)
        right = np.zeros(self.data.nodes, bool)
        right[self.mine] = values.argmax(1) == self.data.labels[self.mine]
        counts = []
        for nodes in (self.data.validation, self.data.test):
            counts += [right[nodes].sum(), np.isin(nodes, self.mine).sum()]
        validated, validation, tested, test = self._gather(counts).sum(0).tolist()
        return {"validation": validated / validation, "test": tested / test}

    def _gather(self, values: list[float]) -> Array:
        """Return the values of all ranks, with a row per rank.

        Horovod's own calls would keep a core busy while they wait.
        """
        mine = self.link.xp.asarray(np.array(values, np.float64))
        return np.array(self.link.run("figures", gather(self.link, mine)))


def _part(count: int, parts: int, number: int) -> range:
    """Return a range as long as part `number` of `np.array_split`."""
    size, remainder = divmod(count, parts)
    return range(size + (number < remainder))


def run(settings: GraphSettings, data: GraphData) -> Row:
    """Train with all samplers and seeds. Collective.

    Rank 0 writes `<output>/<name>/result.json` after each training.
    """
    from pathlib import Path

    comparison = Comparison(settings, data)
    part = comparison.part
    result: Row = {
        "format": FORMAT,
        "settings": settings.as_dict(),
        "ranks": comparison.size,
        "nodes": data.nodes,
        "edges": comparison.graph.edges,
        "features": comparison.store.features,
        "cut_share": part.cut_share,
        "balance": part.balance,
        "rank": comparison.rank,
        "runs": [],
    }
    path = Path(settings.output) / settings.name / "result.json"
    for number in range(settings.seeds):
        for method in settings.methods():
            row = comparison.run(method, settings.seed + number)
            result["runs"].append(row)
            if comparison.rank == 0:
                write_json(path, result)
                if settings.progress:
                    print(summary(row), flush=True)
    return result


def summary(row: Row) -> str:
    """Return a line about a training."""
    method = f"s = {row['skew']:g}" if "skew" in row else f"D = {row['budget']:g}"
    return (
        f"seed {row['seed']}  {method:8}  test accuracy {row['accuracy']:6.1%}  "
        f"{row['remote']:8.1f} remote rows and {row['received'] / 1e6:7.3f} MB an epoch, "
        f"{1000 * row['seconds']:7.1f} ms"
    )
