"""Environment, import paths and selection of tests that all tests share."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

HERE = Path(__file__).resolve().parent
for folder in (HERE / "support", HERE.parent):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep only the tests of the part that TEST_PART names; without the variable, keep all tests.

    `make test` sets the variable. The part "launch" starts real ranks, which need
    all cores; "alone" is all other tests.
    """
    part = os.environ.get("TEST_PART")
    if part:
        keep = [
            i for i in items if (i.get_closest_marker("launch") is not None) == (part == "launch")
        ]
        config.hook.pytest_deselected(items=[item for item in items if item not in set(keep)])
        items[:] = keep
