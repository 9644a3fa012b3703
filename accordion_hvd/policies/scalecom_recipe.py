"""The training recipe of ScaleCom (Chen et al., NeurIPS 2020)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from accordion_hvd import check
from accordion_hvd.compressors.dense import Dense
from accordion_hvd.compressors.scalecom import ScaleCom
from accordion_hvd.core.base import Compressor
from accordion_hvd.policies.base import Decision, Seen
from accordion_hvd.policies.fixed import StepSchedule

LARGE_BATCH_BETA = 0.1


class ScaleComRecipe(StepSchedule):
    """Trains with ScaleCom as in its paper.

    All gradients are averaged without compression in the first epochs, and those of the first layer
    always. Then `ScaleCom` compresses each other layer at the rate that the paper recommends for
    its FLOPs per gradient element (`ScaleCom.guided`).

    Args:
        first: name patterns of the first layer's tensors, such as ["conv1.*"].
        flops: name pattern -> FLOPs per gradient element and step of one rank, forward and backward
            pass; the first pattern that matches counts. The paper computes them for 32 examples
            per rank. Layers that match no pattern, such as dense and recurrent layers with few
            FLOPs per element, are compressed 400 times. Default: no patterns.
        large_batch: whether batch size and learning rate are scaled up: beta is then 0.1 instead
            of 1. Default: False.
        dense: number of windows (epochs) without compression; the paper uses about 5, less than a
            tenth of the training. Default: 5.
        window: batches in a window. In Keras, callbacks set it; in PyTorch, pass it or call
            `optimizer.end_window()` after each epoch.

    Attributes:
        history: one row per compressed layer, at the end of the uncompressed epochs.

    Raises:
        ValueError: if an argument is out of range.
    """

    def __init__(
        self,
        first: Sequence[str],
        flops: Mapping[str, float] | None = None,
        *,
        large_batch: bool = False,
        dense: int = 5,
        window: int | None = None,
    ) -> None:
        check.integer(self, "dense", dense, least=0)
        if not isinstance(large_batch, bool):
            check.refuse(self, "large_batch", large_batch, "True or False")
        names = isinstance(first, (list, tuple)) and all(isinstance(name, str) for name in first)
        if not names:
            check.refuse(self, "first", first, 'a list of name patterns, such as ["conv1.*"]')
        check.mapping(self, "flops", flops)
        self.first, self.flops = list(first), dict(flops or {})
        self.large_batch, self.dense = large_batch, dense
        beta = LARGE_BATCH_BETA if large_batch else 1.0
        self._layers = {k: ScaleCom.guided(v, beta=beta) for k, v in self.flops.items()}
        self._others = ScaleCom.guided(0, beta=beta)
        super().__init__({0: Dense(), dense: self._others}, window=window)

    def levels(self, name: str) -> tuple[Compressor, ...]:
        """Return (Dense,) for the first layer; for others Dense, if it serves, and ScaleCom."""
        if check.matches(name, self.first):
            return (Dense(),)
        pattern = check.first_match(name, self._layers)
        compressed = self._others if pattern is None else self._layers[pattern]
        return (Dense(), compressed) if self.dense else (compressed,)

    def start(self, name: str) -> int:
        return min(super().start(name), len(self.levels(name)) - 1)

    def decide(self, seen: Seen, lr: Mapping[str, float]) -> list[Decision]:
        """Return a row per layer that is compressed from now on."""
        return [
            replace(row, compressor=repr(self.levels(row.name)[row.level]))
            for row in super().decide(seen, lr)
            if row.level < len(self.levels(row.name))
        ]

    def __repr__(self) -> str:
        return (
            f"ScaleComRecipe({self.first!r}, {self.flops!r}, large_batch={self.large_batch!r}, "
            f"dense={self.dense!r}, window={self.window!r})"
        )
