"""Tests of the graphs for scripts, and of the settings of a comparison of samplers."""

from __future__ import annotations

import pickle
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pooch
import pytest

from examples import config
from examples.data import DataError, citation, load_graph
from examples.graph import config as graph_config
from examples.graph.config import GraphSettings

ROOT = Path(__file__).resolve().parents[2]
Array = np.ndarray


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty data folder; Cora is replaced by a small set, and there is no network."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "data").mkdir()
    monkeypatch.setenv("ACCORDION_DATA", str(tmp_path / "data"))
    monkeypatch.setitem(citation.SETS, "cora", citation.Known(12, 6, 4, 3))
    monkeypatch.setattr(citation, "VALIDATION", 2)

    def offline(*_: Any) -> None:
        raise OSError("no network in tests")

    monkeypatch.setattr(pooch.HTTPDownloader, "__call__", offline)
    return tmp_path / "data"


# ------------------------------------------------------------------------------------------- graphs
def small() -> dict[str, Any]:
    """Return a graph of 12 nodes, of which node 10 has no features and no label."""
    draw = np.random.default_rng(0)
    features = (draw.random((12, 6)) < 0.5).astype(np.float32)
    features[10] = 0
    labels = np.array([0, 1, 2, 0, 1, 2, 0, 1, 2, 0, -1, 2])
    edges = np.array([[0, 1, 2, 11, 3, 1], [1, 2, 0, 5, 3, 0]])
    return {"features": features, "labels": labels, "edges": edges}


def write_arrays(folder: Path) -> dict[str, Any]:
    made = small()
    counts = (made["features"] > 0).sum(1)
    np.savez(
        folder / "cora.npz",
        features_indptr=np.concatenate([[0], np.cumsum(counts)]),
        features_indices=np.nonzero(made["features"])[1],
        features_data=made["features"][made["features"] > 0],
        features_shape=np.array([12, 6]),
        edge_index=made["edges"],
        labels=made["labels"],
        train_index=np.arange(3),
        val_index=np.arange(3, 5),
        test_index=np.array([9, 11]),
    )
    return made


class Compressed:
    """Matrix that is pickled like a CSR matrix of scipy under Python 2."""

    def __init__(self, dense: Array) -> None:
        self.dense = dense

    def __reduce__(self) -> Any:
        counts = (self.dense != 0).sum(1)
        state = {
            "_shape": self.dense.shape,
            "indptr": np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
            "indices": np.nonzero(self.dense)[1].astype(np.int32),
            "data": self.dense[self.dense != 0],
        }
        return rebuild, (CsrMatrix, object, None), state


def rebuild(*_: Any) -> None:
    raise AssertionError("only its name is pickled")


class CsrMatrix:
    pass


rebuild.__module__, rebuild.__qualname__ = "copyreg", "_reconstructor"
CsrMatrix.__module__, CsrMatrix.__qualname__ = "scipy.sparse.csr", "csr_matrix"


class ByName(pickle._Pickler):  # type: ignore[name-defined]
    """Pickler that writes the names of `rebuild` and `CsrMatrix` without importing them."""

    def save_global(self, obj: Any, name: Any = None) -> None:
        if obj in (rebuild, CsrMatrix):
            self.write(f"c{obj.__module__}\n{obj.__qualname__}\n".encode())
        else:
            super().save_global(obj, name)

    dispatch = dict(pickle._Pickler.dispatch)  # type: ignore[attr-defined]
    dispatch[type(rebuild)] = save_global
    dispatch[type] = save_global


def write_official(folder: Path, tested: Any = (11, 9)) -> dict[str, Any]:
    """Write a graph in the official layout, with the nodes `tested` for testing, in this order."""
    made = small()
    hot = np.eye(3, dtype=np.int32)[np.maximum(made["labels"], 0)]
    order = np.array(tested)
    graph: dict[int, list[int]] = defaultdict(list)
    for a, b in made["edges"].T:
        graph[int(a)].append(int(b))
    contents = {
        "y": hot[:3],
        "tx": Compressed(made["features"][order]),
        "ty": hot[order],
        "allx": Compressed(made["features"][:9]),
        "ally": hot[:9],
        "graph": graph,
    }
    for part, content in contents.items():
        with open(folder / f"ind.cora.{part}", "wb") as file:
            ByName(file, protocol=2).dump(content)
    (folder / "ind.cora.test.index").write_text("".join(f"{node}\n" for node in order))
    return made


@pytest.mark.parametrize("write", [write_arrays, write_official])
def test_layouts_hold_the_same(home: Path, write: Any) -> None:
    folder = home / "citation"
    folder.mkdir()
    made = write(folder)
    found = load_graph("cora")
    total = np.maximum(made["features"].sum(1, keepdims=True), 1)
    np.testing.assert_allclose(found.features, made["features"] / total)
    np.testing.assert_array_equal(found.labels, made["labels"])
    assert {tuple(edge) for edge in found.edges.T} == {tuple(edge) for edge in made["edges"].T}
    assert (list(found.train), list(found.validation)) == ([0, 1, 2], [3, 4])
    assert (list(found.test), found.classes, found.nodes) == ([9, 11], 3, 12)


@pytest.mark.parametrize("damage", ["cut", "html", "harmful", "other", "unlabelled"])
def test_damaged(home: Path, damage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write_official(home)
    path = home / "ind.cora.allx"
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:40])
    elif damage == "html":
        path.write_text("<html>not found</html>")
    elif damage == "harmful":
        path.write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    elif damage == "other":
        monkeypatch.setitem(citation.SETS, "cora", citation.Known(12, 6, 5, 3))
    else:
        write_official(home, (11, 10))
        monkeypatch.setattr(citation, "_official", lambda *_: unlabelled())
    with pytest.raises(DataError, match="cannot be read") as refusal:
        load_graph("cora")
    assert str(refusal.value).count("\n") == 0


def unlabelled() -> Any:
    made = small()
    parts = {"train": np.arange(3), "validation": np.arange(3, 5), "test": np.array([10])}
    return citation.GraphData("cora", made["edges"], made["features"], made["labels"], 3, **parts)


def test_missing_and_no_network(home: Path) -> None:
    with pytest.raises(DataError, match="or use --data blocks, which needs none") as refusal:
        load_graph("citeseer")
    assert "ind.citeseer.y" in str(refusal.value) and "no network in tests" in str(refusal.value)
    with pytest.raises(ValueError, match="data is 'reddit', but must be one of 'blocks', 'cora'"):
        load_graph("reddit")


def test_blocks_are_made_alike() -> None:
    one, two = load_graph("blocks", 800), load_graph("blocks", 800)
    for key in ("edges", "features", "labels", "train", "test"):
        np.testing.assert_array_equal(getattr(one, key), getattr(two, key))
    assert not set(one.train) & set(one.validation) and not set(one.test) & set(one.train)
    same = one.labels[one.edges[0]] == one.labels[one.edges[1]]
    assert 0.65 < same.mean() < 0.85 and one.features.dtype == np.float32


# ----------------------------------------------------------------------------------------- settings
@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--sizes", "[0]"], "settings: sizes is 0, but must be an integer of at least 1."),
        (["--budgets", "[0.5]"], "settings: budgets is 0.5, but must be a number of at least 1."),
        (["--skews", "[]", "--budgets", "[]"], "settings: skews is []"),
        (["--wire", "topk:0.1"], "compression is 'topk:0.1', but must be None, 'dense', 'fp16'"),
        (["--compression", "magic"], "settings: compression is 'magic'"),
        (["--data", "reddit"], "settings: data is 'reddit', but must be one of 'blocks', 'cora'"),
        (["--nonsense", "1"], "settings: '--nonsense 1' is not known; allowed are --config"),
        (["--dropout", "1"], "settings: dropout is 1"),
    ],
)
def test_settings_are_refused(arguments: list[str], told: str) -> None:
    with pytest.raises(ValueError) as refusal:
        config.parse_settings("", arguments, GraphSettings)
    assert told in str(refusal.value) and str(refusal.value).count("\n") == 0


@pytest.mark.parametrize("name", ["cora", "citeseer", "blocks", "links"])
def test_the_configs(name: str) -> None:
    found = graph_config.read("", ["--config", str(ROOT / "configs" / f"gcn_{name}.yaml")])
    assert found.name == name and {"skew": 1.0} in found.methods()
    assert found.seeds >= 5 or name == "links"
