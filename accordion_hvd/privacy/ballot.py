"""Private votes on whatever one likes: what teachers want of an image, say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from accordion_hvd import check
from accordion_hvd.comm.communicator import Communicator
from accordion_hvd.comm.traffic import Traffic
from accordion_hvd.core.base import Info, Tensor
from accordion_hvd.engine import checkpoint
from accordion_hvd.engine.exchange import Exchange
from accordion_hvd.ops import namespace
from accordion_hvd.policies import Fixed
from accordion_hvd.privacy.topagg import TopAgg


class Ballot:
    """Has the contributors of all ranks vote on vectors; every rank gets what has won.

    It is among what `save_state` saves, so that a budget goes on where it was.

    Args:
        method: with its budget.
        communicator: of the ranks that vote (`accordion_hvd.comm.horovod.torch` has one).
        name: the same on all ranks, unique in a process.

    Attributes:
        exchange: counts bytes and what has been spent: `exchange.stats()`.
    """

    def __init__(self, method: TopAgg, communicator: Communicator, name: str = "ballot") -> None:
        if not isinstance(method, TopAgg):
            check.refuse(self, "method", method, "a TopAgg")
        self.method, self.communicator, self.name = method, communicator, name
        self.exchange = Exchange(communicator, Fixed(method), [], name=name)
        checkpoint.register(self)

    def expect(self, names: Sequence[str]) -> None:
        """Nothing to expect: called before a restore."""

    def affords(self, count: int = 1) -> bool:
        """Return whether the budget has room for this number of releases."""
        budget = self.method.budget
        return budget is None or budget.left(self.method.mechanism) >= count

    def vote(self, gradients: Tensor) -> Tensor:
        """Release the votes on several vectors; collective.

        Each is a release of its own: a record has a say in all of them.

        Args:
            gradients: (contributors of this rank, releases, elements): in which direction each of
                them wants each vector to go.

        Returns:
            (releases, elements) fp32, the same on all ranks.

        Raises:
            BudgetSpent: on every rank, before anything is sent.
            ValueError: the shape is another.
        """
        xp = namespace(gradients)
        if len(xp.shape(gradients)) != 3 or not xp.shape(gradients)[1]:
            wanted = "(contributors, releases, elements), with at least one release"
            check.refuse(self, "the gradients' shape", xp.shape(gradients), wanted)
        if self.method.budget is not None:
            self.method.budget.spend(self.method.mechanism, xp.shape(gradients)[1])
        traffic, release = Traffic(), self.method.release(gradients, self._info())
        votes = self.communicator.run(self.name, release, traffic)
        self._count(traffic, 4.0 * xp.shape(gradients)[1] * xp.shape(gradients)[2])
        return votes

    def _info(self) -> Info:
        whole = Info(rank=self.communicator.rank, size=self.communicator.size, name=self.name)
        return replace(whole, step=self.exchange.steps)

    def _count(self, traffic: Traffic, dense: float) -> None:
        self.exchange.accounts.traffic.add(traffic)
        self.exchange.accounts.dense_bytes += dense
        self.exchange.steps += 1
