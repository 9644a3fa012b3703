"""What all tests share: environment, import paths, what runs together, and CPU seconds."""

from __future__ import annotations

import inspect
import os
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

HERE = Path(__file__).resolve().parent
for folder in (HERE / "support", HERE.parent):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

from grouping import Scheduling, cpu_seconds, front_to_back, is_launch, unit_of  # noqa: E402


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--times", action="store_true", help="print the CPU seconds of each file and launch"
    )


# --- what runs in one process, and in which order ---------------------------------------


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Have `pytest -n` run whole files and launches; its groups do not work with pytest 9.2."""
    return Scheduling(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):  # a process of `pytest -n`
        items[:] = front_to_back(items)


def pytest_itemcollected(item: Any) -> None:
    """Mark tests as nightly where a function of the mark `seldom` is true of their parameters.

    `where` is for all frameworks; `tensorflow` is for TensorFlow, which repeats what others show.
    """
    for place, holds in (x for mark in item.iter_markers("seldom") for x in mark.kwargs.items()):
        known = item.callspec.params
        given = [known[name] for name in inspect.signature(holds).parameters]
        if place in ("where", getattr(known.get("framework"), "name", "")) and holds(*given):
            item.add_marker("nightly")


# --- CPU seconds ------------------------------------------------------------------------


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    item.stash[_BEGAN] = cpu_seconds()
    yield


@pytest.hookimpl(hookwrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    yield
    group = unit_of(item) if is_launch(item) else item.nodeid.partition("::")[0]
    seconds = round(cpu_seconds() - item.stash[_BEGAN], 3)
    item.user_properties += [("group", group), ("cpu", seconds)]


_BEGAN: pytest.StashKey[float] = pytest.StashKey()
_seconds: dict[str, list[float]] = defaultdict(list)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "teardown":
        found: dict[str, Any] = dict(report.user_properties)
        _seconds[found["group"]].append(found["cpu"])


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if not config.getoption("--times"):
        return
    terminalreporter.section("CPU seconds of files and launches")
    total = sum(map(sum, _seconds.values()))
    for group, values in sorted(_seconds.items(), key=lambda row: -sum(row[1])):
        terminalreporter.line(f"{sum(values):8.1f} {len(values):6}  {group}")
    terminalreporter.line(f"{total:8.1f} {sum(map(len, _seconds.values())):6}  all")
