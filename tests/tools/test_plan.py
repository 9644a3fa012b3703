"""Tests of `accordion-hvd plan`, which measures a model and prints a table and a verdict."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result
from launch import command_for, need

from accordion_hvd.comm.recording import Operation
from accordion_hvd.simulation.prediction import Cluster
from accordion_hvd.simulation.programs import FusionGroup, Program
from accordion_hvd.tools import command as entry
from accordion_hvd.tools import text
from accordion_hvd.tools.command import main
from accordion_hvd.tools.plan import command, model, table

torch = pytest.importorskip("torch")

SCRIPT = """
import torch

def build():
    network = torch.nn.Sequential(torch.nn.Linear(400, 300), torch.nn.Linear(300, 10))
    inputs, labels = torch.randn(8, 400), torch.randint(0, 10, (8,))
    return network, lambda: torch.nn.functional.cross_entropy(network(inputs), labels).backward()

def without_step():
    return build()[0]

def nothing():
    return 3
"""
LEVELS = "Accordion(low=PowerSGD(4), high=PowerSGD(1))"
CLUSTER = ("--hosts", "4", "--link", "10mbit", "--rtt", "1ms", "--cores", "4")


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def plan(*words: str) -> Result:
    return CliRunner().invoke(main, ["plan", *words])


def test_a_slow_link_is_worth_compression(script: Path, tmp_path: Path) -> None:
    saved = tmp_path / "plan.json"
    done = plan(
        "dense", "powersgd:1", "--model", f"{script}:build", *CLUSTER, "--price", "10",
        "--json", str(saved),
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    assert lines[0].startswith("0.1 million parameters in 4 tensors")
    assert "4 hosts of 1 rank, 10 Mbit/s, round-trip time 1 ms, horovod" in lines[1]
    assert [line.split()[0] for line in lines[3:6]] == ["configuration", "powersgd:1", "dense"]
    assert lines[-1].startswith("Compression pays: powersgd:1 takes ")
    found = json.loads(saved.read_text())
    dense = next(row for row in found["rows"] if row["configuration"] == "dense")
    assert dense["sent"] == pytest.approx(1.5 * 4 * (400 * 300 + 300 + 3010), rel=0.01)
    assert dense["seconds"] == pytest.approx(dense["sent"] / (10e6 / 8 * 0.955), rel=0.2)
    assert dense["per_hour"] == pytest.approx(3600 * dense["sent"] / dense["seconds"])


def test_a_fast_link_is_not(script: Path) -> None:
    words = ("--hosts", "2", "--link", "none", "--cores", "2", "--compute", "80ms")
    done = plan("dense", "topk:0.01", "--model", f"{script}:without_step", *words)
    assert done.exit_code == 0, done.output
    assert "80 ms of computation a step" in done.output
    assert done.output.splitlines()[-1].startswith("Compression does not pay: dense ")


def test_without_horovod_the_engine_is_torch(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine is one that is installed; Keras has no other than Horovod."""
    monkeypatch.setitem(sys.modules, "horovod", None)
    words = ("--model", f"{script}:without_step", "--compute", "80ms", *CLUSTER)
    for option, engine in (((), "torch"), (("--engine", "horovod"), "horovod")):
        done = plan("dense", *words, *option)
        assert done.output.splitlines()[1].endswith(f", {engine}"), done.output
    keras = SimpleNamespace(xp=SimpleNamespace(__name__="accordion_hvd.ops.tensorflow"))
    assert command._installed(keras) == "horovod"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("dense", "--model", "SCRIPT:build"), "pass --hosts and --link"),
        (("dense", "--model", "SCRIPT:build", "--hosts", "2"), "pass --hosts and --link"),
        (("dense", "--model", "SCRIPT:other", *CLUSTER), "has no function 'other'"),
        (("dense", "--model", "SCRIPT", *CLUSTER), "must be FILE.py:FUNCTION"),
        (("dense", "--model", "missing.py:build", *CLUSTER), "cannot be loaded"),
        (("dense", "--model", "missing_module:build", *CLUSTER), "cannot be loaded"),
        (("dense", "--model", "SCRIPT:nothing", *CLUSTER), "returned int, but must return"),
        (("dense", "--model", "SCRIPT:without_step", *CLUSTER), "pass the time of a step"),
        (("gzip", "--model", "SCRIPT:build", *CLUSTER), "gzip"),
        ((LEVELS, "--model", "SCRIPT:build", *CLUSTER), "one compressor"),
        (("dense", "--model", "SCRIPT:build", "--hosts", "2", "--link", "fast"), "'fast'"),
        (("dense", "--model", "SCRIPT:build", *CLUSTER, "--rtt", "-1"), "'-1'"),
        (("dense", "--model", "SCRIPT:build", *CLUSTER, "--cores", "0"), "cores"),
    ],
)
def test_refused(words: tuple[str, ...], told: str, script: Path) -> None:
    done = plan(*(word.replace("SCRIPT", str(script)) for word in words))
    assert done.exit_code in (1, 2) and told in done.output, done.output
    assert "Traceback" not in done.output


def test_companions_end_with_the_context(script: Path) -> None:
    def children() -> int:
        return sum(
            f"accompany('{script}" in (path / "cmdline").read_text()
            for path in Path("/proc").glob("[0-9]*")
            if (path / "cmdline").exists()
        )

    with model.companions(f"{script}:build", 2, 1):
        assert children() == 2
    assert not children()


def test_gradients_are_timed_during_the_backward_pass(script: Path) -> None:
    found = model.measure(f"{script}:build", None, 1)
    names = [tensor.name for tensor in found.gradients.tensors]
    assert set(names[:2]) == {"1.weight", "1.bias"} and set(names[2:]) == {"0.weight", "0.bias"}
    ready = found.gradients.ready
    assert ready[0] == 0 and ready[-1] == 1 and list(ready) == sorted(ready)
    assert 0 < found.backward < 1 and found.compute > 0


def test_the_example_in_both_frameworks() -> None:
    for make in (command._torch, command._keras):
        made, step = make()
        step()
        weights = made.parameters() if make is command._torch else made.trainable_variables
        assert 9e6 < sum(math.prod(x.shape) for x in weights) < 11e6
    found = plan("dense", *CLUSTER)
    assert found.exit_code == 0 and found.output.startswith("An example; pass --model")


def test_a_keras_model(tmp_path: Path) -> None:
    pytest.importorskip("tensorflow")
    path = tmp_path / "script.py"
    path.write_text(
        "import keras, numpy\n"
        "def build():\n"
        "    model = keras.Sequential([keras.Input((400,)), keras.layers.Dense(300)])\n"
        "    model.compile('sgd', 'mse')\n"
        "    x, y = numpy.zeros((4, 400)), numpy.zeros((4, 300))\n"
        "    return model, lambda: model.train_on_batch(x, y)\n"
    )
    done = plan("dense", "topk:0.01", "--model", f"{path}:build", *CLUSTER)
    assert done.exit_code == 0, done.output
    assert done.output.splitlines()[-1].startswith("Compression pays: topk:0.01 takes ")


@pytest.mark.launch
@pytest.mark.parametrize("launcher", ["gloo", "torchrun"])
def test_ranks_measure_their_link(launcher: str, script: Path) -> None:
    need(launcher)
    words = ["plan", "dense", "powersgd:1", "--model", f"{script}:build"]
    program = [sys.executable, str(Path(entry.__file__)), *words]
    done = subprocess.run(
        command_for(launcher, 2, program), capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("1 host of 2 ranks, ") == 1
    rows = [line for line in done.stdout.splitlines() if "powersgd:1" in line or "dense" in line]
    assert len(rows) == 3, done.stdout  # two rows of the table, and the verdict


@pytest.mark.parametrize(
    ("cluster", "processes"),
    [(Cluster(4, 1, cores=0.5), 2), (Cluster(4, 1, cores=2), 1), (Cluster(4, 8, cores=2), 2)],
)
def test_as_many_processes_compute_as_in_the_job(
    cluster: Cluster, processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command.os, "cpu_count", lambda: 2)
    assert command.busy(cluster) == processes


def test_small_gains_do_not_count() -> None:
    rows = [table.Row(1.0, 1, 0, 1e6, "dense"), table.Row(0.98, 1, 0, 5e5, "fp16")]
    assert "does not pay" in table.verdict(rows)
    assert table.verdict(rows[:1]) == "dense takes 1000 ms a step."
    assert table.verdict(rows[1:]) == "Fastest: fp16 takes 980 ms a step."


def test_gradients_are_ready_as_in_the_backward_passes() -> None:
    """Medians of the turns that all tensors have, the last ones, decide order and length."""
    times = {"a": [9.0, 3.0], "b": [1.0], "c": [2.0]}
    assert model._readiness("abc", times, 4.0) == ([("b", 0.0), ("c", 0.5), ("a", 1.0)], 0.5)
    two = {"a": [1.0, 5.0, 10.0], "b": [2.0, 8.0, 12.0]}  # b is ready 1, 3 and 2 seconds later
    assert model._readiness("ab", two, 8.0) == ([("a", 0.0), ("b", 1.0)], 0.25)


def test_times() -> None:
    found = [text.parse_time(word) for word in ("20ms", "1.5s", "500us", "none")]
    assert found == pytest.approx([0.02, 1.5, 5e-4, 0])


def test_parts_are_listed_where_they_save_bytes() -> None:
    assert not any(x.startswith("doublesqueeze") for x in table.configurations(2))
    assert set(table.configurations(3)) - set(table.configurations(2)) == set(table.IN_PARTS)


@pytest.mark.parametrize("engine", ["horovod", "torch"])
@pytest.mark.parametrize("spec", ["qsgd:4", "topk:0.01", "efsignsgd", "doublesqueeze:qsgd:4"])
def test_many_ranks_are_extrapolated(
    spec: str, engine: str, script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Operations are those of a rehearsal on all ranks, which gathering methods do not run."""
    found = model.measure(f"{script}:build", 0.1, 1)
    cluster, asked = Cluster(96, 1, 1e8), []
    plain = table.Rehearsal

    def noted(*words: Any) -> Any:
        asked.append(words[4])
        return plain(*words)

    monkeypatch.setattr(table, "Rehearsal", noted)
    whole = table.rehearse(found, spec, cluster, engine)
    assert asked == [table.FEW, table.MANY, 96]
    monkeypatch.setattr(table, "LARGE", 0)
    part = table.rehearse(found, spec, cluster, engine)
    gathers = not spec.startswith("doublesqueeze")
    assert asked[3:] == [table.FEW, table.MANY, *([] if gathers else [96])]
    for a, b in zip(whole, part, strict=True):
        assert [x.kind for x in a.operations] == [x.kind for x in b.operations]
        for x, y in zip(a.operations, b.operations, strict=True):
            assert x.size == pytest.approx(y.size, rel=0.05, abs=16)


def test_work_grows_with_the_ranks() -> None:
    launch = ((Operation("alltoall", 640.0), Operation("allgather", 10.0)),)
    steps = []
    for ranks in (table.FEW, table.MANY, 1024):
        parts = replace(launch[0][1], size=640.0 / ranks)
        rounds = (((launch[0][0], parts), (Operation("allgather", 7.0),)),)
        group = FusionGroup(1.0, 0.5, rounds, (1e-3 * ranks,))
        steps.append(Program((group,), 0.5))
    assert table.extrapolated(*steps[:2], 1024).operations == steps[2].operations
    assert table.extrapolated(*steps[:2], 1024).work == pytest.approx(steps[2].work)
