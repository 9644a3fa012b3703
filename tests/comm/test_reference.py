"""Tests of the reference of the collectives, against NumPy and ranks that pack their requests."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from frameworks import Framework, parameters

from accordion_hvd.comm.local import LocalCommunicator, results
from accordion_hvd.core.base import Allgather, Allreduce, Alltoall, Broadcast, Neighbours, Request
from accordion_hvd.simulation.one_process import Hub, SimulatedCommunicator, lockstep

RANKS = 3
ROWS = np.arange(RANKS * RANKS * 2, dtype=np.float32).reshape(RANKS, RANKS, 2)
"""One matrix a rank."""

ring = {rank: {"to": ((rank + 1) % RANKS,), "of": ((rank - 1) % RANKS,)} for rank in range(RANKS)}

REQUESTS = {
    "mean": (lambda x, rank: Allreduce(x), lambda rank: ROWS.mean(0)),
    "sum": (lambda x, rank: Allreduce(x, op="sum"), lambda rank: ROWS.sum(0)),
    "max": (lambda x, rank: Allreduce(x, op="max"), lambda rank: ROWS.max(0)),
    "gather": (lambda x, rank: Allgather(x), lambda rank: ROWS),
    "broadcast": (lambda x, rank: Broadcast(x, root=1), lambda rank: ROWS[1]),
    "alltoall": (lambda x, rank: Alltoall(x), lambda rank: ROWS[:, rank]),
}


@pytest.mark.parametrize("framework", parameters())
@pytest.mark.parametrize("kind", REQUESTS)
def test_results_are_numpys(kind: str, framework: Framework) -> None:
    """The reference gives NumPy's results, and so do simulated ranks, which pack their requests."""
    make, wanted = REQUESTS[kind]

    def request(rank: int) -> Request:
        return make(framework.tensor(ROWS[rank]), rank)

    def ask(rank: int) -> Any:
        return (yield request(rank))

    direct = results({rank: request(rank) for rank in range(RANKS)})
    hub = Hub(RANKS)
    links = [SimulatedCommunicator(hub, rank, framework.xp) for rank in range(RANKS)]
    packed = lockstep(links, [ask(rank) for rank in range(RANKS)])
    for rank in range(RANKS):
        for result in (direct[rank], packed[rank]):
            parts = result if isinstance(result, tuple) else [result]
            found = np.stack([framework.array(x) for x in parts])
            np.testing.assert_array_equal(found.reshape(wanted(rank).shape), wanted(rank))


def test_neighbours_get_what_was_sent_to_them() -> None:
    requests: dict[int, Request] = {
        rank: Neighbours(ROWS[rank], **ring[rank]) for rank in range(RANKS)
    }
    for rank, (came,) in results(requests).items():
        np.testing.assert_array_equal(came, ROWS[rank - 1])


def test_members_are_addressed_by_their_rank() -> None:
    requests: dict[int, Request] = {
        rank: Broadcast(ROWS[rank], root=2, group=(0, 2)) for rank in (0, 2)
    }
    for came in results(requests).values():
        np.testing.assert_array_equal(came, ROWS[2])


@pytest.mark.parametrize("framework", parameters())
@pytest.mark.parametrize("ranks", [1, RANKS])
@pytest.mark.parametrize("kind", REQUESTS)
def test_a_local_communicator_takes_all_ranks_to_be_alike(
    kind: str, ranks: int, framework: Framework
) -> None:
    x = np.array([1.0, 2.0, 3.0], np.float32)[:ranks] if kind == "alltoall" else ROWS[0]
    local = LocalCommunicator(framework.xp, ranks)
    make = REQUESTS[kind][0] if kind != "broadcast" else lambda x, rank: Broadcast(x)

    def ask() -> Any:
        return (yield make(framework.tensor(x), 0))

    found = local.run("alike", ask())
    alike: dict[int, Request] = {rank: make(x, rank) for rank in range(ranks)}
    wanted = results(alike)[0] if kind != "alltoall" else x
    for mine, theirs in zip(
        found if isinstance(found, tuple) else [found],
        wanted if isinstance(wanted, tuple) else [wanted],
        strict=True,
    ):
        np.testing.assert_array_equal(framework.array(mine), theirs)
