"""What runs together, and what it costs."""

from __future__ import annotations

import os
import re
import sys
from collections import defaultdict

import pytest
from xdist.scheduler import LoadScopeScheduling


class Scheduling(LoadScopeScheduling):
    """Has one process run all tests of a file, and another one all checks of a launch."""

    def _split_scope(self, nodeid: str) -> str:
        return launch_of(nodeid) or nodeid.partition("::")[0]


def launch_of(nodeid: str) -> str | None:
    """Return the launch of a check: its test's name without the check's; None for other tests."""
    found = re.fullmatch(r"(.*)-(check_\w+|\(end\))\]", nodeid)
    return f"{found[1]}]" if found else None


def is_launch(item: pytest.Item) -> bool:
    return item.get_closest_marker("launch") is not None


def unit_of(item: pytest.Item) -> str:
    """Return the smallest part that a test can be run in: its launch, or the test."""
    return launch_of(item.nodeid) or item.nodeid


def take_turns(items: list[pytest.Item]) -> list[pytest.Item]:
    """Return tests in an order in which launches and files take turns.

    A file has work for a core while ranks wait for each other.
    """
    groups: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        groups[launch_of(item.nodeid) or item.nodeid.partition("::")[0]].append(item)
    turns = [
        [group for name, group in groups.items() if ("[" in name) == launched]
        for launched in (True, False)
    ]
    placed = [(n / len(some), group) for some in turns for n, group in enumerate(some)]
    return [item for _, group in sorted(placed, key=lambda row: row[0]) for item in group]


def cpu_seconds() -> float:
    """Return the CPU seconds of this process, of those it awaited, and of forked ranks."""
    forked = sys.modules.get("forked")
    servers = forked.ForkServer.running if forked else []
    return sum(os.times()[:4]) + sum(server.seconds() for server in servers)
