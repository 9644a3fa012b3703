"""Cora and Citeseer: citation graphs, with the split of Planetoid (Yang et al., 2016).

The source is the authors' files (`ind.cora.allx` etc.), or one `cora.npz` with the arrays
`features_indptr`, `features_indices`, `features_data`, `features_shape` (compressed rows),
`edge_index` (2, count), `labels`, `train_index`, `val_index` and `test_index`.
"""

from __future__ import annotations

import io
import pickle
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from examples.data import files
from examples.data.base import DataError
from examples.data.cifar10 import Safe
from examples.data.graphs import Array, GraphData, with_unit_rows

SOURCE = "https://github.com/kimiyoung/planetoid/raw/master/data/"
PARTS = ("y", "tx", "ty", "allx", "ally", "graph", "test.index")
VALIDATION = 500


@dataclass(frozen=True)
class Known:
    """Sizes of a complete set, which replace checksums: the source publishes none."""

    nodes: int
    features: int
    edges: int
    classes: int


SETS = {"cora": Known(2708, 1433, 5278, 7), "citeseer": Known(3327, 3703, 4552, 6)}


def load_citation(name: str) -> GraphData:
    """Load a citation graph: words of a paper (rows with sum 1), citations, subjects.

    Args:
        name: a key of `SETS`.

    Raises:
        DataError: if there is no copy and no network, or if files are damaged.
    """
    place = _local(name)
    if place is None:
        title = name.capitalize()
        instead = ", or use --data blocks, which needs none"
        urls = [f"{SOURCE}ind.{name}.{part}" for part in PARTS]
        place = [files.fetched(url, None, title, instead) for url in urls][0]
    try:
        found = _from_arrays(name, place) if place.suffix == ".npz" else _official(name, place)
        _check(name, found)
    except (OSError, EOFError, ValueError, KeyError, IndexError, pickle.PickleError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DataError(f"data: {place} cannot be read ({reason}); get a new copy.") from None
    return found


def _local(name: str) -> Path | None:
    """Return the first local copy, or None; for the authors' files, the path of the first file."""
    for folder in files.folders("citation", "planetoid", name, f"{name.capitalize()}/raw"):
        if (folder / f"{name}.npz").is_file():
            return folder / f"{name}.npz"
        if all((folder / f"ind.{name}.{part}").is_file() for part in PARTS):
            return folder / f"ind.{name}.{PARTS[0]}"
    return None


def _check(name: str, found: GraphData) -> None:
    known, edges = SETS[name], found.edges[:, found.edges[0] != found.edges[1]]
    low, high = edges.min(0), edges.max(0)
    has = Known(
        found.nodes,
        found.features.shape[1],
        len(np.unique(low * found.nodes + high)),
        found.classes,
    )
    if has != known:
        raise ValueError(f"the graph has {has}, but must have {known}")
    for part in (found.train, found.validation, found.test):
        if found.labels[part].min() < 0:
            raise ValueError("a node for training, validation or testing has no label")


def _from_arrays(name: str, path: Path) -> GraphData:
    with np.load(path, allow_pickle=False) as arrays:
        rows, columns = (int(extent) for extent in arrays["features_shape"])
        features = np.zeros((rows, columns), np.float32)
        counts = np.diff(arrays["features_indptr"])
        features[np.repeat(np.arange(rows), counts), arrays["features_indices"]] = arrays[
            "features_data"
        ]
        labels = arrays["labels"].astype(np.int64)
        return GraphData(
            name,
            arrays["edge_index"].astype(np.int64),
            with_unit_rows(features),
            labels,
            int(labels.max()) + 1,
            *(arrays[f"{part}_index"].astype(np.int64) for part in ("train", "val", "test")),
        )


# ------------------------------------------------------------------------------- the authors' files
def _official(name: str, first: Path) -> GraphData:
    """Read the authors' files. Test nodes come last, permuted; some are missing in Citeseer."""
    paths = {part: first.with_name(f"ind.{name}.{part}") for part in PARTS}
    load = {part: _pickled(paths[part]) for part in ("y", "tx", "ty", "allx", "ally", "graph")}
    order = np.array(paths["test.index"].read_text().split(), np.int64)
    before = len(load["ally"])
    nodes = max(before, int(order.max()) + 1)
    features = np.zeros((nodes, load["allx"].shape[1]), np.float32)
    hot = np.zeros((nodes, load["ally"].shape[1]), np.int64)
    features[:before], features[order] = load["allx"].dense(), load["tx"].dense()
    hot[:before], hot[order] = load["ally"], load["ty"]
    labels = np.where(hot.any(1), hot.argmax(1), -1)
    graph: Mapping[int, list[int]] = load["graph"]
    rows = np.repeat(np.array(list(graph), np.int64), [len(ends) for ends in graph.values()])
    columns = np.array([end for ends in graph.values() for end in ends], np.int64)
    count = len(load["y"])
    return GraphData(
        name,
        np.stack([rows, columns]),
        with_unit_rows(features),
        labels,
        hot.shape[1],
        train=np.arange(count),
        validation=np.arange(count, count + VALIDATION),
        test=np.sort(order),
    )


def _pickled(path: Path) -> Any:
    try:
        return Pickles(io.BytesIO(path.read_bytes()), encoding="latin1").load()
    except ValueError:
        raise
    except Exception as error:  # damaged pickles raise errors of any kind
        raise ValueError(f"{path.name} is damaged: {error}") from None


class Rows:
    """Substitute for scipy's csr_matrix, filled from its pickle."""

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.data, self.indices, self.indptr = state["data"], state["indices"], state["indptr"]
        self.shape = tuple(int(extent) for extent in state.get("_shape", state.get("shape")))

    def dense(self) -> Array:
        """Return the rows as a dense matrix."""
        full = np.zeros(self.shape, np.float32)
        full[np.repeat(np.arange(self.shape[0]), np.diff(self.indptr)), self.indices] = self.data
        return full


class Pickles(Safe):
    """Unpickler for the authors' files, which refuses everything that could be harmful."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a class for compressed rows, lists by node or arrays.

        Raises:
            ValueError: if the name is any other.
        """
        if name == "csr_matrix" and module.startswith("scipy.sparse"):
            return Rows
        if (module, name) == ("collections", "defaultdict"):
            return defaultdict
        if (module, name) in (("__builtin__", "list"), ("builtins", "list")):
            return list
        if (module, name) in (("__builtin__", "object"), ("builtins", "object")):
            return object
        if (module, name) in (("copy_reg", "_reconstructor"), ("copyreg", "_reconstructor")):
            return _rebuilt
        return super().find_class(module, name)


def _rebuilt(kind: type, base: type, state: Any) -> Any:
    """Create the object with which a pickle of Python 2 begins."""
    if kind is not Rows:
        raise ValueError(f"the pickle has a {kind.__name__}, but must have compressed rows")
    return Rows()
