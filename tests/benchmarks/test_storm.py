"""Tests of the evaluation of storms, with journals of known times."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.report import END, write_page
from benchmarks.storm import job, page
from benchmarks.storm.journal import Journal, evaluate
from examples.results import read_json, write_json

ROOT = Path(__file__).resolve().parents[2]


def entry(time: float, event: str, **values: Any) -> dict[str, Any]:
    return {"time": time, "event": event, **values}


CALM = [
    entry(0.0, "enter", step=0, ranks=4, drift=None),
    *(entry(float(step), "step", step=step) for step in range(1, 8)),
    entry(5.1, "commit", step=5),
]
"""Seven steps, and a commit after the fifth."""


def test_a_kill_loses_the_steps_since_the_commit() -> None:
    after = [entry(9.0, "enter", step=5, ranks=3, drift=0.2), entry(14.0, "step", step=6)]
    rows = evaluate([*sorted(CALM, key=lambda e: e["time"]), entry(7.5, "kill"), *after,
                     entry(16.5, "commit", step=10)])  # fmt: skip
    assert rows == [
        {"event": "kill", "seconds": 9.0, "ranks": 3, "lost": 2, "uncommitted": 2, "drift": None}
    ]


def test_an_orderly_change_loses_nothing() -> None:
    steps = [*CALM, entry(8.1, "commit", step=7)]
    found = [entry(7.5, "join"), entry(9.0, "enter", step=7, ranks=5, drift=1e-7)]
    ordered = sorted([*steps, *found], key=lambda e: e["time"])
    (row,) = evaluate([*ordered, entry(12.0, "commit", step=10)])
    assert row["lost"] == 0 and row["seconds"] == 4.5 and row["drift"] == 1e-7


@pytest.mark.parametrize(
    ("events", "counted", "seconds"),
    [
        (("join", "kill"), "kill", 1.5),
        (("kill", "join"), "kill", 2.0),
        (("join", "leave"), "leave", 1.5),
    ],
)
def test_changes_that_come_together_count_once(
    events: tuple[str, str], counted: str, seconds: float
) -> None:
    """Changes before the ranks connect again give one row: the kill, otherwise the last change.

    The seconds count from that change. A kill has no drift, since it loses a residual in any case.
    """
    ordered = sorted(CALM, key=lambda e: e["time"])
    changes = [entry(7.5, events[0]), entry(8.0, events[1])]
    found = [*changes, entry(9.0, "enter", step=5, ranks=4, drift=0.1)]
    (row,) = evaluate([*ordered, *found, entry(9.5, "commit", step=6)])
    assert (row["event"], row["seconds"]) == (counted, seconds)
    assert (row["drift"] is None) == (counted == "kill")
    assert evaluate([*ordered, *found]) == []  # no commit followed


def test_a_journal_survives_several_writers(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    assert Journal(path).entries() == [] and not Journal(path).has("step")
    for writer in (Journal(path), Journal(path)):
        writer.write("step", step=1)
    assert [row["step"] for row in Journal(path).entries()] == [1, 1]
    assert Journal(path).has("step") and not Journal(path).has("commit")


def test_hosts_are_never_used_again(tmp_path: Path) -> None:
    hosts = job.Hosts(tmp_path, 2)
    assert (tmp_path / "hosts").read_text() == "127.0.1.1:1\n127.0.1.2:1\n"
    hosts.forget("127.0.1.2")  # a rank has died there: Horovod learns of it by itself
    assert "127.0.1.2" in (tmp_path / "hosts").read_text()
    assert hosts.add() == "127.0.1.3"
    hosts.remove("127.0.1.1")
    assert (tmp_path / "hosts").read_text() == "127.0.1.3:1\n"


def found(loss: float, changes: list[dict[str, Any]]) -> dict[str, Any]:
    settings = {"compression": "topk:0.01", "ranks": 8, "steps": 10, "interval": 30}
    settings |= {"pace": 0.3, "every": 5}
    result = {"loss": loss, "equal": True}
    return {
        "settings": settings,
        "status": 0,
        "seconds": 60.0,
        "changes": changes,
        "result": result,
    }


def test_the_section_replaces_itself_only(tmp_path: Path) -> None:
    change = {"seconds": 5.0, "ranks": 8, "lost": 2, "uncommitted": 2, "drift": None}
    rows = [{"event": "kill", **change}, {"event": "join", **change, "drift": 3e-7}]
    text = page.section([(found(2.0, []), found(2.01, rows))])
    assert "| 5.0 | 5.0 | 2 | 3e-07 | 2.0000 | 2.0100 | +0.5 % | yes | 1 |" in text
    path = tmp_path / "page.md"
    path.write_text("an old page\n")
    with pytest.raises(SystemExit, match="no results"):
        page.write(tmp_path, path)
    write_json(tmp_path / "x-calm.json", found(2.0, []))
    write_json(tmp_path / "x-storm.json", found(2.01, rows))
    page.write(tmp_path, path)
    once = path.read_text()
    assert once.startswith("an old page\n\n" + END) and text in once
    page.write(tmp_path, path)
    assert path.read_text() == once
    write_page(path, "measured again")  # as `make faults` does
    assert text in path.read_text() and "an old page" not in path.read_text()


@pytest.mark.launch
@pytest.mark.usefixtures("token")
@pytest.mark.parametrize("method", ["topk:0.1", "torchft powersgd:2"])
def test_ranks_survive_a_short_storm(method: str, tmp_path: Path) -> None:
    """After a storm with a kill, all ranks have equal weights and nearly the loss of a calm run."""
    options = ["--task", "digits", "--ranks", "3", "--steps", "160", "--pace", "0.2"]
    options += ["--interval", "15", "--lr", "0.01", "--output", str(tmp_path), "--limit", "150"]
    done = subprocess.run(
        [sys.executable, "scripts/reliability.py", "storm", method, *options],
        cwd=ROOT, capture_output=True, text=True, timeout=360, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    calm, stormy = (read_json(next(tmp_path.glob(f"*-{kind}.json"))) for kind in ("calm", "storm"))
    assert calm["changes"] == [] and calm["result"]["equal"]
    assert "kill" in [change["event"] for change in stormy["changes"]]
    assert stormy["result"]["equal"]
    assert stormy["result"]["loss"] == pytest.approx(calm["result"]["loss"], rel=0.2)
    for change in stormy["changes"]:
        assert change["lost"] <= 5
        assert change["drift"] is None or change["drift"] < 1e-5
