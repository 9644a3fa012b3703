"""The end of an optimizer's dense stage: after some steps, or when the variance is stable."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accordion_hvd import check
from accordion_hvd.core.base import Compressor
from accordion_hvd.policies.base import Policy, Seen, agree
from accordion_hvd.policies.decision import Decision
from accordion_hvd.policies.evidence import StateNorms

STABLE = 0.96
LOOKS = 10
"""Number of checks of the variance's norm per time constant of the variance."""


class WarmUp(Policy):
    """Switches all tensors from an optimizer's first stage to its second, once.

    With "auto", the first stage ends when the variance is stable (after 1-bit Adam). Let
    D = 1 / (1 - b2) steps be the time constant of the variance v, and a and b the sums |v|_1 now
    and D steps ago. The first stage ends if min(a, b) / max(a, b) >= 0.96, if at least 2 D steps
    have been taken, and if no learning rate has risen in the last D steps. (The paper tests b / a
    alone, which is true too early while v falls.) Rank 0 decides for all ranks; it checks every D /
    10 steps (ours).

    A tensor that is added later has a first stage of its own, of as many steps; with "auto", of 2 D
    steps (ours).

    Args:
        first: the first, dense stage.
        then: the second stage.
        steps: number of steps of the first stage, skipped ones included; or "auto".
    """

    evidence = (StateNorms("v"),)
    KEPT = ("_step", "_done", "_sums", "_lr", "_late")

    def __init__(self, first: Any, then: Any, steps: int | str = "auto") -> None:
        super().__init__()
        if steps != "auto":
            check.integer(self, "steps", steps, least=0)
        self.first, self.then, self.steps = first, then, steps
        agree(self, [first, then])
        if not hasattr(then, "betas"):
            check.refuse(self, "then", then, "an update rule with betas, such as OnebitAdam()")
        self._span = max(LOOKS, round(1 / (1 - then.betas[1])))
        self._step = 0  # exchanges so far
        self._done = steps == 0
        self._sums: list[float] = []  # |v|_1 at the last checks
        self._lr: list[dict[str, float]] = []  # learning rates at the last checks
        self._late: dict[str, int] = {}  # tensors in first stages of their own -> the last step

    def levels(self, name: str) -> tuple[Compressor, ...]:
        return self.first, self.then

    def start(self, name: str) -> int:
        """Return 0, the first stage; 1 if it has no steps."""
        if self._step > 0 and self.steps != 0:
            own = 2 * self._span if self.steps == "auto" else int(self.steps)
            self._late[name] = self._step + own
        return int(self.steps == 0)

    def due(self, lr: Mapping[str, float]) -> bool:
        """Return whether the first stage is over, or with "auto" whether a check is due."""
        if self._done or self._step in self._late.values():
            return self._step in self._late.values()
        if self.steps == "auto":
            return self._step > 0 and self._step % (self._span // LOOKS) == 0
        return self._step == self.steps

    def tick(self, lr: Mapping[str, float]) -> None:
        self._step += 1

    def decide(self, seen: Seen, lr: Mapping[str, float]) -> list[Decision]:
        """Return a row per tensor; `norm` is the tensor's |v|_1."""
        norms, reason = seen.get(StateNorms.key, {}), ""
        late = [name for name, last in self._late.items() if last == self._step]
        names = late or [name for name in self.current if name not in self._late]
        if late:
            reason = "late"
        elif self.steps != "auto":
            reason = f"{self.steps} steps"
        elif len(self._sums) >= LOOKS and self._step >= 2 * self._span:
            total, before = sum(norms.get(name, 0.0) for name in names), self._sums[-LOOKS]
            largest = max(total, before)
            steady = largest > 0 and min(total, before) / largest >= STABLE
            if steady and not self._rising(lr):
                reason = "variance stable"
        level = int(bool(reason))
        common = level, self._step, 0, repr(self.levels("")[level]), reason
        return [Decision(name, *common, norms.get(name, 0.0), lr=lr[name]) for name in names]

    def apply(self, decisions: Any) -> None:
        """Switch to the second stage if that was decided; else store the sums of this check."""
        late = any(self._late.pop(row.name, None) for row in decisions)
        self._done |= not late and any(row.level for row in decisions)
        if late or self._done or not decisions:
            super().apply(decisions)
            return
        self._sums = [*self._sums[1 - LOOKS :], sum(row.norm for row in decisions)]
        self._lr = [*self._lr[1 - LOOKS :], {row.name: row.lr for row in decisions}]

    def __repr__(self) -> str:
        return f"WarmUp({self.first!r}, {self.then!r}, steps={self.steps!r})"

    def _rising(self, lr: Mapping[str, float]) -> bool:
        return any(lr[name] > rates.get(name, lr[name]) for rates in self._lr for name in lr)
