"""Averages within groups over an engine that knows none: by shares that all ranks deal out.

An engine such as Horovod needs to be told of a group before it carries anything for it, and can
add groups later only at a price for all its small operations. An alltoall among all ranks does as
well: a group's members deal the parts of their vectors to each other and nothing to anybody else.
"""

from __future__ import annotations

from typing import Any

from accordion_hvd.core.base import Allreduce, Alltoall, Tensor
from accordion_hvd.core.composition import RequestGenerator, intercept
from accordion_hvd.ops import namespace


def by_shares(conversation: RequestGenerator, rank: int, size: int) -> RequestGenerator:
    """Wrap an exchange: compute means over groups by two alltoalls among all ranks.

    As many bytes as a ring allreduce. All ranks must ask for means of groups at the same points,
    those that are a group on their own, too.

    Args:
        conversation: what it asks of groups are means.
        rank: this one.
        size: how many ranks there are.
    """

    def serve(asked: Any) -> RequestGenerator:
        if isinstance(asked, Allreduce) and asked.group is not None:
            return (yield from _mean(asked, rank, size))
        return (yield asked)

    return intercept(conversation, serve)


def _mean(asked: Allreduce, rank: int, size: int) -> RequestGenerator:
    """Each member adds up one part of all members' vectors, and deals the mean out."""
    group, tensor = asked.group or (), asked.tensor
    assert asked.op == "mean" and rank in group
    xp, shape = namespace(tensor), namespace(tensor).shape(tensor)
    flat = xp.reshape(tensor, (-1,))
    count = xp.shape(flat)[0]
    part = -(-count // len(group))
    splits = [part if other in group else 0 for other in range(size)]
    theirs = yield Alltoall(xp.pad_last(flat, part * len(group)), splits=tuple(splits))
    mine = [theirs[other] for other in group]
    mean: Tensor = sum(mine[1:], mine[0]) / len(group)
    theirs = yield Alltoall(xp.concat([mean] * len(group)), splits=tuple(splits))
    whole = xp.concat([theirs[other] for other in group])
    return xp.reshape(whole[:count], shape)
