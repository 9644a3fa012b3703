"""Accordion: adaptive communication by critical-regime detection (Agarwal et al., MLSys 2021)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from accordion_hvd import check
from accordion_hvd.base import Compressor
from accordion_hvd.policy.base import Row, agree
from accordion_hvd.policy.fixed import override
from accordion_hvd.policy.gate import Gate, as_gate
from accordion_hvd.policy.windows import Windowed

LOW, HIGH = 0, 1
CHANGED = "level changed in this window"


class Accordion(Windowed):
    """Low compression in critical regimes, high elsewhere, decided per layer.

    Per layer, the gradients of a window (an epoch) are summed; let n be the norm of the sum at
    the end of window e and m the one `interval` windows before. At the end of windows 0,
    `interval`, 2 `interval`, ... a layer is critical if e = 0, or m = 0, or a norm is not finite,
    or |m - n| / m >= `threshold`; it is then served by `low` from the next window on, else by
    `high`. Before the first check, all are served by `low`. Whenever the learning rate falls, all
    layers it governs are critical until the next check (Algorithm 1 of the paper and section (b)
    of the authors' code). Rank 0 decides for all.

    Args:
        low: the level of low compression (the paper's l_low), for critical regimes. Both levels
            are left out where it moves an optimizer (`hvd.OnebitAdam(policy=Accordion())`)
            between that optimizer's own stages.
        high: the level of high compression (l_high), for all others.
        threshold: the paper's eta, at least 0; a relative change.
        window: optimizer steps in a window. In Keras the callbacks fill it in; in PyTorch give it
            or call `optimizer.end_window()` after each epoch.
        interval: windows between checks.
        signal: "local": rank 0's own uncompressed gradients, as in the paper (costs rank 0 a
            gradient copy); "reduced": the averages that every rank has anyway. A window in which
            a layer's level changed is then no evidence about it, since the new level first sends
            what the old one still owed.
        lr_drop: a learning rate falls when it is at most `lr_drop` times what it was a window
            before; None for the authors' rule, any fall (a schedule that falls at every step
            would then be critical for ever).
        overrides: compressors for tensors whose names match a pattern (as of file names),
            whatever the regime.
        gate: "auto": compress only where that saves time (see `Gate`).

    Attributes:
        history: one row a decision and layer, with all that led to it.
    """

    def __init__(
        self,
        low: Compressor | None = None,
        high: Compressor | None = None,
        *,
        threshold: float = 0.5,
        window: int | None = None,
        interval: int = 10,
        signal: str = "local",
        lr_drop: float | None = 0.5,
        overrides: Mapping[str, Compressor] | None = None,
        gate: str | Gate | None = None,
    ) -> None:
        super().__init__(window)
        self.overrides = {key: _instance(value) for key, value in (overrides or {}).items()}
        self.low: Any = None
        self.high: Any = None
        if low is not None or high is not None:
            self.between(_instance(low), _instance(high))
        self.gate = as_gate(self, gate)
        check.at_least(self, "threshold", threshold, least=0)
        check.integer(self, "interval", interval, least=1)
        check.one_of(self, "signal", signal, ("local", "reduced"))
        if lr_drop is not None:
            check.ratio(self, "lr_drop", lr_drop)
        self.threshold, self.interval = threshold, interval
        self.signal, self.lr_drop = signal, lr_drop
        self._norms: dict[str, float] = {}  # at the last check

    def between(self, low: Any, high: Any) -> None:
        """Move between these levels.

        Raises:
            ValueError: one is missing, or they do not agree.
        """
        for name, level in (("low", low), ("high", high)):
            if level is None:
                raise ValueError(
                    f"Accordion: {name} is missing; give both levels, for example "
                    "Accordion(low=PowerSGD(4), high=PowerSGD(1))."
                )
        agree(self, [low, high, *self.overrides.values()])
        self.low, self.high = low, high
        self.gate = as_gate(self, self.gate)  # which not every output allows

    def complete(self) -> None:
        """Raises: ValueError without levels, which only an optimizer's own stages can replace."""
        self.between(self.low, self.high)

    def levels(self, name: str) -> tuple[Compressor, ...]:
        """(low, high), or the one override."""
        fixed = override(self.overrides, name)
        return (fixed,) if fixed is not None else (self.low, self.high)

    def start(self, name: str) -> int:
        """The start of training is critical."""
        return LOW

    def observing(self) -> bool:
        """Only windows that end in a check are summed."""
        return self._epoch % self.interval == 0

    def decide(self, norms: Mapping[str, float], lr: Mapping[str, float]) -> list[Row]:
        """See the class; a row for each layer concerned, and once for each override."""
        checking = self._epoch % self.interval == 0
        rows = []
        for name, current in self.current.items():
            row = self._row(name, norms, lr)
            if len(self.levels(name)) == 1:
                row["reason"] = "" if self._epoch else "override"  # once, for the record
            else:
                row |= self._judge(row, current) if checking else {}
                if self._fell(row["previous_lr"], row["lr"]):
                    row |= {"level": LOW, "reason": "learning rate fell"}
            if row["reason"]:
                row["compressor"] = repr(self.levels(name)[row["level"]])
                rows.append(row)
        return rows

    def apply(self, rows: Sequence[Row]) -> None:
        """Put decisions into force, and begin the next window."""
        before = dict(self.current)
        super().apply(rows)
        if self._epoch % self.interval == 0:
            seen = {row["name"]: row["norm"] for row in rows if row["reason"] != CHANGED}
            self._norms = self._norms | seen  # a new dict: state_dict() gave the old one away
        self._changed = {name for name, level in self.current.items() if before[name] != level}
        self._roll()

    def disturbed(self, names: Sequence[str]) -> None:
        """What serves has changed: averages of this window are no evidence (see `signal`)."""
        self._changed = self._changed | set(names)

    def state_dict(self) -> dict[str, Any]:
        """Where it is in its windows, the norms it will compare with, and all decisions."""
        return super().state_dict() | {"_norms": self._norms, "_changed": sorted(self._changed)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`."""
        super().load_state_dict(state)
        self._norms, self._changed = state["_norms"], set(state["_changed"])

    def __repr__(self) -> str:
        """As it is written."""
        return (
            f"Accordion(low={self.low!r}, high={self.high!r}, threshold={self.threshold!r}, "
            f"window={self.window!r}, interval={self.interval!r}, signal={self.signal!r}, "
            f"lr_drop={self.lr_drop!r}, overrides={self.overrides!r}"
            + (f", gate={self.gate!r})" if self.gate else ")")
        )

    _changed: set[str] = set()

    def _row(self, name: str, norms: Mapping[str, float], lr: Mapping[str, float]) -> Row:
        return {
            "step": self._step,
            "window": self._epoch,
            "name": name,
            "level": self.current[name],
            "compressor": "",
            "norm": norms.get(name, math.nan),
            "previous": self._norms.get(name, math.nan),
            "change": math.nan,
            "lr": lr[name],
            "previous_lr": self._lr[name],
            "reason": "",
        }

    def _judge(self, row: Row, current: int) -> Row:
        """Level and reason by the norms."""
        norm, previous = row["norm"], row["previous"]
        if self._epoch == 0:
            return {"level": LOW, "reason": "first window"}
        if self.signal == "reduced" and row["name"] in self._changed:
            return {"level": current, "reason": CHANGED}
        if not (math.isfinite(norm) and math.isfinite(previous)):
            return {"level": LOW, "reason": "norm not finite"}
        if previous == 0:
            return {"level": LOW, "reason": "previous norm was zero"}
        change = abs(previous - norm) / previous
        critical = change >= self.threshold
        reason = "norm changed" if critical else "norm steady"
        return {"level": LOW if critical else HIGH, "change": change, "reason": reason}

    def _fell(self, before: float, now: float) -> bool:
        return now < before and (self.lr_drop is None or now <= self.lr_drop * before)


def _instance(level: Any) -> Any:
    return level() if isinstance(level, type) and issubclass(level, Compressor) else level
