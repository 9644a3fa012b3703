"""One compressor throughout the training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accordion_hvd import check
from accordion_hvd.core.base import Compressor
from accordion_hvd.core.observer import Observers
from accordion_hvd.policies.base import Policy, agree
from accordion_hvd.policies.gate import Gate, as_gate
from accordion_hvd.policies.privacy_accountant import PrivacyAccountant


class Fixed(Policy):
    """Uses one compressor throughout; `compression=TopK(0.01)` means `Fixed(TopK(0.01))`.

    Args:
        compressor: the compressor of every bucket.
        overrides: name pattern -> compressor that serves the matching tensors instead, in messages
            of their own. `Fixed(LGC(), overrides={"fc*": TopK(0.001)})` sends layer `fc` by top-k.
        gate: "auto" or a `Gate`: compress only where compression saves time.
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
        check.mapping(self, "overrides", overrides)
        self.overrides = dict(overrides or {})
        agree(self, [compressor], self.overrides)
        self.gate = as_gate(self, gate)
        if compressor.private:
            if gate is not None:
                check.refuse(self, "gate", gate, f"None: {compressor!r} is private")
            self.observers = Observers([PrivacyAccountant(self, compressor)])

    def levels(self, name: str) -> tuple[Compressor, ...]:
        return (override(self.overrides, name) or self.compressor,)

    def state_dict(self) -> dict[str, Any]:
        budget = self.compressor.budget
        return super().state_dict() | (budget.state_dict() if budget is not None else {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore from `state_dict`; privacy that was spent later stays spent."""
        super().load_state_dict(state)
        if self.compressor.budget is not None:
            self.compressor.budget.load_state_dict(state)

    def __repr__(self) -> str:
        more = f", overrides={self.overrides!r}" if self.overrides else ""
        more += f", gate={self.gate!r}" if self.gate else ""
        return f"Fixed({self.compressor!r}{more})"


def override(overrides: Mapping[str, Compressor], name: str) -> Compressor | None:
    """Return the compressor of the first pattern that a bucket's first tensor matches.

    The bucket's name is such as "fc.weight", or "fc.weight+2" for three tensors.
    """
    tensor, plus, others = name.rpartition("+")
    pattern = check.first_match(tensor if plus and others.isdigit() else name, overrides)
    return None if pattern is None else overrides[pattern]
