"""Averages within groups by alltoalls among all ranks, for engines that do not know the groups.

An engine such as Horovod must register a group before it runs collectives in it. If groups can be
added after its start, all its small operations are slower. An alltoall among all ranks needs no
group: the members send parts of their vectors to each other, and nothing to other ranks.
"""

from __future__ import annotations

from typing import Any

from accordion_hvd.core.base import Allreduce, Alltoall, Tensor
from accordion_hvd.core.running import RequestGenerator, intercept
from accordion_hvd.ops import namespace


def by_shares(exchange: RequestGenerator, rank: int, size: int) -> RequestGenerator:
    """Run an exchange generator, computing means over groups by two alltoalls among all ranks.

    The alltoalls send as many bytes as a ring allreduce. All ranks must request means over groups
    at the same points, even a rank that is a group of one.

    Args:
        exchange: the generator; its requests for groups must be means.
    """

    def serve(asked: Any) -> RequestGenerator:
        if isinstance(asked, Allreduce) and asked.group is not None:
            return (yield from _mean(asked, rank, size))
        return (yield asked)

    return intercept(exchange, serve)


def _mean(asked: Allreduce, rank: int, size: int) -> RequestGenerator:
    group, tensor = asked.group or (), asked.tensor
    assert asked.op == "mean" and rank in group
    xp, shape = namespace(tensor), namespace(tensor).shape(tensor)
    flat = xp.reshape(tensor, (-1,))
    count = xp.shape(flat)[0]
    part = -(-count // len(group))
    # Each member averages one part of the vectors. Others get nothing, and take part.
    splits = [part if other in group else 0 for other in range(size)]
    received = yield Alltoall(xp.pad_last(flat, part * len(group)), splits=tuple(splits))
    parts = [received[member] for member in group]
    mean: Tensor = sum(parts[1:], parts[0]) / len(group)
    received = yield Alltoall(xp.concat([mean] * len(group)), splits=tuple(splits))
    means = xp.concat([received[member] for member in group])
    return xp.reshape(means[:count], shape)
