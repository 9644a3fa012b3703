"""A stochastic block model: groups of connected nodes with weak features."""

from __future__ import annotations

import numpy as np

from accordion_hvd import check
from examples.data.graphs import Array, GraphData

CLASSES = 8
FEATURES = 256
DEGREE = 16
WITHIN = 0.7
"""Fraction of a node's edges that stay in its group."""

SIGNAL = 0.08
"""Standard deviation of the group means in units of the noise: too weak to classify one node by."""


def load_blocks(nodes: int = 5000, seed: int = 0) -> GraphData:
    """Generate a graph, which is the same for the same arguments; nothing is downloaded.

    Each of `CLASSES` groups is a class. A tenth of the nodes is for training, a tenth for
    validation, and two tenths are for testing.

    Args:
        nodes: number of nodes.
        seed: seed of all random numbers.
    """
    check.integer("load_blocks", "nodes", nodes, least=100)
    draw = np.random.default_rng([seed, nodes])
    labels = draw.integers(0, CLASSES, nodes)
    means = SIGNAL * draw.standard_normal((CLASSES, FEATURES))
    features = means[labels] + draw.standard_normal((nodes, FEATURES), np.float32)
    order = draw.permutation(nodes)
    tenth = nodes // 10
    return GraphData(
        "blocks",
        _edges(labels, draw),
        features.astype(np.float32),
        labels,
        CLASSES,
        train=order[:tenth],
        validation=order[tenth : 2 * tenth],
        test=order[2 * tenth : 4 * tenth],
    )


def _edges(labels: Array, draw: np.random.Generator) -> Array:
    """Draw `DEGREE` / 2 neighbours for each node uniformly, most of them from its group."""
    ends = np.repeat(np.arange(len(labels)), DEGREE // 2)
    by_group = np.argsort(labels, kind="stable")
    counts = np.bincount(labels, minlength=CLASSES)
    first = np.cumsum(counts) - counts
    group = labels[ends]
    same = by_group[first[group] + (draw.random(len(ends)) * counts[group]).astype(np.int64)]
    other = draw.integers(0, len(labels), len(ends))
    return np.stack([ends, np.where(draw.random(len(ends)) < WITHIN, same, other)])
