"""Detection of replicas that differ between ranks, which would otherwise go unnoticed."""

from __future__ import annotations

import logging
import math
import os
import warnings
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from accordion_hvd import check
from accordion_hvd.comm.agreement import gather
from accordion_hvd.comm.communicator import Communicator
from accordion_hvd.core.base import Tensor

logger = logging.getLogger(__name__)

Mode: TypeAlias = Literal["error", "warn", "off"]
MODES = get_args(Mode)
EARLY = (1, 2, 10)
"""Steps to check besides every `every`-th one: most mistakes show in the first steps."""


class ReplicasDiffer(RuntimeError):
    """Ranks hold different weights or levels."""

    __init__ = Exception.__init__  # else AutoGraph raises another class in its place


class Guard:
    """Periodic comparison of checksums of the weights and levels between ranks.

    A checksum is the sum of a tensor's bits, read as integers. It takes one pass and no copy, and
    changes with any bit (unless several changes cancel out exactly).

    Args:
        mode: "error" to raise `ReplicasDiffer` on every rank, "warn" to warn once on rank 0, or
            "off". None: the environment variable ACCORDION_HVD_GUARD if it is set, else `default`.
        every: number of steps between checks; steps 1, 2 and 10 are checked, too. None: the
            environment variable ACCORDION_HVD_GUARD_EVERY if it is set, else 100.
        default: mode if neither `mode` nor the environment variable is set; see
            `resolve.Resolved`.

    Raises:
        ValueError: if an argument or an environment variable has an invalid value.
    """

    def __init__(
        self, mode: str | None = None, every: int | None = None, default: str = "error"
    ) -> None:
        if mode is None:
            mode = os.environ.get("ACCORDION_HVD_GUARD", default)
        text: Any = os.environ.get("ACCORDION_HVD_GUARD_EVERY", "100")
        steps = every if every is not None else int(text) if text.isdecimal() else text
        check.one_of("DistributedOptimizer", "guard", mode, MODES)
        check.integer("DistributedOptimizer", "guard_every", steps, least=1)
        self.mode, self.every, self.warned = mode, int(steps), False

    @property
    def compares(self) -> bool:
        return self.mode != "off"

    def next_after(self, step: int) -> float:
        """Return the number of exchanges (more than `step`) after which to compare replicas."""
        if not self.compares:
            return math.inf
        later = (step // self.every + 1) * self.every
        return min(number for number in (*EARLY, later) if number > step)

    def compare(
        self, communicator: Communicator, step: int, names: Sequence[str], sums: Tensor
    ) -> np.ndarray:
        """Compare checksums with those of the other ranks; collective.

        After a warning, ranks continue to compare without further warnings: a rank that joins
        later does not know of the warning and takes part in the comparisons.

        Args:
            sums: the checksums, and further numbers that may differ between ranks; int64.

        Returns:
            The further numbers of all ranks: int64, (ranks, numbers).

        Raises:
            ReplicasDiffer: if checksums differ and the mode is "error".
        """
        name = "accordion.guard"
        table = np.stack(communicator.run(name, gather(communicator, sums)))
        table, more = np.split(table, [len(names)], axis=1)
        message = describe(step, names, table)
        if message is None:
            return more
        if self.mode == "error":
            message += " (To continue anyway, pass guard='warn' or guard='off'.)"
            if communicator.rank == 0:
                logger.error("accordion_hvd: %s", message)
            raise ReplicasDiffer(message)  # on every rank, because all have the same table
        if communicator.rank == 0 and not self.warned:
            message += (
                " (Training continues without further warnings; guard='error' would stop it.)"
            )
            warnings.warn(message, RuntimeWarning, stacklevel=2)
        self.warned = True
        return more


def describe(step: int, names: Sequence[str], table: np.ndarray) -> str | None:
    """Describe the first difference in a table of checksums (ranks, names), or return None."""
    different = np.flatnonzero((table != table[0]).any(0))
    if not different.size:
        return None
    first = int(different[0])
    values, counts = np.unique(table[:, first], return_counts=True)
    majority = values[counts.argmax()]
    odd = np.flatnonzero(table[:, first] != majority).tolist()
    ranks = f"rank(s) {odd} hold other values than the other ranks"
    if counts.max() == 1:
        ranks = "each rank holds different values"
    others = f" and {different.size - 1} more" if different.size > 1 else ""
    cause = (
        "Were the initial weights broadcast to every rank before the first step?"
        if step == min(EARLY)
        else "Does every rank take every step, at one rate? Does any other code change the weights?"
    )
    return (
        f"after step {step} replicas differ between ranks, first in {names[first]!r}{others}: "
        f"{ranks}. {cause}"
    )
