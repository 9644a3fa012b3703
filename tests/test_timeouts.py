"""Tests of ACCORDION_HVD_TIMEOUT, after which a rank that stalls is noticed."""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
import time
from pathlib import Path

import launch
import pytest

from accordion_hvd import WAGMA
from accordion_hvd.comm import timeouts

TIMEOUT = 10  # longer than ranks start apart on a busy machine


def test_the_default_survives_an_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(timeouts.VARIABLE, raising=False)
    assert timeouts.seconds() == 900 and timeouts.interval() == 60
    assert WAGMA().timeout is None
    monkeypatch.setenv(timeouts.VARIABLE, "7.5")
    assert timeouts.seconds() == 7.5 and timeouts.interval() == 1.5


@pytest.mark.parametrize(
    ("entry", "since", "told"),
    [
        ("27 3 'x'", 0, "rank 1 has not joined collective 28: its last one is 27, 'x'"),
        ("0 3", 0, "rank 1 has not joined collective 28: it joined none"),
        ("0 0", 9, "rank 1 does not answer"),
        ("28 3 'y'", 0, "which rank is late is not known"),
    ],
)
def test_a_late_rank_is_told_in_a_sentence(entry: str, since: float, told: str) -> None:
    pytest.importorskip("torch")
    from accordion_hvd.comm.torch_distributed.watch import Watch

    watch = Watch()
    watch.count, watch._interval = 28, 1.0
    watch._seen = {1: (entry, time.monotonic() - since)}
    assert (", ".join(watch._late()) or "which rank is late is not known") == told


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "soon", "0.5", "1e9", "5 s"])
def test_a_wrong_timeout_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(timeouts.VARIABLE, text)
    with pytest.raises(ValueError, match=f"ACCORDION_HVD_TIMEOUT is '{text}', but must be a numb"):
        timeouts.seconds()


def test_horovods_setting_has_precedence(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "HOROVOD_GLOO_TIMEOUT_SECONDS"
    monkeypatch.setenv(name, "20")
    monkeypatch.setenv(timeouts.VARIABLE, "5.5")
    timeouts.limit_horovod()
    assert os.environ[name] == "20"
    monkeypatch.delenv(name)
    timeouts.limit_horovod()
    assert os.environ[name] == "6"
    monkeypatch.delenv(name)
    monkeypatch.setenv(timeouts.VARIABLE, "100")
    timeouts.limit_horovod()
    assert name not in os.environ  # Horovod's own 30 s are less


@pytest.mark.launch
@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "launcher, how",
    [
        pytest.param("torchrun", "sleep", marks=pytest.mark.nightly),
        ("gloo", "stop"),
        pytest.param("mpirun", "stop", marks=pytest.mark.nightly),
        pytest.param("carried", "sleep", marks=pytest.mark.nightly),
    ],
)
def test_a_stalled_rank_ends_the_others(launcher: str, how: str) -> None:
    launch.need(launcher)
    script = [sys.executable, str(launch.RANKS / "stalled.py"), how]
    report = launch.Report(launch.command_for(launcher, 3, script), 3)
    more = {timeouts.VARIABLE: str(TIMEOUT)}
    more |= {"ACCORDION_HVD_ENGINE": "torch"} if launcher == "carried" else {}
    with tempfile.TemporaryDirectory(prefix="ranks") as folder:
        launch._run(report, folder, 130, more)
        told = [json.loads(file.read_text()) for file in Path(folder).glob("told*")]
    ranks = {row["rank"] for row in told}
    # mpirun kills the other ranks as soon as one has ended. Over MPI, Horovod may not return from
    # the start of an operation; then a process beside the rank ends it, and says so.
    some = ranks < {0, 2} and (ranks or "and this process ends" in report.output)
    assert ranks == {0, 2} or (launcher == "mpirun" and some), report.output
    assert report.status is not None and report.seconds < 3 * TIMEOUT + 30, report.output
    for row in told:
        assert row["step"] == 3 and row["seconds"] < TIMEOUT + 10, row
        if launcher in ("torchrun", "carried"):  # Horovod does not say which rank it waits for
            assert "rank 1 " in row["error"]


@pytest.mark.launch
@pytest.mark.timeout(180)
def test_collectives_in_another_order_end() -> None:
    """A rank runs a collective of its own; the script has made the process groups.

    PyTorch's limit for them is half an hour.
    """
    launch.need("torchrun")
    script = [sys.executable, str(launch.RANKS / "stalled.py"), "alone"]
    report = launch.Report(launch.command_for("torchrun", 3, script), 3)
    with tempfile.TemporaryDirectory(prefix="ranks") as folder:
        launch._run(report, folder, 130, {timeouts.VARIABLE: str(TIMEOUT)})
        told = [json.loads(file.read_text()) for file in Path(folder).glob("told*")]
    assert report.status and report.seconds < TIMEOUT + 40, report.output
    assert {row["rank"] for row in told} >= {0, 2}
    for row in told:
        assert row["seconds"] < TIMEOUT + 10
        assert "rank 1 has not joined collective" in row["error"]
        assert re.search(r"its last one is \d+, 'accordion\.", row["error"])


@pytest.mark.launch
@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("launcher", "how"),
    [
        ("gloo", "sleep"),
        pytest.param("gloo", "metric", marks=pytest.mark.nightly),
        pytest.param("mpirun", "stop", marks=pytest.mark.nightly),
        pytest.param("mpirun", "metric", marks=pytest.mark.nightly),
    ],
)
def test_a_stalled_rank_ends_a_keras_training(launcher: str, how: str) -> None:
    launch.need(launcher)
    script = [sys.executable, str(launch.RANKS / "stalled_keras.py"), how]
    report = launch.Report(launch.command_for(launcher, 3, script), 3)
    with tempfile.TemporaryDirectory(prefix="ranks") as folder:
        launch._run(report, folder, 130, {timeouts.VARIABLE: str(TIMEOUT)})
        (stalled,) = (json.loads(file.read_text()) for file in Path(folder).glob("told*"))
    ended = time.monotonic() - stalled["time"]
    assert report.status and ended < TIMEOUT + 20, report.output
    assert "a rank does not answer, and this process ends" in report.output
