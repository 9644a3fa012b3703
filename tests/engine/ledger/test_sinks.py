"""Tests of sinks, each with the real client of its program, without a network."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from accordion_hvd.engine.ledger import CSV, JsonLines, Perfetto, Tracker
from accordion_hvd.engine.ledger.samples import PARTS


def record(step: int, at: float) -> dict[str, Any]:
    seconds = {"compute": 0.05, "encode": 0.01, "wait": 0.03, "decode": 0.01}
    parts = dict.fromkeys(PARTS, 0.0) | seconds
    group = {
        "label": "a", "compressor": "TopK", "sent": 10.0, "launched": at - 0.04, "rounds": 1,
        "arrived": at - 0.01, "flight": 0.03, "encode": 0.01, "decode": 0.01,
    }  # fmt: skip
    return {"step": step, "steps": 1, "at": at, "seconds": 0.1, **parts, "sent": 1e6 * step,
            "dense": 4e6, "flight": 0.03, "skipped": 0.0, "groups": [group]}  # fmt: skip


RECORDS = [record(step, 100 + 0.1 * step) for step in range(1, 21)]


def fill(sink: Any) -> None:
    for row in RECORDS:
        sink(row)
    for _ in range(2):
        getattr(sink, "close", int)()


def test_lines_of_json(tmp_path):
    fill(JsonLines(tmp_path / "new" / "x.jsonl"))
    lines = (tmp_path / "new" / "x.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == RECORDS


def test_tables(tmp_path):
    fill(CSV(tmp_path / "x.csv"))
    with open(tmp_path / "x.csv") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["sent"]) for row in rows] == [1e6 * step for step in range(1, 21)]
    assert float(rows[0]["wait"]) == 0.03 and "groups" not in rows[0]


def test_traces_nest_and_follow_each_other(tmp_path):
    fill(Perfetto(tmp_path / "x.json"))
    events = json.loads((tmp_path / "x.json").read_text())
    parts = [event for event in events if event["tid"] == 0]
    assert len(parts) == 4 * 20 and len(events) == 5 * 20
    for before, after in zip(parts, parts[1:], strict=False):
        assert after["ts"] >= before["ts"] + before["dur"] - 1e-3
    flight = next(event for event in events if event["tid"] == 1)
    assert flight["dur"] == pytest.approx(3e4) and flight["args"]["bytes"] == 10


def test_trackers_log_means_in_milliseconds_and_megabytes():
    points = {}

    class Points(Tracker):
        def log(self, values, step):
            points[step] = values

    fill(Points(every=10))
    parts = {"compute": 50, "encode": 10, "wait": 30, "decode": 10}
    wanted = {"accordion/ms": 100} | {f"accordion/ms {name}": ms for name, ms in parts.items()}
    for step, sent in ((10, 5.5), (20, 15.5)):
        assert points[step] == pytest.approx(wanted | {"accordion/MB sent": sent})


def run(program: str, folder: Path, **environment: str) -> str:
    """Run a program in a new process, because the clients start threads and change settings."""
    head = "import sys; sys.path[:0] = sys.argv[2:]; from test_sinks import RECORDS, fill\n"
    root = Path(__file__).resolve().parents[3]
    paths = [str(root), str(root / "tests" / "engine" / "ledger"), str(root / "tests" / "support")]
    done = subprocess.run(
        [sys.executable, "-c", head + program, str(folder), *paths],
        capture_output=True, text=True, timeout=120, env={**os.environ, **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_tensorboard(tmp_path):
    pytest.importorskip("tensorboard")
    program = """
sys.modules["tensorboard.compat.notf"] = sys  # its stand-in for TensorFlow loads faster
from accordion_hvd.engine.ledger import TensorBoard
fill(TensorBoard(sys.argv[1], every=5))
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
found = EventAccumulator(sys.argv[1]); found.Reload()
for name in sorted(found.Tags()["tensors"]):
    points = found.Tensors(name)
    print(name, [(x.step, round(float(x.tensor_proto.float_val[0]), 3)) for x in points])
"""
    output = run(program, tmp_path)
    assert "accordion/ms wait [(5, 30.0), (10, 30.0), (15, 30.0), (20, 30.0)]" in output
    assert "accordion/MB sent [(5, 3.0), (10, 8.0), (15, 13.0), (20, 18.0)]" in output
    assert "graph" not in output


def test_weights_and_biases_offline(tmp_path):
    pytest.importorskip("wandb")
    program = """
import wandb
from accordion_hvd.engine.ledger import WandB
run = wandb.init(project="test", dir=sys.argv[1], mode="offline")
run.log({"loss": 1.0})
sink = WandB(run, every=10)
fill(sink)
print(dict(run.summary)["accordion/MB sent"], dict(run.summary)["accordion/step"])
run.finish()
"""
    output = run(program, tmp_path, WANDB_SILENT="true", WANDB_DIR=str(tmp_path))
    assert output.split() == ["15.5", "20"]
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))


def test_mlflow_in_files(tmp_path):
    pytest.importorskip("mlflow")
    program = """
from mlflow import MlflowClient
from accordion_hvd.engine.ledger import MLflow
client = MlflowClient("file:" + sys.argv[1])
run = client.create_run(client.create_experiment("x")).info.run_id
fill(MLflow(run, client, every=10))
print([(x.step, x.value) for x in client.get_metric_history(run, "accordion/MB sent")])
"""
    output = run(program, tmp_path / "store", MLFLOW_ALLOW_FILE_STORE="true")
    assert output.strip() == "[(10, 5.5), (20, 15.5)]"
