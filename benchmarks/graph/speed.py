"""How many edges a sampler draws a second, on one core."""

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
    {"fanout": (10, 10), "mode": "iid"},
    {"layer_size": (4096, 8192)},
]
BATCH = 1024
PARTS = 4


def measure(nodes: int, seconds: float) -> Row:
    """Sample batches of the block model for some seconds with each sampler; says what it finds.

    Args:
        nodes: of the graph.
        seconds: of processor time, for each sampler and for budgets 1 and 2.
    """
    data = load_graph("blocks", nodes)
    graph = Graph.from_edges(data.edges, data.nodes)
    part = partition(graph, PARTS)
    mine = np.flatnonzero(part.owner == 0)
    found: Row = {"nodes": nodes, "edges": graph.edges, "parts": str(part), "samplers": []}
    print(f"{nodes:,} nodes, {graph.edges:,} edges; {part}", flush=True)
    for words in SAMPLERS:
        for budget in (1.0, 2.0):
            sampler = SkewedSampler(graph, part, 0, budget=budget, **words)
            rate, edges = _rate(sampler, mine, seconds)
            row = {"sampler": _words(words), "budget": budget, "rate": rate, "edges": edges}
            found["samplers"].append(row)
            print(f"{row['sampler']:28} D = {budget:g}  {rate / 1e6:5.2f} M edges/s", flush=True)
    return found


def _rate(sampler: SkewedSampler, mine: np.ndarray, seconds: float) -> tuple[float, float]:
    """Edges a second of processor time, and edges of a batch."""
    draw, edges, steps = np.random.default_rng(0), 0, 0
    sampler.sample(mine[:BATCH])
    began = time.process_time()
    while time.process_time() - began < seconds:
        blocks = sampler.sample(draw.choice(mine, min(BATCH, len(mine)), False), 0, steps)
        edges, steps = edges + sum(len(block.rows) for block in blocks), steps + 1
    return edges / (time.process_time() - began), edges / steps


def _words(words: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in words.items())
