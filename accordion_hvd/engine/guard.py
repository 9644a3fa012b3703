"""Notices what otherwise goes wrong in silence: replicas that drift."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from accordion_hvd import check
from accordion_hvd.comm.agreement import gather
from accordion_hvd.comm.communicator import Communicator
from accordion_hvd.core.base import Tensor

MODES = ("error", "warn", "off")
EARLY = (1, 2, 10)
"""Steps that are checked besides every `every`-th: most mistakes show at once."""


class ReplicasDiffer(RuntimeError):
    """Ranks hold different weights or levels."""

    __init__ = Exception.__init__  # else AutoGraph raises another class in its place


class Guard:
    """Compares a cheap checksum of weights and levels between ranks now and then.

    A checksum is the sum of a tensor's bits as integers: one pass, no copy, and it differs as
    soon as one bit does (unless changes cancel out exactly).

    Args:
        mode: "error" raises `ReplicasDiffer` on every rank, "warn" warns once, on rank 0, "off".
            None means what the environment variable ACCORDION_HVD_GUARD says, else `default`.
        every: steps between checks; steps 1, 2 and 10 are checked too. None means
            ACCORDION_HVD_GUARD_EVERY, else 100.
        default: the mode where nobody has chosen one; see `resolve.default_guard`.

    Raises:
        ValueError: one is none of these.
    """

    def __init__(
        self, mode: str | None = None, every: int | None = None, default: str = "error"
    ) -> None:
        if mode is None:
            mode = os.environ.get("ACCORDION_HVD_GUARD", default)
        word: Any = os.environ.get("ACCORDION_HVD_GUARD_EVERY", "100")
        steps = every if every is not None else int(word) if word.isdecimal() else word
        check.one_of("DistributedOptimizer", "guard", mode, MODES)
        check.integer("DistributedOptimizer", "guard_every", steps, least=1)
        self.mode, self.every, self.warned = mode, int(steps), False

    def due(self, step: int, span: int = 1) -> bool:
        """Return whether to compare replicas after exchange number `step` (from 1).

        Args:
            step: the exchange.
            span: how many exchanges, this one the last, are to be checked now (`Exchange.span`):
                where weights differ between ranks for some steps, a check waits until they do not.
        """
        asked = (n in EARLY or n % self.every == 0 for n in range(step - span + 1, step + 1))
        return self.mode != "off" and any(asked)

    def compare(
        self, communicator: Communicator, step: int, names: Sequence[str], sums: Tensor
    ) -> None:
        """Compare checksums (int64, one for each name) with the other ranks'; collective.

        After a warning the ranks go on comparing, in silence: a rank that joins them later, which
        knows of no warning, would wait for them.

        Raises:
            ReplicasDiffer: they differ, and the mode is "error".
        """
        name = "accordion.guard"
        table = np.stack(communicator.run(name, gather(communicator, sums)))
        message = describe(step, names, table)
        if message is None:
            return
        if self.mode == "error":
            message += " (guard='warn' or guard='off' goes on regardless.)"
            if communicator.rank == 0:
                print(f"accordion_hvd: {message}", file=sys.stderr, flush=True)
            raise ReplicasDiffer(message)
        if communicator.rank == 0 and not self.warned:
            message += " (Training goes on without another warning; guard='error' stops it.)"
            warnings.warn(message, RuntimeWarning, stacklevel=2)
        self.warned = True


def describe(step: int, names: Sequence[str], table: np.ndarray) -> str | None:
    """Describe the first difference in a table of checksums (ranks, names), if there is one."""
    different = np.flatnonzero((table != table[0]).any(0))
    if not different.size:
        return None
    first = int(different[0])
    values, counts = np.unique(table[:, first], return_counts=True)
    most = values[counts.argmax()]
    odd = np.flatnonzero(table[:, first] != most).tolist()
    who = f"rank(s) {odd} hold other values than the rest"
    if counts.max() == 1:
        who = "no two ranks hold the same values"
    others = f" and {different.size - 1} more" if different.size > 1 else ""
    cause = (
        "Were the initial weights broadcast, before the first step, to every rank?"
        if step == min(EARLY)
        else "Does every rank take every step, and does nothing else change weights?"
    )
    return (
        f"after step {step} the ranks' replicas differ, first in {names[first]!r}{others}: "
        f"{who}. {cause}"
    )
