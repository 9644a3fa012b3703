"""Goodput: the fastest of several compressors that the evidence of harm permits."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from accordion_hvd import check
from accordion_hvd.compressors.dense import Dense
from accordion_hvd.compressors.half import BF16, FP16
from accordion_hvd.core.base import Compressor
from accordion_hvd.policies.base import Seen, agree
from accordion_hvd.policies.decision import Decision
from accordion_hvd.policies.displacement import BOUND, RELEASE, RelativeResidual
from accordion_hvd.policies.gate import Gate, as_gate
from accordion_hvd.policies.windows import Windowed

NEARLY_EXACT = (Dense, FP16, BF16)


class Goodput(Windowed):
    """Uses the compressor with which training makes most progress per second.

    Goodput is throughput times statistical efficiency (Pollux, OSDI 2021; GraVAC, 2023). This
    policy measures both in the job:

    - *Efficiency.* The displacement of a layer's weights by its residual (see `Displacement`) tells
      which levels are harmless. A level whose displacement exceeds `bound` in a window is forbidden
      for the layer. The strongest level that is permitted becomes one step stronger if its own
      displacement is below `release` times `bound`. A forbidden level is permitted again when the
      learning rate has fallen so far that the displacement, which is proportional to it, would be
      below `bound`.
    - *Throughput.* A `Gate` measures the duration of a step with the strongest permitted levels and
      with each milder one, and mixes them if compressing some layers costs more time than it saves.
      It chooses a stronger level only if a step is 3 % faster, and measures again when the link or
      the duration of a step changes. `gate.verdict` is its last decision in a sentence.

    Training starts with the mildest level that is not nearly exact (`Dense`, `FP16`, `BF16`) as the
    strongest one permitted. Ours, not from a paper.

    ```python
    policy = Goodput([Dense(), FP16(), PowerSGD(4), PowerSGD(1)], window=100)
    ```

    Args:
        levels: compressors from the mildest to the strongest, at least two. Those that are not
            nearly exact must have error feedback, whose residual is the evidence.
        bound: displacement above which a level is forbidden, above 0.
        release: fraction of `bound` below which the next stronger level is permitted, in (0, 1].
        window: optimizer steps in a window. In Keras, callbacks set it; in PyTorch, pass it or call
            `optimizer.end_window()` after each epoch.

    Attributes:
        history: one row per window and layer; `level` is the strongest permitted one, and `norm`
            the displacement by the level that served the layer.
    """

    evidence = (RelativeResidual(),)
    KEPT = (*Windowed.KEPT, "_ratios")

    def __init__(
        self,
        levels: Sequence[Compressor],
        *,
        bound: float = BOUND,
        release: float = RELEASE,
        window: int | None = None,
    ) -> None:
        super().__init__(window)
        if not isinstance(levels, Sequence) or isinstance(levels, str) or len(levels) < 2:
            check.refuse(
                self, "levels", levels, "two or more compressors such as [Dense(), PowerSGD(4)]"
            )
        agree(self, list(levels))
        if not (check.is_number(bound) and bound > 0):
            check.refuse(self, "bound", bound, "a number above 0")
        check.ratio(self, "release", release)
        self._levels, self.bound, self.release = tuple(levels), bound, release
        self.gate = as_gate(self, Gate(fallbacks=self._levels[-2::-1]))
        self._ratios: dict[str, list[float]] = {}
        # bucket -> for each level the last residual relative to the weights; 0 before it was used

    def levels(self, name: str) -> tuple[Compressor, ...]:
        """Return all levels, from the mildest to the strongest."""
        return self._levels

    def start(self, name: str) -> int:
        """Return the mildest level that is not nearly exact, or the strongest level."""
        lossy = [i for i, x in enumerate(self._levels) if not isinstance(x, NEARLY_EXACT)]
        return lossy[0] if lossy else len(self._levels) - 1

    def serving(self, name: str) -> int:
        """Return the level that serves bucket `name`, which the gate may have made milder."""
        assert self.gate is not None
        count = len(self._levels)
        choice = self.gate.level(name, self.current[name], count)
        return choice if choice < count else 2 * count - 2 - choice

    def tick(self, lr: Mapping[str, float]) -> None:
        """Count an exchange; windows begin after the gate's trials, in which other levels serve."""
        super().tick(lr)
        assert self.gate is not None
        if not self.gate.decided:
            self._steps = 0

    def decide(self, seen: Seen, lr: Mapping[str, float]) -> list[Decision]:
        """Return a row per layer."""
        ratios = seen.get(RelativeResidual.key, {})
        return [self._judge(name, ratios.get(name, math.nan), lr[name]) for name in self.current]

    def apply(self, decisions: Sequence[Decision]) -> None:
        """Apply decisions; remember the residuals of the levels that served."""
        for row in decisions:
            known = self._ratios.setdefault(row.name, [0.0] * len(self._levels))
            ratio = row.norm / row.lr if row.lr else 0.0
            known[self.serving(row.name)] = ratio if math.isfinite(ratio) else 0.0
        super().apply(decisions)

    def __repr__(self) -> str:
        """Return the constructor call."""
        return (
            f"Goodput({list(self._levels)!r}, bound={self.bound!r}, release={self.release!r}, "
            f"window={self.window!r})"
        )

    def _judge(self, name: str, ratio: float, lr: float) -> Decision:
        """Return the strongest level that is permitted from now on."""
        limit, serving, displacement = self.current[name], self.serving(name), lr * ratio
        level, reason = limit, "between the bounds"
        if not displacement <= self.bound:  # also if NaN
            level, reason = max(serving - 1, 0), "displaced"
        elif serving < limit:
            reason = "a milder level is as fast"
        elif displacement < self.release * self.bound:
            level, reason = self._stronger(name, limit, lr)
        row = Decision(name, level, self._step, self._epoch, repr(self._levels[level]), reason)
        row.norm, row.lr, row.previous_lr = displacement, lr, self._lr.get(name, math.nan)
        return row

    def _stronger(self, name: str, limit: int, lr: float) -> tuple[int, str]:
        """Return the next stronger level if it exists and would not displace, and the reason."""
        if limit + 1 == len(self._levels):
            return limit, "the strongest level"
        known = self._ratios.get(name)
        if known is not None and lr * known[limit + 1] > self.bound:
            return limit, "the next level would displace"
        return limit + 1, "not displaced"
