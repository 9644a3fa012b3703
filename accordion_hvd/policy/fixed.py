"""One compressor for all, all the time."""

from __future__ import annotations

from collections.abc import Mapping

from accordion_hvd.base import Compressor
from accordion_hvd.policy.base import Policy, agree
from accordion_hvd.policy.gate import Gate, as_gate


class Fixed(Policy):
    """Always the same compressor; what `compression=TopK(0.01)` means.

    Args:
        compressor: serves every bucket.
        overrides: compressors for tensors whose names match a pattern, instead.
        gate: "auto": use them only where that saves time (see `Gate`).
    """

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
        self.gate = as_gate(self, gate)

    def levels(self, name: str) -> tuple[Compressor, ...]:
        """The one compressor."""
        return (override(self.overrides, name) or self.compressor,)

    def __repr__(self) -> str:
        """As it is written."""
        more = f", overrides={self.overrides!r}" if self.overrides else ""
        more += f", gate={self.gate!r}" if self.gate else ""
        return f"Fixed({self.compressor!r}{more})"


def override(overrides: Mapping[str, Compressor], name: str) -> Compressor | None:
    """The compressor of the first pattern that `name` matches."""
    from accordion_hvd.buckets import matches

    return next((c for pattern, c in overrides.items() if matches(name, [pattern])), None)
