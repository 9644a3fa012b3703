"""Tests of the distributed suites, and of the harness, which notices ranks that fail or hang.

Each check of a suite is one test for each launcher and number of ranks of the suite. A new suite is
a script in `tests/ranks` and one row in SUITES.
"""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
from launch import END, checks_of, command_for, launch, need

BOTH = [("gloo", 2), ("mpirun", 4)]  # each launcher, each number of ranks
AMONG_MORE = (
    "check_weights_are_equal_after_training",
    "check_accordion_switches_in_fit",
    "check_custom_loops",
)
"""Keras' checks that are more than repeated by more ranks, which take minutes for all of them."""

OF_HOROVOD = (
    "check_names_are_complete",
    "check_elastic_state",
    "check_dense_equals_stock_horovod",
    "check_stock_wrapper_refuses_ours",
)
"""PyTorch's checks that need Horovod."""

WITHOUT_HOROVOD = tuple(x for x in checks_of("torch_checks.py") if x not in OF_HOROVOD)

SUITES: dict[str, list[Any]] = {
    "core_checks.py": [*BOTH, ("torchrun", 2), ("torchrun", 4), ("carried", 2)],
    "torch_checks.py": [
        *BOTH,
        ("torchrun", 2, WITHOUT_HOROVOD),
        ("carried", 2, WITHOUT_HOROVOD),
        ("carried", 4, ("check_weights_are_equal_after_training",)),
    ],
    "engine_checks.py": [("torchrun", 2), ("torchrun", 4)],
    "ddp_checks.py": [("torchrun", 2), ("torchrun", 4)],
    "fsdp_checks.py": [("torchrun", 4)],
    "old_checkpoints_checks.py": BOTH[:1],
    "optimizer_checks.py": BOTH,
    "tf_checks.py": BOTH,
    "keras_checks.py": [("gloo", 2), ("mpirun", 4, AMONG_MORE)],
    "keras_optimizer_checks.py": [("mpirun", 2)],
    "graph_checks.py": BOTH,
    "graph_training_checks.py": [("gloo", 2)],
    "privacy_torch_checks.py": [("gloo", 1), *BOTH],
    "privacy_keras_checks.py": BOTH[:1],
    "levers_checks.py": BOTH[:1],
    "levers_keras_checks.py": BOTH[:1],
    "levers_models_checks.py": [("mpirun", 4)],
    "levers_models_keras_checks.py": [("mpirun", 4)],
    "averaging_checks.py": [("mpirun", 4), ("mpirun", 5)],
    "torch_averaging_checks.py": [("gloo", 4), ("mpirun", 4)],
    "keras_averaging_checks.py": [("gloo", 2)],
    "keras_waiting_checks.py": [("mpirun", 4)],
}
"""Script -> where it runs, and which checks if not all of them."""

LIMIT = 540  # seconds a launch may take (a minute or two where the cores are free)


def everything() -> list[Any]:
    return [
        pytest.param(
            script, launcher, ranks, chosen, check, id=f"{script[:-3]}-{launcher}{ranks}-{check}"
        )
        for script, places in SUITES.items()
        for launcher, ranks, *some in places
        for chosen in [some[0] if some else ()]
        for check in [*(chosen or checks_of(script)), END]
    ]


@pytest.mark.launch
@pytest.mark.timeout(LIMIT + 30)
@pytest.mark.parametrize(("script", "launcher", "ranks", "chosen", "check"), everything())
def test_ranks(script: str, launcher: str, ranks: int, chosen: tuple[str, ...], check: str) -> None:
    need(launcher)
    problem = launch(script, launcher, ranks, LIMIT, checks=chosen).problem(check)
    if problem:
        pytest.fail(problem, pytrace=False)


by_launcher = pytest.mark.parametrize("launcher", ["gloo", "mpirun"])


@pytest.mark.launch
@pytest.mark.timeout(120)
@by_launcher
def test_a_rank_that_fails_is_named(launcher: str) -> None:
    need(launcher)
    report = launch("failing_checks.py", launcher, 2, limit=60, check_limit=30)
    assert report.status not in (0, None)
    assert report.seconds < 40, "the others should have been ended"
    assert report.problem("check_passes") is None
    problem = report.problem("check_fails_on_rank_1")
    assert problem and "failed on rank(s) [1]" in problem
    assert "ValueError: intended" in problem
    later = report.problem("check_is_not_reached")
    assert later and "not reached" in later
    assert "rank 1 failed in check_fails_on_rank_1" in later
    assert report.problem(END)


@pytest.mark.launch
@pytest.mark.timeout(120)
@by_launcher
def test_a_rank_that_hangs_is_named(launcher: str) -> None:
    need(launcher)
    report = launch("hanging_checks.py", launcher, 2, limit=60, check_limit=4)
    assert report.status not in (0, None)
    assert report.seconds < 50, "a hang must end by the limit of its check"
    assert report.problem("check_passes") is None
    problem = report.problem("check_hangs_on_rank_1")
    assert problem and "took too long on rank(s) [1]" in problem
    assert "in wait_for_ever" in problem
    assert report.last(0) == "check_waits_for_rank_1"
    waiting = report.problem("check_waits_for_rank_1")
    assert waiting and "in wait_for_others" in waiting


@pytest.mark.launch
@pytest.mark.timeout(120)
@by_launcher
def test_a_launch_that_does_not_end_is_ended(launcher: str) -> None:
    """The harness ends a launch that exceeds the limit of the whole launch; no process is left."""
    need(launcher)
    report = launch("hanging_checks.py", launcher, 2, limit=12, check_limit=300)
    assert report.status is None
    assert report.seconds < 30
    problem = report.problem("check_hangs_on_rank_1")
    assert problem and "was ended after" in problem
    assert "in wait_for_ever" in problem and "last in check_waits_for_rank_1" in problem
    time.sleep(0.5)
    assert not [pid for pid in _pids() if b"hanging_checks.py" in _command(pid) and _ours(pid)]


def _pids() -> list[str]:
    return [name for name in os.listdir("/proc") if name.isdigit()]


def _command(pid: str) -> bytes:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read()
    except OSError:
        return b""


def _ours(pid: str) -> bool:
    """Return whether a process has the limit of this test (others may run the same suite)."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return b"CHECK_LIMIT=300" in file.read()
    except OSError:
        return False


def test_checks_are_found_in_order() -> None:
    assert checks_of("failing_checks.py") == [
        "check_passes",
        "check_fails_on_rank_1",
        "check_is_not_reached",
    ]
    assert checks_of("not_there.py") == []


def test_root_is_allowed_only_as_root(monkeypatch: pytest.MonkeyPatch) -> None:
    need("mpirun")
    for user, allowed in ((0, True), (1000, False)):
        monkeypatch.setattr(os, "geteuid", lambda user=user: user)
        assert ("--allow-run-as-root" in command_for("mpirun", 2, ["true"])) is allowed
