"""One compressor for all, all the time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accordion_hvd import check
from accordion_hvd.core.base import Compressor
from accordion_hvd.core.patterns import matches
from accordion_hvd.policies.base import Policy, agree
from accordion_hvd.policies.gate import Gate, as_gate


class Fixed(Policy):
    """Always the same compressor; what `compression=TopK(0.01)` means.

    Args:
        compressor: serves every bucket.
        overrides: compressors for tensors whose names match a pattern, instead.
        gate: "auto": use them only where that saves time (see `Gate`).
    """

    fixed = True

    def __init__(
        self,
        compressor: Compressor,
        *,
        overrides: Mapping[str, Compressor] | None = None,
        gate: str | Gate | None = None,
    ) -> None:
        super().__init__()
        self.compressor = compressor
        self.overrides = dict(overrides or {})
        agree(self, [compressor, *self.overrides.values()])
        self.budget = compressor.budget
        self.gate = as_gate(self, gate)
        if self.private and self.gate is not None:
            check.refuse(self, "gate", gate, f"None: {compressor!r} is private")

    def levels(self, name: str) -> tuple[Compressor, ...]:
        """The one compressor."""
        return (override(self.overrides, name) or self.compressor,)

    def tick(self, lr: Mapping[str, float]) -> None:
        """An exchange is about to begin: it is paid for first."""
        self.compressor.spend()

    def affords(self) -> bool:
        """Whether privacy leaves room for another exchange."""
        return self.compressor.affords()

    def state_dict(self) -> dict[str, Any]:
        """With what exchanges have cost in privacy."""
        entries = self.budget.state_dict() if self.budget is not None else {}
        return super().state_dict() | entries

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`; what has been spent since is not forgotten."""
        super().load_state_dict(state)
        if self.budget is not None:
            self.budget.load_state_dict(state)

    def __repr__(self) -> str:
        """As it is written."""
        more = f", overrides={self.overrides!r}" if self.overrides else ""
        more += f", gate={self.gate!r}" if self.gate else ""
        return f"Fixed({self.compressor!r}{more})"


def override(overrides: Mapping[str, Compressor], name: str) -> Compressor | None:
    """The compressor of the first pattern that `name` matches."""
    return next((c for pattern, c in overrides.items() if matches(name, [pattern])), None)
