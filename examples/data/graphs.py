"""Graphs for node classification."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

Array = np.ndarray


@dataclass(frozen=True)
class GraphData:
    """A graph with classes of nodes.

    Attributes:
        name: name for `load_graph`.
        edges: (2, count), in any direction; an edge may occur twice.
        features: (nodes, features), fp32.
        labels: (nodes,), int64; -1 if unknown.
        classes: number of classes.
        train: nodes for training.
        validation: nodes for choosing an epoch.
        test: nodes for testing.
    """

    name: str
    edges: Array
    features: Array
    labels: Array
    classes: int
    train: Array
    validation: Array
    test: Array

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return len(self.labels)


def with_unit_rows(features: Array) -> Array:
    """Divide rows by their sums; rows of zeros stay zero."""
    total = features.sum(1, keepdims=True)
    return np.divide(features, total, out=np.zeros_like(features), where=total != 0)
