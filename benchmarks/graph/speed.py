"""Edges that a sampler draws per second on one core."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from accordion_hvd.graph import Graph, SkewedSampler, partition
from examples.data import load_graph
from examples.results import Row

SAMPLERS: list[dict[str, Any]] = [
    {"fanout": (10, 10)},
    {"fanout": (5, 5)},
    {"fanout": (10, 10), "mode": "bernoulli"},
    {"fanout": (10, 10), "mode": "iid"},
    {"layer_size": (4096, 8192)},
]
BATCH = 1024
PARTS = 4


def measure(nodes: int, seconds: float) -> Row:
    """Sample batches of the block model with each sampler; print and return the results.

    Args:
        nodes: number of nodes of the graph.
        seconds: processor time for each sampler and for budgets 1 and 2.
    """
    data = load_graph("blocks", nodes)
    graph = Graph.from_edges(data.edges, data.nodes)
    part = partition(graph, PARTS)
    local_nodes = np.flatnonzero(part.owner == 0)
    results: Row = {"nodes": nodes, "edges": graph.edges, "parts": str(part), "samplers": []}
    print(f"{nodes:,} nodes, {graph.edges:,} edges; {part}", flush=True)
    for arguments in SAMPLERS:
        for budget in (1.0, 2.0):
            sampler = SkewedSampler(graph, part, 0, budget=budget, **arguments)
            rate, edges = _rate(sampler, local_nodes, seconds)
            row = {"sampler": _describe(arguments), "budget": budget, "rate": rate, "edges": edges}
            results["samplers"].append(row)
            print(f"{row['sampler']:28} D = {budget:g}  {rate / 1e6:5.2f} M edges/s", flush=True)
    return results


def _rate(sampler: SkewedSampler, nodes: np.ndarray, seconds: float) -> tuple[float, float]:
    """Return the edges per second of processor time and the edges per batch."""
    draw, edges, steps = np.random.default_rng(0), 0, 0
    sampler.sample(nodes[:BATCH])
    began = time.process_time()
    while time.process_time() - began < seconds:
        blocks = sampler.sample(draw.choice(nodes, min(BATCH, len(nodes)), False), 0, steps)
        edges, steps = edges + sum(len(block.rows) for block in blocks), steps + 1
    return edges / (time.process_time() - began), edges / steps


def _describe(arguments: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in arguments.items())
