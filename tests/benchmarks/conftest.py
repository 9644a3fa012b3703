"""Fixtures that the tests of benchmarks share."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest
from rigs import marked, outside

from benchmarks.netbench import sandbox


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave rigs to `make test-all`, which runs nothing beside them: they measure rates."""
    for item in items:
        if "token" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.nightly)
            item.add_marker(pytest.mark.quiet)


@pytest.fixture
def token() -> Iterator[str]:
    """Yield a mark for a rig's processes; check that no process, link or namespace is left."""
    if (why := sandbox.obstacle()) is not None:
        pytest.skip(why)
    before, mark = outside(), uuid.uuid4().hex
    yield mark
    assert not marked(mark)
    assert outside() == before
