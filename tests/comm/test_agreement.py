"""Tests of JSON values that rank 0 sends to every rank: one round is enough for short values."""

from __future__ import annotations

from typing import Any

import pytest
from frameworks import Framework, parameters

from accordion_hvd.comm import agreement
from accordion_hvd.simulation.one_process import Hub, SimulatedCommunicator, lockstep

SHORT = agreement._HEAD - agreement._LENGTH - 2  # characters, without the quotes of JSON


@pytest.mark.parametrize("framework", parameters())
@pytest.mark.parametrize(
    ("value", "rounds"),
    [
        (None, 1),
        ([{"name": "w", "lr": 0.1}, "ä"], 1),
        ("x" * SHORT, 1),
        ("x" * (SHORT + 1), 2),
        (list(range(20_000)), 2),
    ],
    ids=["nothing", "rows", "longest", "too long", "long"],
)
def test_short_values_are_shared_in_one_round(
    framework: Framework, value: Any, rounds: int
) -> None:
    hub = Hub(3, [range(3)])
    links = [SimulatedCommunicator(hub, rank, framework.xp) for rank in range(3)]
    counted = [0] * 3

    def counting(rank: int) -> Any:
        exchange = agreement.share(links[rank], value if rank == 0 else None)
        answer = None
        while True:
            try:
                request = exchange.send(answer)
            except StopIteration as end:
                return end.value
            counted[rank] += 1
            answer = yield request

    with framework.running():
        assert lockstep(links, [counting(rank) for rank in range(3)]) == [value] * 3
    assert counted == [rounds] * 3
