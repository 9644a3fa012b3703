"""Topologies: the neighbours of each rank, and the weights of their models."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from accordion_hvd import check

_TOLERANCE = 1e-9  # for sums of weights


@dataclass(frozen=True, eq=False)
class Topology:
    """A connected graph of the ranks with a doubly stochastic matrix of weights W.

    W[i, j] is the weight that rank i gives to the message of rank j. Named graphs have Metropolis
    weights: two neighbours give each other 1 / (1 + the larger of their numbers of neighbours), and
    the diagonal completes each row to 1. So W is symmetric, for any number of ranks.

    - "ring": two neighbours (weights 1/3 each);
    - "torus": four neighbours in the grid that is closest to a square (a ring for primes);
    - "hypercube": the ranks whose numbers differ in one bit (powers of two only);
    - "exponential": the ranks at distances 1, 2, 4, ... in both directions;
    - "complete": all other ranks.

    Args:
        kind: one of these names, or W itself: a square matrix with one row per rank, no negative
            elements, rows and columns that sum to 1, a path of positive weights between any two
            ranks, and no other eigenvalue of magnitude 1 (such as -1), with which averages would
            not converge. Default: "ring".
    """

    kind: Any = "ring"

    def __post_init__(self) -> None:
        if isinstance(self.kind, str):
            check.one_of(self, "kind", self.kind, tuple(_GRAPHS))
        else:
            try:
                matrix = np.array(self.kind, np.float64)
            except (TypeError, ValueError):
                check.refuse(self, "kind", self.kind, "a graph's name or a matrix of weights")
            _check_matrix(self, matrix)
            check.settle(self, "kind", matrix)

    def weights(self, size: int) -> np.ndarray:
        """Return W for `size` ranks.

        Raises:
            ValueError: if the graph does not exist for this number of ranks.
        """
        return _weights(self, size)

    def to(self, rank: int, size: int) -> tuple[int, ...]:
        """Return the ranks that give weight to this rank's messages."""
        column = self.weights(size)[:, rank]
        return tuple(int(i) for i in np.flatnonzero(column) if i != rank)

    def of(self, rank: int, size: int) -> tuple[int, ...]:
        """Return the ranks to whose messages this rank gives weight."""
        row = self.weights(size)[rank]
        return tuple(int(i) for i in np.flatnonzero(row) if i != rank)

    def gap(self, size: int) -> float:
        """Return 1 - the second largest singular value of W, the rate of convergence."""
        values = np.linalg.svd(self.weights(size), compute_uv=False)
        return float(1 - values[1]) if size > 1 else 1.0

    def symmetric(self, size: int) -> bool:
        """Return whether W is symmetric."""
        weights = self.weights(size)
        return bool(np.abs(weights - weights.T).max() <= _TOLERANCE)

    def __repr__(self) -> str:
        """Return a text that is equal on ranks with equal topologies."""
        kind = self.kind if isinstance(self.kind, str) else np.asarray(self.kind).tolist()
        return f"Topology({kind!r})"


def topology(owner: Any, value: Any) -> Topology:
    """Return the `Topology` for a topology, a name or a matrix; ValueError for other values."""
    if isinstance(value, Topology):
        return value
    if not isinstance(value, (str, np.ndarray, list, tuple)):
        check.refuse(owner, "topology", value, "a Topology, a graph's name or a matrix of weights")
    return Topology(value)


@functools.lru_cache(maxsize=64)
def _weights(owner: Topology, size: int) -> np.ndarray:
    check.integer(owner, "size", size, least=1)
    if not isinstance(owner.kind, str):
        if len(owner.kind) != size:
            allowed = f"a matrix of {size} rows, one per rank"
            check.refuse(owner, "kind", f"a matrix of {len(owner.kind)} rows", allowed)
        return owner.kind
    adjacency = np.zeros((size, size), bool)
    for i, j in _GRAPHS[owner.kind](owner, size):
        adjacency[i, j] = adjacency[j, i] = i != j
    degree = adjacency.sum(1)
    weights = adjacency / (1.0 + np.maximum(degree[:, None], degree[None, :]))
    return weights + np.diag(1 - weights.sum(1))


def _check_matrix(owner: Topology, matrix: np.ndarray) -> None:
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or not len(matrix):
        check.refuse(owner, "kind", f"a matrix of shape {matrix.shape}", "a square matrix")
    if not np.isfinite(matrix).all() or matrix.min() < 0:
        wrong = f"a matrix with minimum {matrix.min()}"
        check.refuse(owner, "kind", wrong, "finite and at least 0")
    for sums, what in ((matrix.sum(1), "rows"), (matrix.sum(0), "columns")):
        worst = sums[np.argmax(np.abs(sums - 1))]
        if abs(worst - 1) > _TOLERANCE:
            wrong = f"a matrix with {what} that sum to {worst:.12g}"
            check.refuse(owner, "kind", wrong, "doubly stochastic: all rows and columns sum to 1")
    if not _connected(matrix > 0):
        check.refuse(owner, "kind", "a matrix with a disconnected graph", "connected")
    values = np.sort(np.abs(np.linalg.eigvals(matrix)))
    if len(values) > 1 and values[-2] > 1 - _TOLERANCE:
        wrong = "a matrix with a second eigenvalue of magnitude 1"
        allowed = "a matrix with converging powers (add weight to the diagonal)"
        check.refuse(owner, "kind", wrong, allowed)


def _connected(adjacency: np.ndarray) -> bool:
    reach = adjacency | np.eye(len(adjacency), dtype=bool)
    for _ in range(len(adjacency).bit_length()):
        reach = (reach.astype(np.float32) @ reach.astype(np.float32)) > 0
    return bool(reach.all())


Edges = Iterator[tuple[int, int]]


def _ring(owner: Topology, size: int) -> Edges:
    return ((i, (i + 1) % size) for i in range(size))


def _torus(owner: Topology, size: int) -> Edges:
    rows = max(i for i in range(1, math.isqrt(size) + 1) if size % i == 0)
    columns = size // rows
    for i in range(size):
        row, column = divmod(i, columns)
        yield i, row * columns + (column + 1) % columns
        yield i, (row + 1) % rows * columns + column


def _hypercube(owner: Topology, size: int) -> Edges:
    if size & (size - 1):
        check.refuse(owner, "size", size, "a power of two for a hypercube")
    return ((i, i ^ (1 << bit)) for i in range(size) for bit in range(size.bit_length() - 1))


def _exponential(owner: Topology, size: int) -> Edges:
    strides = [1 << bit for bit in range((size - 1).bit_length())]
    return ((i, (i + stride) % size) for i in range(size) for stride in strides)


def _complete(owner: Topology, size: int) -> Edges:
    return ((i, j) for i in range(size) for j in range(i))


_GRAPHS: dict[str, Callable[[Topology, int], Edges]] = {
    "ring": _ring,
    "torus": _torus,
    "hypercube": _hypercube,
    "exponential": _exponential,
    "complete": _complete,
}
