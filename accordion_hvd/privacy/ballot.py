"""Private votes on any vectors, such as changes that teachers want in an image."""

from __future__ import annotations

from collections.abc import Sequence

from accordion_hvd import check
from accordion_hvd.comm.agreement import require_agreement
from accordion_hvd.comm.collectives import Traffic
from accordion_hvd.comm.communicator import Communicator
from accordion_hvd.core.base import Info, Tensor
from accordion_hvd.engine import checkpoint
from accordion_hvd.engine.exchange import Exchange
from accordion_hvd.ops import namespace
from accordion_hvd.policies import Fixed
from accordion_hvd.privacy.topagg import TopAgg


class Ballot:
    """A private vote of all ranks' contributors on vectors; every rank receives the result.

    `save_state` saves the ballot, so that its budget continues after a restart.

    Args:
        method: the `TopAgg`, with its budget.
        communicator: communicator of the voting ranks, such as that in
            `accordion_hvd.comm.horovod.torch`.
        name: name of the ballot, equal on all ranks and unique in a process.

    Attributes:
        exchange: counts bytes and the spent privacy: `exchange.stats()`.
    """

    def __init__(self, method: TopAgg, communicator: Communicator, name: str = "ballot") -> None:
        if not isinstance(method, TopAgg):
            check.refuse(self, "method", method, "a TopAgg")
        self.method, self.communicator, self.name = method, communicator, name
        self.exchange = Exchange(communicator, Fixed(method), [], name=name)
        self._agreed = False
        checkpoint.register(self)

    def expect(self, names: Sequence[str]) -> None:
        """Do nothing: a ballot has no tensors to prepare before a restore."""

    def affords(self, count: int = 1) -> bool:
        """Return whether the budget has room for this number of releases."""
        return self.method.affords(count)

    def vote(self, gradients: Tensor) -> Tensor:
        """Release the votes on several vectors; collective.

        Each vector is a separate release, because a record influences the votes on all of them.

        Args:
            gradients: (contributors of this rank, releases, elements): the direction in which each
                contributor wants each vector to move.

        Returns:
            The result, (releases, elements) fp32, equal on all ranks.

        Raises:
            BudgetSpent: if the budget does not allow these releases; on every rank, before any vote
                is sent.
            RanksDisagree: on every rank, at the first vote, if the ranks' methods differ.
            ValueError: if the gradients have another shape.
        """
        xp = namespace(gradients)
        if len(xp.shape(gradients)) != 3 or not xp.shape(gradients)[1]:
            wanted = "(contributors, releases, elements), with at least one release"
            check.refuse(self, "the gradients' shape", xp.shape(gradients), wanted)
        if not self._agreed:
            require_agreement(self.communicator, f"{self.name}\n{self.method!r}")
            self._agreed = True
        self.method.spend(xp.shape(gradients)[1])
        link, accounts, step = self.communicator, self.exchange.accounts, self.exchange.steps
        info = Info(rank=link.rank, size=link.size, name=self.name, step=step)
        traffic, release = Traffic(), self.method.release(gradients, info)
        votes = link.run(self.name, release, traffic)
        accounts.traffic.add(traffic)
        accounts.dense_bytes += 4.0 * xp.shape(gradients)[1] * xp.shape(gradients)[2]
        self.exchange.steps += 1
        return votes
