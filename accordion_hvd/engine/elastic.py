"""Elastic jobs: the state of compression follows the ranks that come and go."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

from accordion_hvd.engine import checkpoint
from accordion_hvd.engine.rank_changes import Group

logger = logging.getLogger(__name__)


class FollowsRanks:
    """Mixin for the states of `horovod.elastic`, placed before Horovod's class.

    Commits contain residuals, levels, policies and the state of model averaging. Before ranks
    leave in order, they hand their residuals over to the others. After a change of the ranks, all
    ranks share the residuals equally. If a rank died, the leader reports the loss, which is the
    residual that the rank's last commit held.

    All ranks take over the state of the leader, which is the first rank that was in the job before.
    That is rank 0, except after a discovery that found no host: Horovod then forgets which hosts
    were first, and rank 0 may be new.

    Attributes:
        interrupt: Horovod's exception for changed hosts.
        leading_rank: number of the rank whose state the others take over.
    """

    interrupt: ClassVar[type[Exception]]
    leading_rank = 0
    _bcast_object: Callable[..., Any]
    _norms: tuple[list[float], ...] = ()  # norms of the committed residuals, by rank and member
    _in_job = False  # whether this rank has the state of the job

    def _gather(self, value: Any) -> list[Any]:
        """Return the objects of all ranks, in rank order; collective."""
        raise NotImplementedError

    def _optimizers(self) -> Iterable[Any]:
        """Return the optimizers of this state, in an order that is equal on all ranks."""
        raise NotImplementedError

    def save(self) -> None:
        for member in self._members():
            member.commit()
        super().save()  # type: ignore[misc]

    def restore(self) -> None:
        for member in self._members():
            member.roll_back()
        super().restore()  # type: ignore[misc]

    def check_host_updates(self) -> None:
        """Raise Horovod's interrupt if hosts have changed; collective.

        Before the interrupt, ranks hand over their residuals.
        """
        members = self._members()
        if members:
            self._norms = tuple(self._gather([member.committed_norm() for member in members]))
        try:
            super().check_host_updates()  # type: ignore[misc]
        except self.interrupt as change:
            for member in members:
                member.hand_over(self._gather)
            # Horovod omits `sync` if hosts were only removed. But another host may be added before
            # the ranks connect, and its ranks would wait for the others in `sync` for ever.
            change.skip_sync = False  # type: ignore[attr-defined]
            raise

    def reset(self) -> None:
        """Connect all optimizers of this process to the present ranks."""
        for owner in checkpoint.owners():
            if hasattr(owner, "ranks_changed"):
                owner.ranks_changed()
        super().reset()  # type: ignore[misc]

    def sync(self) -> None:
        """Broadcast the leader's state to all ranks, and share the residuals; collective."""
        in_job = self._gather(self._in_job)
        self.leading_rank = in_job.index(True) if True in in_job else 0
        for member in self._members():
            member.prepare_regroup(self._gather, self.leading_rank)
        with replaced(self, _bcast_object=self.from_leader(self._bcast_object)):
            super().sync()  # type: ignore[misc]
        self._regroup()
        self._in_job = True

    def from_leader(self, broadcast: Callable[..., Any]) -> Callable[..., Any]:
        """Return Horovod's function `broadcast` with the leader as its root."""

        def broadcast_from_leader(value: Any, root_rank: int = 0) -> Any:
            del root_rank  # Horovod's states take rank 0 for the leader
            return broadcast(value, root_rank=self.leading_rank)

        return broadcast_from_leader

    def _regroup(self) -> None:
        norms, self._norms = self._norms, ()
        leads = self._rank() == self.leading_rank  # type: ignore[attr-defined]
        for number, member in enumerate(self._members()):
            group = member.regroup(self._gather, self.leading_rank)
            if group is not None and group.lost and leads:
                _report(group, [row[number] for row in norms])
        self.save()  # a failure must not lead back to a commit of other ranks

    def _members(self) -> list[Any]:
        values = [getattr(item, "exchange_owner", None) for item in self._optimizers()]
        owners = [owner for x in values for owner in (x if isinstance(x, tuple) else (x,))]
        return [owner for owner in owners if hasattr(owner, "regroup")]


@contextlib.contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Replace attributes of an object or a module within a `with` block."""
    before = {name: getattr(owner, name) for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


def _report(group: Group, norms: list[float]) -> None:
    """Log which ranks died and the norm of the residuals that are lost with them."""
    if len(norms) != group.lead.ranks:  # they died before the first commit
        return
    lost = math.hypot(*(norms[rank] for rank in group.lost))
    if lost:
        logger.warning(
            "accordion_hvd: ranks %s of %d ended without a handover. Their residuals at the last "
            "commit (norm %.3g of %.3g) are lost.",
            group.lost, group.lead.ranks, lost, math.hypot(*norms),
        )  # fmt: skip
