"""AdaQS: adaptive compression by the gradients' mean-to-deviation ratio (Guo et al., ICASSP 2020).

What Accordion was compared with. Its paper, and so this file, runs the rule on any compressor:
start with the strongest compression, and halve it for good when the ratio of the gradients' mean
to their standard deviation has dropped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from accordion_hvd import check
from accordion_hvd.core.base import Compressor
from accordion_hvd.policies.base import Seen, agree
from accordion_hvd.policies.decision import Decision
from accordion_hvd.policies.evidence import GradientSums
from accordion_hvd.policies.windows import Windowed

FIRST, FELL, STEADY = "first window", "ratio fell", "ratio steady"
MILDEST = "ratio fell, nothing milder"
UNKNOWN = "ratio not known"


class AdaQS(Windowed):
    """Milder compression when gradients get noisier, decided per layer; never stronger again.

    The ratio of a window (an epoch) is |m| / s, for m the mean of the window's gradients and s^2
    the mean of |gradient - m|^2. If it is less than `drop` times what it was when the layer's level
    was chosen (in the first window, to begin with), the next milder level serves from then on.
    Rank 0 decides for all, by its own uncompressed gradients.

    From the papers are the ratio, its estimate by moments, and that compression is halved when it
    drops. Ours are how far it must drop, windows, that layers are judged apart, and the moments:
    the first `probes` gradients of a window are looked at one by one, which gives the mean of
    |gradient|^2; of the others the sum is. That costs rank 0 a gradient copy, and all ranks a
    message of some bytes after each of these steps. Where Keras runs several steps at once
    (`steps_per_execution`), single gradients are not seen and nothing changes.

    Args:
        levels: compressors from the strongest to the mildest, each of about twice the bytes of the
            one before, such as [PowerSGD(1), PowerSGD(2), PowerSGD(4)]; at least two.
        drop: what part of the old ratio is a drop, in (0, 1].
        window: optimizer steps in a window, at least `probes` + 2. In Keras the callbacks fill it
            in; in PyTorch give it or call `optimizer.end_window()` after each epoch.
        probes: gradients that are looked at one by one, at least 1.

    Attributes:
        history: one row a window and layer: as `Accordion.history`, with the window's `ratio`;
            `previous` is the one it was compared with, `change` the part by which it fell.
    """

    evidence = (GradientSums(),)
    KEPT = (*Windowed.KEPT, "_looked", "_energy", "_ratios")

    def __init__(
        self,
        levels: Sequence[Compressor],
        *,
        drop: float = 0.5,
        window: int | None = None,
        probes: int = 4,
    ) -> None:
        super().__init__(window)
        if not isinstance(levels, Sequence) or len(levels) < 2:
            allowed = "two or more compressors such as [PowerSGD(1), PowerSGD(2)]"
            check.refuse(self, "levels", levels, allowed)
        agree(self, list(levels))
        check.ratio(self, "drop", drop)
        check.integer(self, "probes", probes, least=1)
        if window is not None:
            check.integer(self, "window", window, least=probes + 2)
        self._levels, self.drop, self.probes = tuple(levels), drop, probes
        self._looked = 0  # gradients of this window looked at one by one
        self._energy: dict[str, float] = {}  # the sum of their |gradient|^2
        self._ratios: dict[str, float] = {}  # when levels were chosen

    def levels(self, name: str) -> tuple[Compressor, ...]:
        """From the strongest to the mildest."""
        return self._levels

    def observing(self) -> bool:
        """Every window is judged."""
        return True

    def due(self, lr: Mapping[str, float]) -> bool:
        """At the end of a window, and after each of its first gradients."""
        return super().due(lr) or self._looked < self._steps <= self.probes

    def decide(self, seen: Seen, lr: Mapping[str, float]) -> list[Decision]:
        """Return a row per layer; within a window it records only the norm of the last gradient."""
        sums = seen.get(GradientSums.key, {})
        norms = {name: sums.get(name, math.nan) for name in self.current}
        if not super().due(lr):
            return [Decision(name, self.current[name], norm=x) for name, x in norms.items()]
        return [self._judge(name, norm, lr[name]) for name, norm in norms.items()]

    def apply(self, decisions: Sequence[Decision]) -> None:
        """Put decisions into force, and begin the next window; or remember what was looked at."""
        if not super().due({}):
            self._looked = self._steps
            energy = {row.name: row.norm**2 for row in decisions}
            self._energy = {k: self._energy.get(k, 0.0) + x for k, x in energy.items()}
            return
        super().apply(decisions)
        chosen = {row.name: row.ratio for row in decisions if row.reason in (FIRST, FELL)}
        self._ratios = self._ratios | chosen
        self._looked, self._energy = 0, {}

    def __repr__(self) -> str:
        """Return the constructor call."""
        return (
            f"AdaQS({list(self._levels)!r}, drop={self.drop!r}, window={self.window!r}, "
            f"probes={self.probes!r})"
        )

    def _judge(self, name: str, norm: float, lr: float) -> Decision:
        ratio = self._ratio(self._energy.get(name, math.nan), norm)
        level, before = self.current[name], self._ratios.get(name, math.nan)
        reason = FIRST if name not in self._ratios else STEADY
        if not ratio >= 0:
            reason = UNKNOWN
        elif ratio < self.drop * before:
            reason = FELL if level + 1 < len(self._levels) else MILDEST
            level = min(level + 1, len(self._levels) - 1)
        compressor = repr(self._levels[level])
        row = Decision(name, level, self._step, self._epoch, compressor, reason, norm, before)
        row.lr, row.previous_lr, row.ratio = lr, self._lr[name], ratio
        row.change = 1 - ratio / before if before else math.nan
        return row

    def _ratio(self, energy: float, norm: float) -> float:
        """|m| / s, from the sums of |gradient|^2 and of gradients; NaN if they do not tell.

        For n independent gradients, E |sum|^2 = n (n - 1) |m|^2 + n E |gradient|^2.
        """
        summed = self._steps - self._looked
        if not self._looked or summed < 2 or not math.isfinite(energy + norm):
            return math.nan
        square = energy / self._looked
        mean = max(0.0, (norm**2 / summed - square) / (summed - 1))
        if mean >= square:  # they are all alike
            return math.inf if square else math.nan
        return math.sqrt(mean / (square - mean))
