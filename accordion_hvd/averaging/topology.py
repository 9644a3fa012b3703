"""Topologies: the neighbours of each rank, and the weights of their models."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from accordion_hvd import check

_TOLERANCE = 1e-9  # of sums of weights


@dataclass(frozen=True, eq=False)
class Topology:
    """A connected graph over the ranks with a doubly stochastic matrix of weights W.

    W[i, j] is the weight that rank i gives to what comes from rank j. Named graphs have Metropolis
    weights, 1 / (1 + the larger number of neighbours of the two), and the rest on the diagonal, so
    W is symmetric, for any number of ranks:

    - "ring": both neighbours (weights 1/3 each);
    - "torus": the four neighbours in the grid that is nearest to a square (a ring for primes);
    - "hypercube": ranks whose numbers differ in one bit (powers of two only);
    - "exponential": ranks 1, 2, 4, ... further on, in both directions;
    - "complete": everybody.

    Args:
        kind: one of these names, or W: a square matrix with a row for each rank, no negative
            elements, rows and columns that sum to 1, positive paths between any two ranks, and no
            eigenvalue of -1, under which averages would not converge.
    """

    kind: Any = "ring"

    def __post_init__(self) -> None:
        """Raises: ValueError when `kind` is no known name or its matrix is not what it must be."""
        if isinstance(self.kind, str):
            check.one_of(self, "kind", self.kind, tuple(_GRAPHS))
        else:
            matrix = np.array(self.kind, np.float64)
            _check_matrix(self, matrix)
            object.__setattr__(self, "kind", matrix)

    def weights(self, size: int) -> np.ndarray:
        """W for `size` ranks.

        Raises:
            ValueError: there is no such graph of this number of ranks.
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
        """Return 1 - the second largest singular value of W, by which differences shrink."""
        values = np.linalg.svd(self.weights(size), compute_uv=False)
        return float(1 - values[1]) if size > 1 else 1.0

    def symmetric(self, size: int) -> bool:
        """Return whether W is symmetric."""
        weights = self.weights(size)
        return bool(np.abs(weights - weights.T).max() <= _TOLERANCE)

    def __repr__(self) -> str:
        """Equal on ranks that mean the same."""
        kind = self.kind if isinstance(self.kind, str) else np.asarray(self.kind).tolist()
        return f"Topology({kind!r})"


def topology(owner: Any, value: Any) -> Topology:
    """Return a `Topology`, given one, a name or a matrix.

    Raises:
        ValueError: it is none of these.
    """
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
            allowed = f"a matrix of {size} rows for the {size} ranks there are"
            check.refuse(owner, "kind", f"a matrix of {len(owner.kind)} rows", allowed)
        return owner.kind
    near = np.zeros((size, size), bool)
    for one, other in _GRAPHS[owner.kind](owner, size):
        near[one, other] = near[other, one] = one != other
    degree = near.sum(1)
    weights = near / (1.0 + np.maximum(degree[:, None], degree[None, :]))
    return weights + np.diag(1 - weights.sum(1))


def _check_matrix(owner: Topology, matrix: np.ndarray) -> None:
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or not len(matrix):
        check.refuse(owner, "kind", f"a matrix of shape {matrix.shape}", "a square matrix")
    if not np.isfinite(matrix).all() or matrix.min() < 0:
        check.refuse(owner, "kind", f"a matrix whose least is {matrix.min()}", "at least 0 in all")
    for sums, what in ((matrix.sum(1), "rows"), (matrix.sum(0), "columns")):
        worst = sums[np.argmax(np.abs(sums - 1))]
        if abs(worst - 1) > _TOLERANCE:
            wrong = f"a matrix with {what} that sum to {worst:.12g}"
            check.refuse(owner, "kind", wrong, "doubly stochastic: all rows and columns sum to 1")
    if not _connected(matrix > 0):
        check.refuse(owner, "kind", "a matrix whose graph is in parts", "connected")
    values = np.sort(np.abs(np.linalg.eigvals(matrix)))
    if len(values) > 1 and values[-2] > 1 - _TOLERANCE:
        wrong = "a matrix with a second eigenvalue of magnitude 1"
        check.refuse(owner, "kind", wrong, "one whose powers converge (weight on the diagonal)")


def _connected(near: np.ndarray) -> bool:
    reach = near | np.eye(len(near), dtype=bool)
    for _ in range(len(near).bit_length()):
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
