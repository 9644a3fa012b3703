"""Tests of GCN training on real ranks, in both frameworks, with and without a budget."""

import json
import tempfile
from pathlib import Path

import harness
import numpy as np

SETTINGS = {
    "nodes": 240, "sizes": [20, 40], "epochs": 10, "batch_size": 8, "dropout": 0.0, "evaluate": 3,
    "width": 8, "lr": 0.05, "skews": [1], "budgets": [4], "progress": False,
}  # fmt: skip
ROW = 256  # features of the block model
_found: dict[str, list] = {}


def train(name: str, **more) -> list:
    """Train without and with a budget; return both runs' remote rows and received bytes.

    Asserts that rank 0 writes the same results and that the budget reduces the remote rows.
    """
    from examples.data import load_graph
    from examples.graph import training as graph_training
    from examples.graph.config import GraphSettings

    with tempfile.TemporaryDirectory() as folder:
        settings = GraphSettings(name=name, output=folder, **SETTINGS | more)
        found = graph_training.run(settings, load_graph("blocks", settings.nodes))
        if harness.RANK == 0:
            written = json.loads((Path(folder) / name / "result.json").read_text())
            assert written["runs"] == json.loads(json.dumps(found["runs"]))
    runs = found["runs"]
    assert len(runs) == 2 and all(len(run["epochs"]) == settings.epochs for run in runs)
    base, skewed = runs
    assert 0 < skewed["remote"] < 0.7 * base["remote"]
    assert base["epochs"][-1]["loss"] < base["epochs"][0]["loss"]
    for run in runs:
        assert 0 <= run["accuracy"] <= 1 and run["gradients_sent"] > 0
    _found[name] = [[run["remote"] for run in runs], [run["received"] for run in runs]]
    return _found[name]


def INIT() -> None:
    import horovod.tensorflow as tf_hvd
    import horovod.torch as hvd

    hvd.init()
    tf_hvd.init()


def check_rows_over_tensorflow() -> None:
    import graph_checks

    graph_checks.rows_and_counts("tensorflow")


def check_torch() -> None:
    remote, received = train("torch")
    due = [rows * (4 * ROW + 4) for rows in remote]  # rows, and numbers of nodes
    np.testing.assert_allclose(received, due, rtol=1e-12)


def check_keras_fetches_what_torch_does() -> None:
    assert train("keras", framework="keras") == _found["torch"]


OTHER = {
    "sampling": "node", "sizes": [3, 3], "mode": "iid", "wire": "int8", "guard": True, "warmup": 2,
    "prefetch": False, "compression": "powersgd:2", "partition": "hash",
}  # fmt: skip


def check_other_ways_in_torch() -> None:
    remote, received = train("torch-other", **OTHER)
    due = [rows * (ROW + 4 + 4) for rows in remote]  # codes, a scale, and the number of a node
    np.testing.assert_allclose(received, due, rtol=1e-12)


def check_other_ways_in_keras() -> None:
    assert train("keras-other", framework="keras", **OTHER) == _found["torch-other"]


if __name__ == "__main__":
    harness.main(globals())
