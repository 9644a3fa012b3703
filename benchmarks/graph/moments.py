"""Second moments and variances of samplers, with equal and with random features."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from accordion_hvd.graph import Graph, Sampler, SkewedSampler, partition
from accordion_hvd.graph.sampler import MODES
from accordion_hvd.graph.structure import Array
from examples.data import load_graph
from examples.results import Row

BUDGETS = (1.0, 1.5, 2.0, 4.0)
FANOUT = 4
TARGETS = 256
PARTS = 4


def measure(nodes: int, draws: int) -> Row:
    """Estimate A h (one hop) and A A h (two hops) many times; print and return the errors.

    A takes the mean over neighbours. The features are all one, or the positive part of Gaussian
    numbers.

    Args:
        nodes: number of nodes of the block model.
        draws: number of estimates for each sampler.
    """
    data = load_graph("blocks", nodes)
    graph = Graph.from_edges(data.edges, data.nodes, "mean")
    part = partition(graph, PARTS)
    owned = np.flatnonzero(part.owner == 0)
    targets = np.random.default_rng(0).choice(owned, min(TARGETS, len(owned)), False)
    relu = np.maximum(np.random.default_rng(1).standard_normal((graph.nodes, 8)), 0)
    features = {"constant": np.ones((graph.nodes, 1)), "relu": relu}
    rows = []
    for mode, budget in itertools.product(MODES, BUDGETS):
        row: Row = {"mode": mode, "budget": budget}
        sampler = SkewedSampler(graph, part, 0, (FANOUT, FANOUT), mode=mode, budget=budget)
        for (name, x), hops in itertools.product(features.items(), (1, 2)):
            row[f"{name}_{hops}"] = _errors(sampler, targets, x, hops, draws)
        row["remote"] = _remote_rows(sampler, part.owner, targets, draws)
        rows.append(row)
        variance = row["relu_1"]["variance"]
        print(f"{mode:9} D = {budget:g}  variance {variance:.4f}", flush=True)
    about = {"nodes": nodes, "edges": graph.edges, "parts": str(part), "fanout": FANOUT}
    return {**about, "targets": len(targets), "draws": draws, "samplers": rows}


def _errors(sampler: SkewedSampler, targets: Array, x: Array, hops: int, draws: int) -> Row:
    """Return variance and second moment relative to ||A h||^2, and M(q) / M(p) of the first hop."""
    exact = _product(_all_neighbours(sampler, targets, hops), x)
    variance = moment = 0.0
    ratio = np.zeros(2)
    for step in range(draws):
        blocks = sampler.sample(targets, 0, step, trace=True)[-hops:]
        found = _product(blocks, x)
        variance += float(((found - exact) ** 2).sum())
        moment += float((found**2).sum())
        ratio += _moments(blocks[-1], x)
    total = draws * float((exact**2).sum())
    return {"variance": variance / total, "moment": moment / total, "ratio": ratio[0] / ratio[1]}


def _moments(block: Any, x: Array) -> Array:
    """Estimate M(q) and M(p) from the draws of a block."""
    trace = block.trace
    norms = np.linalg.norm(x[block.sources], axis=1)
    squares = (trace.size * norms[trace.columns]) ** 2 * trace.weight
    return np.array([(squares / trace.q).sum(), (squares / trace.p).sum()])


def _all_neighbours(sampler: SkewedSampler, targets: Array, hops: int) -> Sequence[Any]:
    return Sampler(sampler.graph, fanout=[None] * hops).sample(targets)


def _product(blocks: Sequence[Any], x: Array) -> Array:
    """Return the product of the blocks' matrices and the features."""
    h = x[blocks[0].sources]
    for block in blocks:
        h = block.aggregate(h)
    return h


def _remote_rows(sampler: SkewedSampler, owner: Array, targets: Array, draws: int) -> float:
    """Return the mean number of distinct remote nodes of a batch."""
    counts = [
        np.sum(owner[sampler.sample(targets, 0, step)[0].sources] != sampler.rank)
        for step in range(draws)
    ]
    return float(np.mean(counts))
