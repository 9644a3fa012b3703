"""AdaQS: adaptive compression by the gradients' mean-to-deviation ratio (Guo et al., ICASSP 2020).

AdaQS is the baseline of Accordion's paper. That paper, and this module, apply the rule to any
compressor: start with the strongest compression, and halve it for good whenever the ratio of the
gradients' mean to their standard deviation has dropped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from accordion_hvd import check
from accordion_hvd.core.base import Compressor
from accordion_hvd.policies.base import Decision, Numbers, Seen, Windowed, agree
from accordion_hvd.policies.evidence import GradientSums

FIRST, FELL, STEADY = "first window", "ratio fell", "ratio steady"
MILDEST = "ratio fell, nothing milder"
UNKNOWN = "ratio not known"


class AdaQS(Windowed):
    """Makes the compression of a layer milder when its gradients get noisier, never stronger again.

    The ratio of a window (an epoch) is |m| / s, where m is the mean of the window's gradients and
    s^2 the mean of |gradient - m|^2. The policy compares the ratio with the ratio of the window in
    which the layer's level was chosen (at first, window 0). If the new ratio is less than `drop`
    times the old one, the next milder level serves the layer from then on. Rank 0 decides for all
    ranks, by its own uncompressed gradients.

    The papers define the ratio, estimate it by moments, and halve the compression when it drops.
    The size of a drop, the windows, a decision for each layer, and the moments used are ours: rank
    0 measures the first `probes` gradients of a window one by one, which gives the mean of
    |gradient|^2, and sums the others. This costs rank 0 a pass over the gradients, and all ranks a
    message of a few bytes after each of the first `probes` steps. If Keras runs several steps at
    once (`steps_per_execution`), the policy cannot measure single gradients and changes nothing.

    Args:
        levels: compressors from the strongest to the mildest, at least two. Each should send about
            twice the bytes of the one before, such as [PowerSGD(1), PowerSGD(2), PowerSGD(4)].
        drop: factor below which a ratio counts as a drop, in (0, 1].
        window: batches in a window, at least `probes` + 2. In Keras, callbacks set it; in
            PyTorch, pass it or call `optimizer.end_window()` after each epoch.
        probes: number of gradients measured one by one in each window, at least 1.

    Attributes:
        history: one row per window and layer, as in `Accordion.history`. `ratio` is the window's
            ratio, `previous` the ratio with which it was compared, and `change` = 1 - `ratio` /
            `previous`.
    """

    watches_rates = True
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
        self.drop, self.probes = drop, probes
        self._looked = 0  # gradients of this window measured one by one
        self._energy: dict[str, float] = {}  # the sum of their |gradient|^2
        self._ratios: dict[str, float] = {}  # ratios of the windows in which levels were chosen

    def observing(self) -> bool:
        """Return True: every window ends in a decision."""
        return True

    def due(self, lr: Numbers) -> bool:
        """Return whether a window has ended, or one of its first gradients is to be measured."""
        return super().due(lr) or self._looked < self._steps <= self.probes * self.passes

    def decide(self, seen: Seen, lr: Numbers) -> list[Decision]:
        """Return a row per layer; within a window, a row holds only the last gradient's norm."""
        sums = seen.get(GradientSums.key, {})
        norms = {name: sums.get(name, math.nan) for name in self.current}
        if not super().due(lr):
            return [Decision(name, self.current[name], norm=x) for name, x in norms.items()]
        return [self._judge(name, norm, lr[name]) for name, norm in norms.items()]

    def apply(self, decisions: Sequence[Decision]) -> None:
        """Apply decisions and begin the next window; within a window, add up measured norms."""
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
        levels = list(self._levels)
        return self._call(levels, drop=self.drop, window=self.window, probes=self.probes)

    def _judge(self, name: str, norm: float, lr: float) -> Decision:
        ratio = self._ratio(self._energy.get(name, math.nan), norm)
        level, before = self.current[name], self._ratios.get(name, math.nan)
        reason = FIRST if name not in self._ratios else STEADY
        if not ratio >= 0:
            reason = UNKNOWN
        elif ratio < self.drop * before:
            reason = FELL if level + 1 < len(self._levels) else MILDEST
            level = min(level + 1, len(self._levels) - 1)
        change = 1 - ratio / before if before else math.nan
        found = {"norm": norm, "previous": before, "ratio": ratio, "change": change}
        return self._decision(name, level, reason, lr, **found)

    def _ratio(self, energy: float, norm: float) -> float:
        """Estimate |m| / s; NaN if the window had too few gradients or a value is not finite.

        For n independent gradients, E |sum|^2 = n (n - 1) |m|^2 + n E |gradient|^2. `energy` is the
        sum of |gradient|^2 of gradients that were measured one by one, `norm` is |sum| of the
        others.
        """
        # Each exchange is one gradient, whatever number of batches it has.
        looked = self._looked // self.passes
        summed = self._steps // self.passes - looked
        if not looked or summed < 2 or not math.isfinite(energy + norm):
            return math.nan
        square = energy / looked
        mean = max(0.0, (norm**2 / summed - square) / (summed - 1))
        if mean >= square:  # all gradients are equal
            return math.inf if square else math.nan
        return math.sqrt(mean / (square - mean))
