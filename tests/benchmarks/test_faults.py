"""Tests of the fault benchmark: the table of faults, verdicts, the page, and one launched case."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from launch import need

from benchmarks import reliability
from benchmarks.faults import command, page, verdict
from benchmarks.faults.actions import ACTIONS
from benchmarks.faults.cases import CASES, EXPECTED, LAUNCHERS, REFUSED, SECTIONS, TORCH, Case
from benchmarks.faults.launch import Launch
from benchmarks.faults.training import METHODS

OUTSIDE = ("settings", "files", "")
"""Places whose action is no key of `ACTIONS`."""


def test_the_table_is_consistent() -> None:
    assert len(CASES) >= 30
    assert len(CASES) == sum(len(cases) for cases in SECTIONS.values())  # names are unique
    for case in CASES.values():
        assert case.expected in EXPECTED and case.method in METHODS and case.runs()
        assert case.rank < case.ranks and set(case.launchers) <= set(LAUNCHERS)
        assert TORCH not in case.keras
        assert case.place in OUTSIDE or case.action in ACTIONS or case.action == "level"


def test_every_launcher_and_both_frameworks_are_tried() -> None:
    runs = [run for case in CASES.values() for run in case.runs()]
    assert {launcher for _, launcher in runs} == set(LAUNCHERS)
    assert {framework for framework, _ in runs} == {"PyTorch", "Keras"}


@pytest.mark.parametrize("action", ["nan", "random", "dense"])
def test_a_message_keeps_its_length(action: str) -> None:
    message = np.arange(100, dtype=np.uint8)
    altered = ACTIONS[action](message)
    assert altered.shape == message.shape and (altered != message).any()
    assert (message == np.arange(100)).all()  # the rank's own gradient is as before


def test_a_message_of_another_length() -> None:
    message = np.zeros(100, np.uint8)
    assert ACTIONS["truncate"](message).size == 84 and ACTIONS["lengthen"](message).size == 116


def events(*rows: tuple[str, float, int]) -> list[dict]:
    """Return the record of a rank: kind, time and checksum of each event."""
    steps = iter(range(1, 100))
    found: list[dict] = [{"event": "started", "time": 0.0, "pid": 1}]
    for kind, time, crc in rows:
        about = {"step": next(steps), "crc": crc} if kind == "step" else {"text": f"Lost: {crc}"}
        found.append({"event": kind, "time": time, **about})
    return found


CASE = Case("kill", "SIGKILL", "forward", "kill", ranks=3)
DEAD = events(("step", 1, 5), ("fault", 2, 0))


def test_a_dead_rank_that_the_others_notice() -> None:
    others = events(("step", 1, 5), ("error", 4, 0))
    launch = Launch({0: others, 1: DEAD, 2: others}, {0: 5.0, 1: 2.0, 2: 6.5}, 1)
    row = verdict.judge(CASE, [launch], [])
    assert not row["problem"] and row["seconds"] == 4.5 and row["lost"] == 1 and row["equal"]
    assert page.happened(row) == "2 of 3 ranks raised: Lost: 0"


def test_weights_that_differ_are_a_problem() -> None:
    launch = Launch({0: events(("step", 1, 5)), 1: DEAD, 2: events(("step", 1, 6))}, {}, 1)
    launch.ended = {0: 3.0, 1: 2.0, 2: 3.0}
    row = verdict.judge(CASE, [launch], [])
    assert not row["equal"] and row["problem"] == "weights differ after step 1"


@pytest.mark.parametrize(("status", "ended"), [(None, [0, 1, 2]), (1, [0, 1])])
def test_a_rank_or_a_launcher_that_does_not_end_hangs(status: int | None, ended: list) -> None:
    launch = Launch({rank: DEAD for rank in range(3)}, dict.fromkeys(ended, 3.0), status)
    row = verdict.judge(CASE, [launch], [])
    assert row["hung"] and row["problem"] == "a rank or the launcher did not end"


def test_slow_notice_is_a_problem() -> None:
    launch = Launch({rank: DEAD for rank in range(3)}, dict.fromkeys(range(3), 40.0), 1)
    assert verdict.judge(CASE, [launch], [])["problem"] == "took more than 30 s"


def test_other_errors_than_expected_are_a_problem() -> None:
    case = dataclasses.replace(CASE, expected=REFUSED, says="disagree", ranks=2, action="width")
    ranks = {0: events(("fault", 1, 0), ("error", 1, 0)), 1: events(("error", 1, 0))}
    launch = Launch(ranks, {0: 2.0, 1: 2.0}, 1)
    assert verdict.judge(case, [launch], [])["problem"] == "an error says something else"
    case = dataclasses.replace(case, says="Lost")
    assert verdict.judge(case, [launch], [])["problem"] == ""
    ended = events(("step", 2, 5), ("end", 3, 0))
    resumed = Launch({0: ended, 1: ended}, {0: 3.0, 1: 3.0}, 0)
    case = dataclasses.replace(case, resumed_on=2)
    assert not verdict.judge(case, [launch, resumed], [])["problem"]
    case = dataclasses.replace(case, says="disagree")
    assert verdict.judge(case, [launch, resumed], [])["problem"] == "an error says something else"


def test_errors_on_the_page() -> None:
    error = "UnknownError: Graph execution error:\n\nRanksDisagree: ranks [1] were set up | so"
    assert page.phrase(error) == "RanksDisagree: ranks [1] were set up | so"
    assert len(page.phrase("a" * 1000)) <= 130
    assert (
        page.phrase("[/tmp/x-5k/gloo/pair.cc:598] closed, '/proc/y'")
        == "[pair.cc:598] closed, '/proc/y'"
    )


def test_damaged_checkpoints(tmp_path: Path) -> None:
    for kind, sizes in {"cut": [10, 5], "swapped": [10, 10], "missing": [10]}.items():
        folder = tmp_path / kind / "state-00002"
        folder.mkdir(parents=True)
        for rank in range(2):
            (folder / f"rank-0000{rank}-of-00002.npz").write_bytes(bytes([rank]) * 10)
        command.damage(kind, tmp_path / kind)
        contents = [path.read_bytes() for path in sorted(folder.iterdir())]
        assert [len(content) for content in contents] == sizes
        assert contents[0] == (bytes([1]) if kind == "swapped" else bytes([0])) * 10


@pytest.mark.nightly
@pytest.mark.launch
def test_a_case_from_its_launch_to_the_page(tmp_path: Path) -> None:
    need("torchrun")
    results, written = tmp_path / "faults.json", tmp_path / "reliability.md"
    words = [
        "kill-decision",
        "--launchers",
        TORCH,
        "--output",
        str(results),
        "--page",
        str(written),
    ]
    reliability.main(["faults", *words])
    (row,) = json.loads(results.read_text())["rows"].values()
    assert not row["problem"] and not row["hung"] and row["equal"], row
    assert "| SIGKILL of rank 0 in a decision | PyTorch | torchrun |" in written.read_text()
