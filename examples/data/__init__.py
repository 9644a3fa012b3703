"""Data for the scripts: images (digits of scikit-learn, MNIST, CIFAR-10) and graphs.

`load(name)` loads an image set; `Shard` is one rank's part of it. `load_graph(name)` loads a graph:
Cora, Citeseer, or a generated one. The environment variable ACCORDION_DATA names a folder with
local copies. Decoded arrays are cached in ${XDG_CACHE_HOME:-~/.cache}/accordion-hvd. To add an
image set, add a file here and a line in `SETS`.
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
    """Load the image set `name`.

    Args:
        name: a key of `SETS`.
        limit: maximum number of images for training, and for testing; the choice depends on
            `seed` alone.
        seed: seed of this choice.

    Raises:
        ValueError: if the name is unknown.
        DataError: if the set cannot be found or read; the message says what to do.
    """
    check.one_of("load", "data", name, tuple(SETS))
    found = SETS[name]()
    return found if limit is None else found.limited(limit, seed)


def load_graph(name: str, nodes: int = 5000) -> GraphData:
    """Load the graph `name`.

    Args:
        name: one of `GRAPHS`.
        nodes: number of nodes of "blocks".

    Raises:
        ValueError: if the name is unknown or `nodes` is too small.
        DataError: if the graph cannot be found or read; the message says what to do.
    """
    check.one_of("load_graph", "data", name, GRAPHS)
    return load_blocks(nodes) if name == "blocks" else load_citation(name)
