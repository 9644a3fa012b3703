"""One compressor for all, all the time."""

from __future__ import annotations

from collections.abc import Mapping

from accordion_hvd.base import Compressor
from accordion_hvd.policy.base import Policy, agree


class Fixed(Policy):
    """Always the same compressor; what `compression=TopK(0.01)` means.

    Args:
        compressor: serves every bucket.
        overrides: compressors for tensors whose names match a pattern, instead.
    """

    def __init__(
        self, compressor: Compressor, *, overrides: Mapping[str, Compressor] | None = None
    ) -> None:
        super().__init__()
        self.compressor = compressor
        self.overrides = dict(overrides or {})
        agree(self, [compressor, *self.overrides.values()])

    def levels(self, name: str) -> tuple[Compressor, ...]:
        """The one compressor."""
        return (override(self.overrides, name) or self.compressor,)

    def __repr__(self) -> str:
        """As it is written."""
        more = f", overrides={self.overrides!r}" if self.overrides else ""
        return f"Fixed({self.compressor!r}{more})"


def override(overrides: Mapping[str, Compressor], name: str) -> Compressor | None:
    """The compressor of the first pattern that `name` matches."""
    from accordion_hvd.buckets import matches

    return next((c for pattern, c in overrides.items() if matches(name, [pattern])), None)
