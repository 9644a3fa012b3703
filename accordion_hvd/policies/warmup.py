"""The end of an optimizer's dense stage, by the clock or when its variance is stable."""

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
"""How often in a time constant of the variance its norm is looked at."""


class WarmUp(Policy):
    """One stage until the variance is stable, another from then on, for all tensors at once.

    With "auto", after 1-bit Adam: let D = 1 / (1 - b2) steps, the time constant of the variance v,
    and a, b the sums |v|_1 now and D steps ago. The first stage ends when
    min(a, b) / max(a, b) >= 0.96, at least 2 D steps have been taken, and no learning rate has
    risen in the last D steps (the paper's condition is on b / a alone, which is true too early
    while v falls). Rank 0 decides for all; it looks every D / 10 steps (ours).

    Args:
        first: the dense stage.
        then: the other.
        steps: of the first stage, skipped ones included, or "auto".
    """

    evidence = (StateNorms("v"),)
    KEPT = ("_step", "_done", "_sums", "_lr")

    def __init__(self, first: Any, then: Any, steps: int | str = "auto") -> None:
        super().__init__()
        if steps != "auto":
            check.integer(self, "steps", steps, least=0)
        self.first, self.then, self.steps = first, then, steps
        agree(self, [first, then])
        self._span = max(LOOKS, round(1 / (1 - then.betas[1])))
        self._step = 0  # exchanges so far
        self._done = steps == 0
        self._sums: list[float] = []  # of v, at the last looks
        self._lr: list[dict[str, float]] = []  # learning rates then

    def levels(self, name: str) -> tuple[Compressor, ...]:
        """Return both stages."""
        return self.first, self.then

    def start(self, name: str) -> int:
        """Return the first stage, if that has any steps."""
        return int(self._done)

    def due(self, lr: Mapping[str, float]) -> bool:
        """At the end of the first stage, or at each look."""
        if self._done:
            return False
        if self.steps == "auto":
            return self._step > 0 and self._step % (self._span // LOOKS) == 0
        return self._step == self.steps

    def tick(self, lr: Mapping[str, float]) -> None:
        """Count an exchange."""
        self._step += 1

    def decide(self, seen: Seen, lr: Mapping[str, float]) -> list[Decision]:
        """Return a row per tensor; norms are sums of v."""
        norms, reason = seen.get(StateNorms.key, {}), ""
        if self.steps != "auto":
            reason = f"{self.steps} steps"
        elif len(self._sums) >= LOOKS and self._step >= 2 * self._span:
            total, before = sum(norms.values()), self._sums[-LOOKS]
            largest = max(total, before)
            steady = largest > 0 and min(total, before) / largest >= STABLE
            if steady and not self._rising(lr):
                reason = "variance stable"
        level = int(bool(reason))
        known = level, self._step, 0, repr(self.levels("")[level]), reason
        return [Decision(name, *known, norms.get(name, 0.0), lr=lr[name]) for name in self.current]

    def apply(self, decisions: Any) -> None:
        """Change stages if it is time; remember what was seen."""
        self._done = any(row.level for row in decisions)
        if self._done or not decisions:
            super().apply(decisions)
            return
        self._sums = [*self._sums[1 - LOOKS :], sum(row.norm for row in decisions)]
        self._lr = [*self._lr[1 - LOOKS :], {row.name: row.lr for row in decisions}]

    def __repr__(self) -> str:
        """Return the constructor call."""
        return f"WarmUp({self.first!r}, {self.then!r}, steps={self.steps!r})"

    def _rising(self, lr: Mapping[str, float]) -> bool:
        return any(lr[name] > rates.get(name, lr[name]) for rates in self._lr for name in lr)
