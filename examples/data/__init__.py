"""Image sets for the scripts: digits (inside scikit-learn), MNIST, CIFAR-10; and who sees which.

`load(name)` finds a set, `Shard` is one rank's part of it. `load_graph(name)` finds a graph: Cora,
Citeseer, or one that is made. ACCORDION_DATA names a folder with local
copies; decoded arrays are kept in ${XDG_CACHE_HOME:-~/.cache}/accordion-hvd. A new set is one file
here and one line in `SETS`.
"""

from __future__ import annotations

from accordion_hvd import check
from examples.data.base import DataError, Dataset, Shard, Split
from examples.data.blocks import load_blocks
from examples.data.cifar10 import load_cifar10
from examples.data.citation import load_citation
from examples.data.digits import load_digits
from examples.data.graphs import GraphData
from examples.data.mnist import load_mnist

__all__ = [
    "GRAPHS",
    "SETS",
    "DataError",
    "Dataset",
    "GraphData",
    "Shard",
    "Split",
    "load",
    "load_graph",
]

SETS = {"digits": load_digits, "mnist": load_mnist, "cifar10": load_cifar10}
GRAPHS = ("blocks", "cora", "citeseer")


def load(name: str, limit: int | None = None, seed: int = 0) -> Dataset:
    """The image set `name`.

    Args:
        name: a key of `SETS`.
        limit: take so many images for training, and at most so many for testing; the choice
            depends on `seed` alone.
        seed: of that choice.

    Raises:
        ValueError: there is no such set.
        DataError: it cannot be found or read; the sentence says what to do.
    """
    check.one_of("load", "data", name, tuple(SETS))
    found = SETS[name]()
    return found if limit is None else found.limited(limit, seed)


def load_graph(name: str, nodes: int = 5000) -> GraphData:
    """The graph `name`.

    Args:
        name: one of `GRAPHS`.
        nodes: of "blocks".

    Raises:
        ValueError: there is no such graph, or too few nodes are asked for.
        DataError: it cannot be found or read; the sentence says what to do.
    """
    check.one_of("load_graph", "data", name, GRAPHS)
    return load_blocks(nodes) if name == "blocks" else load_citation(name)
