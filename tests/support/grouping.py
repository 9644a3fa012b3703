"""What runs together, and what it costs."""

from __future__ import annotations

import os
import re
import sys
from collections import defaultdict
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling


class Scheduling(LoadScopeScheduling):
    """Has one process run all tests of a file, or all checks of a launch.

    The first process takes them from the front of `front_to_back`, others from its back. So ranks,
    which wait for each other, run beside files, which always have work for a core; two launches run
    at a time only when no files are left.
    """

    def _split_scope(self, nodeid: str) -> str:
        return launch_of(nodeid) or nodeid.partition("::")[0]

    def _assign_work_unit(self, node: Any) -> None:
        if node is not self.nodes[0]:
            self.workqueue.move_to_end(next(reversed(self.workqueue)), last=False)
        super()._assign_work_unit(node)


def launch_of(nodeid: str) -> str | None:
    """Return the launch of a check: its test's name without the check's; None for other tests."""
    found = re.fullmatch(r"(.*)-(check_\w+|\(end\))\]", nodeid)
    return f"{found[1]}]" if found else None


def is_launch(item: pytest.Item) -> bool:
    return item.get_closest_marker("launch") is not None


def unit_of(item: pytest.Item) -> str:
    """Return the smallest part that a test can be run in: its launch, or the test."""
    return launch_of(item.nodeid) or item.nodeid


def front_to_back(items: list[pytest.Item]) -> list[pytest.Item]:
    """Return launches, then files.

    What takes long is taken early, so that both processes end together: launches of Keras and files
    of many tests.
    """
    groups: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        groups[launch_of(item.nodeid) or item.nodeid.partition("::")[0]].append(item)

    def place(group: list[pytest.Item]) -> tuple[bool, bool, int]:
        if any(map(is_launch, group)):
            return False, "keras" not in group[0].nodeid, -len(group)
        return True, True, len(group)

    return [item for group in sorted(groups.values(), key=place) for item in group]


def cpu_seconds() -> float:
    """Return the CPU seconds of this process, of those it awaited, and of forked ranks."""
    forked = sys.modules.get("forked")
    servers = forked.ForkServer.running if forked else []
    return sum(os.times()[:4]) + sum(server.seconds() for server in servers)
