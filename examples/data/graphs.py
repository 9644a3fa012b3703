"""What a graph for node classification is."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

Array = np.ndarray


@dataclass(frozen=True)
class GraphData:
    """A graph whose nodes are to be told apart.

    Attributes:
        name: as `load_graph` knows it.
        edges: (2, count), in any direction, possibly twice.
        features: (nodes, features), fp32.
        labels: (nodes,), int64; -1 where nobody knows.
        classes: how many there are.
        train: nodes to learn from.
        validation: nodes to choose an epoch by.
        test: nodes to measure accuracy with.
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
        """How many there are."""
        return len(self.labels)


def with_unit_rows(features: Array) -> Array:
    """Rows divided by their sums; rows of zeros stay."""
    total = features.sum(1, keepdims=True)
    return np.divide(features, total, out=np.zeros_like(features), where=total != 0)
