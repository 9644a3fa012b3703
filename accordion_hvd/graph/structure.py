"""A graph in compressed sparse rows, with the weights of graph convolution."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from accordion_hvd import check
from accordion_hvd.ops.numpy import Array as Array

NORMALIZATIONS = ("symmetric", "mean")


@dataclass(frozen=True, eq=False)
class Graph:
    """An undirected graph, and the matrix A with which a layer aggregates neighbours.

    The diagonal of A is stored separately, since samplers take it exactly: `indices` never contains
    the node itself. All ranks have the same graph; each rank stores the features of its own nodes
    (`FeatureStore`).

    Attributes:
        indptr: (nodes + 1,), int64; the neighbours of v are `indices[indptr[v]:indptr[v + 1]]`.
        indices: (2 * edges,), neighbours, sorted within a row.
        weights: (2 * edges,), fp32: A_vu of each neighbour u.
        own: (nodes,), fp32: A_vv.
    """

    indptr: Array
    indices: Array
    weights: Array
    own: Array

    @classmethod
    def from_edges(cls, edges: Any, nodes: int, normalization: str = "symmetric") -> Graph:
        """Build a graph from a list of edges.

        Each edge counts in both directions, and duplicates count once. Self-loops are ignored,
        since A always has a diagonal. Nodes without edges have only their diagonal entry.

        Args:
            edges: (2, count) integers, the two nodes of each edge, counted from 0.
            nodes: number of nodes.
            normalization: "symmetric": D^-1/2 (A + I) D^-1/2 (Kipf & Welling, 2017). "mean": the
                mean over the neighbours and the node itself (a mean aggregator of GraphSAGE).

        Raises:
            ValueError: if `edges` is no such array, or has a node that does not exist.
        """
        check.integer("Graph", "nodes", nodes, least=1)
        check.one_of("Graph", "normalization", normalization, NORMALIZATIONS)
        pairs = _checked(edges, nodes)
        pairs = pairs[:, pairs[0] != pairs[1]]
        keys = np.unique(np.concatenate([pairs[0] * nodes + pairs[1], pairs[1] * nodes + pairs[0]]))
        rows, indices = np.divmod(keys, nodes)
        degrees = np.bincount(rows, minlength=nodes)
        indptr = np.concatenate([[0], np.cumsum(degrees)])
        inverse = 1.0 / (degrees + 1)
        symmetric = normalization == "symmetric"
        weights = np.sqrt(inverse[rows] * inverse[indices]) if symmetric else inverse[rows]
        indices = indices.astype(np.int32 if nodes < 2**31 else np.int64)
        weights, own = weights.astype(np.float32), inverse.astype(np.float32)
        return cls(indptr.astype(np.int64), indices, weights, own)

    @property
    def nodes(self) -> int:
        """Return the number of nodes."""
        return len(self.own)

    @property
    def edges(self) -> int:
        """Return the number of edges, each counted once."""
        return len(self.indices) // 2

    @property
    def degrees(self) -> Array:
        """Return the number of neighbours of each node, (nodes,)."""
        return np.diff(self.indptr)

    def fingerprint(self) -> int:
        """Return a 63-bit hash of the graph."""
        return digest(self.indptr, self.indices, self.weights, self.own)


def digest(*arrays: Array) -> int:
    """Return a 63-bit hash of arrays."""
    hasher = hashlib.blake2b(digest_size=8)
    for array in arrays:
        hasher.update(array.tobytes())
    return int.from_bytes(hasher.digest(), "little") >> 1


def _checked(edges: Any, nodes: int) -> Array:
    pairs = np.asarray(edges)
    if pairs.ndim != 2 or pairs.shape[0] != 2 or (pairs.size and pairs.dtype.kind not in "iu"):
        given = f"an array of shape {pairs.shape} and type {pairs.dtype}"
        raise ValueError(f"Graph: edges is {given}, but must be integers of shape (2, count).")
    pairs = pairs.astype(np.int64)
    check_nodes("Graph", "edges", pairs, nodes)
    return pairs


def check_nodes(owner: Any, name: str, ids: Array, nodes: int) -> None:
    """Raise ValueError if an id is not from 0 to `nodes` - 1."""
    if ids.size and (ids.min() < 0 or ids.max() >= nodes):
        wrong = ids[(ids < 0) | (ids >= nodes)].flat[0]
        check.refuse(owner, f"a node of {name}", int(wrong), f"from 0 to {nodes - 1}")


def flat(starts: Array, counts: Array) -> Array:
    """Concatenate the ranges start, ..., start + count - 1 of all pairs of a start and a count."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total) + np.repeat(starts - ends + counts, counts)
