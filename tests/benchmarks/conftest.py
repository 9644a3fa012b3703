"""What the tests of benchmarks share."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest
from rigs import marked, outside

from benchmarks.netbench import sandbox


@pytest.fixture
def token() -> Iterator[str]:
    """Marks all processes of a rig; afterwards there must be none, and no link, name or folder."""
    if (why := sandbox.obstacle()) is not None:
        pytest.skip(why)
    before, mark = outside(), uuid.uuid4().hex
    yield mark
    assert not marked(mark)
    assert outside() == before
