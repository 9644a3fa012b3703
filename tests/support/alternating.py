"""A policy for tests of changes of level."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from accordion_hvd import Compressor
from accordion_hvd.policies import Policy


class Alternating(Policy):
    """A policy that moves all tensors to the other of two levels at given steps."""

    def __init__(self, low: Compressor, high: Compressor, steps: Sequence[int]) -> None:
        super().__init__()
        self.pair, self.steps, self.count = (low, high), set(steps), 0

    def levels(self, name: str) -> tuple[Compressor, ...]:
        return self.pair

    def due(self, lr: Mapping[str, float]) -> bool:
        return self.count in self.steps

    def decide(self, norms: Mapping[str, float], lr: Mapping[str, float]) -> list[dict[str, Any]]:
        return [{"name": name, "level": 1 - level} for name, level in self.current.items()]

    def tick(self, lr: Mapping[str, float]) -> None:
        self.count += 1
