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


# --------------------------------------------------------------------------------------- partitions
METHODS = ("metis", "random", "hash")


@dataclass(frozen=True, eq=False)
class Partition:
    """An assignment of nodes to ranks.

    Attributes:
        owner: (nodes,), int32: the rank that owns each node.
        parts: number of ranks.
        cut: number of edges between nodes of different owners.
        cut_share: `cut` divided by the number of edges.
        balance: size of the largest part divided by the mean size; 1 is even.
    """

    owner: Array
    parts: int
    cut: int
    cut_share: float
    balance: float

    def __str__(self) -> str:
        sizes = ", ".join(f"{size:,}" for size in self.sizes)
        return (
            f"{self.parts} parts of {sizes} nodes (largest {self.balance:.2f} of the mean); "
            f"{self.cut:,} edges cut, {self.cut_share:.1%}"
        )

    @property
    def sizes(self) -> Array:
        """Return the number of nodes of each part, (parts,)."""
        return np.bincount(self.owner, minlength=self.parts)

    @classmethod
    def of(cls, graph: Graph, owner: Any, parts: int | None = None) -> Partition:
        """Return the partition with the given owners; parts may be empty.

        Raises:
            ValueError: if `owner` is not one rank from 0 to `parts` - 1 for each node.
        """
        owners = checked_owners("Partition", owner, graph.nodes, parts)
        parts = parts or int(owners.max()) + 1
        rows = np.repeat(owners, graph.degrees)
        cut = int(np.count_nonzero(rows != owners[graph.indices])) // 2
        balance = float(np.bincount(owners, minlength=parts).max() * parts / graph.nodes)
        return cls(owners, parts, cut, cut / max(1, graph.edges), balance)


def checked_owners(caller: Any, owner: Any, nodes: int, parts: int | None = None) -> Array:
    """Return owners as int32; ValueError unless each node has one rank, below `parts`."""
    owners = np.asarray(owner.owner if isinstance(owner, Partition) else owner)
    if owners.shape != (nodes,) or owners.dtype.kind not in "iu":
        given = f"of shape {owners.shape} and type {owners.dtype}"
        check.refuse(caller, "part", given, f"one integer for each of {nodes} nodes")
    last = (2**31 if parts is None else parts) - 1
    wrong = owners[(owners < 0) | (owners > last)]
    if wrong.size:
        check.refuse(caller, "an owner in part", int(wrong[0]), f"an integer from 0 to {last}")
    return owners.astype(np.int32)


def partition(graph: Graph, parts: int, method: str = "metis", seed: int = 0) -> Partition:
    """Partition the nodes of a graph.

    Args:
        graph: the graph.
        parts: number of ranks, at most the number of nodes.
        method: "metis": parts of nearly equal size with few edges between them (Karypis & Kumar,
            SIAM J. Sci. Comput., 1998; needs the package pymetis). "random": parts of equal size,
            drawn with `seed`. "hash": by a hash of the node's number. "random" and "hash" are
            baselines, which cut all edges but about 1 / `parts` of them.
        seed: seed of "metis" and "random". The same seed and version of pymetis give the same
            parts; `FeatureStore` checks that all ranks agree.

    Raises:
        ValueError: if an argument is not allowed, for example more parts than nodes.
        ImportError: if "metis" is asked for and pymetis is not installed.
    """
    check.integer("partition", "parts", parts, least=1, most=graph.nodes)
    check.one_of("partition", "method", method, METHODS)
    check.integer("partition", "seed", seed, least=0)
    if parts == 1:
        owner = np.zeros(graph.nodes, np.int32)
    elif method == "metis":
        owner = _metis(graph, parts, seed)
    elif method == "random":
        owner = np.random.default_rng(seed).permutation(np.arange(graph.nodes) % parts)
    else:
        owner = (_hash(np.arange(graph.nodes, dtype=np.uint64)) % np.uint64(parts)).astype(int)
    return Partition.of(graph, owner, parts)


def _metis(graph: Graph, parts: int, seed: int) -> Array:
    try:
        import pymetis
    except ImportError:
        raise ImportError(
            "partition: method 'metis' needs the package pymetis, which is not installed; install "
            "it (pip install pymetis), or choose method='random'."
        ) from None
    if len(graph.indices) >= 2**31:
        raise ValueError(
            f"partition: the graph has {graph.edges} edges, but METIS has 32-bit indices and takes "
            "fewer than 2**30; choose method='hash', or pass your own owners to Partition.of."
        )
    options = pymetis.Options(seed=seed)
    adjacency = pymetis.CSRAdjacency(graph.indptr.astype(np.int32), graph.indices.astype(np.int32))
    result = pymetis.part_graph(parts, adjacency, options=options)
    return np.asarray(result.vertex_part)


def _hash(x: Array) -> Array:
    """Hash 64-bit integers by the finalizer of SplitMix64 (Steele, Lea & Flood, OOPSLA 2014)."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
