"""Private votes on whatever one likes: what teachers want of an image, say."""

from __future__ import annotations

from collections.abc import Sequence

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
        return self.method.affords(count)

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
        self.method.spend(xp.shape(gradients)[1])
        link, accounts, step = self.communicator, self.exchange.accounts, self.exchange.steps
        info = Info(rank=link.rank, size=link.size, name=self.name, step=step)
        traffic, release = Traffic(), self.method.release(gradients, info)
        votes = link.run(self.name, release, traffic)
        accounts.traffic.add(traffic)
        accounts.dense_bytes += 4.0 * xp.shape(gradients)[1] * xp.shape(gradients)[2]
        self.exchange.steps += 1
        return votes
