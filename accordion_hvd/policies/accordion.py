"""Accordion: adaptive communication by critical-regime detection (Agarwal et al., MLSys 2021)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from accordion_hvd import check
from accordion_hvd.averaging.base import Averaging
from accordion_hvd.compressors.dense import Dense
from accordion_hvd.core.base import Compressor
from accordion_hvd.policies import levers
from accordion_hvd.policies.base import Row, agree
from accordion_hvd.policies.fixed import override
from accordion_hvd.policies.gate import Gate, as_gate
from accordion_hvd.policies.windows import Windowed

LOW, HIGH = 0, 1
CHANGED = "level changed in this window"
BATCH, MODEL = "(batch size)", "(model)"
"""What rows about the batch size, or about averaging models, have as their name."""
OVER = "over the budget"


class Accordion(Windowed):
    """Low compression in critical regimes, high elsewhere, decided per layer.

    Per layer, the gradients of a window (an epoch) are summed; let n be the norm of the sum at
    the end of window e and m the one `interval` windows before. At the end of windows 0,
    `interval`, 2 `interval`, ... a layer is critical if e = 0, or m = 0, or a norm is not finite,
    or |m - n| / m >= `threshold`; it is then served by `low` from the next window on, else by
    `high`. Before the first check, all are served by `low`. Whenever the learning rate falls, all
    layers it governs are critical until the next check (Algorithm 1 of the paper and section (b)
    of the authors' code). Rank 0 decides for all.

    With `batch_size=(small, large)`, which may stand alone, the same test on one norm, that of all
    gradients of the model side by side, decides about the batch (the paper's batch mode): small
    ones in critical regimes; the first check that finds none makes batches large, and they stay so
    (a later fall of the learning rate changes nothing). A step then takes the average gradient of a
    large batch and, by the rule of linear scaling, large / small times the optimizer's learning
    rate, which schedules and users go on to see as they have set it. The gradients of as many small
    batches are accumulated for that; or loaders give large ones (`AccordionBatchSampler` in
    PyTorch, `AccordionDataset` in Keras). Windows are counted in small batches either way.

    With a method that averages models as `high` (`Accordion(low=Dense(), high=WAGMA(4))`; ours),
    that norm decides for the whole model at once: in critical regimes all ranks average their
    gradients in each step, by `low`; elsewhere each takes steps of its own and the method averages
    models. Decisions wait for an average of all ranks, so that models are equal when they
    are taken. When gradients are averaged again, optimizers' slots (momentum), which were each
    rank's own, are averaged once.

    Args:
        low: the level of low compression (the paper's l_low), for critical regimes. Both levels
            are left out where it moves an optimizer (`hvd.OnebitAdam(policy=Accordion())`)
            between that optimizer's own stages, or where batches alone are to grow.
        high: the level of high compression (l_high), for all others; or a method that averages
            models: `WAGMA`, `LocalSGD`, `DiLoCo`, `DPSGD` (which has no averages of all ranks and
            so gets one at each window's end).
        threshold: the paper's eta, at least 0; a relative change.
        window: optimizer steps (with small batches) in a window. In Keras the callbacks fill it in;
            in PyTorch give it or call `optimizer.end_window()` after each epoch.
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
        batch_size: (small, large), examples of all ranks together, the large one a multiple of the
            small one. Loaders give each rank its share of a small batch.
        budget: MB (10^6 bytes) that a rank may send for each small batch, on average over a large
            one. Levels that are wanted are taken as long as there is room for them, where the norm
            has changed most first; else the cheapest ones are (until the next check). If even
            these are too much for small batches, batches are large. Where models are averaged at
            times, what is wanted is done if there is room, else what is cheaper. Bytes are those of
            `stats()["sent"]`, reckoned before training (`prices.bytes_sent`); flags (8 bytes a
            message), sparse gradients and decisions come on top. Ours, not the paper's.

    Attributes:
        history: one row a decision and layer, with all that led to it; rows about the batch are
            called "(batch size)", those about averaging models "(model)".
        large: whether batches are large from now on.
    """

    KEPT: ClassVar[tuple[str, ...]] = (*Windowed.KEPT, "large", "apart")

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
        batch_size: tuple[int, int] | None = None,
        budget: float | None = None,
    ) -> None:
        super().__init__(window)
        self.batch_size = levers.batch_sizes(self, batch_size, window)
        self.large = False
        self.megabytes = budget
        self._prices: Mapping[str, Sequence[float]] = {}
        self._rest = 0.0  # bytes of an exchange that it has no say in
        self._models = 0.0  # bytes of a step in which models are averaged
        self._grows_only = False  # no levels: batches are all there is to decide
        self.overrides = {key: _instance(value) for key, value in (overrides or {}).items()}
        self.low: Any = None
        self.high: Any = None
        self.signal = signal
        if low is not None or high is not None:
            self.between(_instance(low), _instance(high))
        self.gate = as_gate(self, gate)
        self.method = _method(self, self.high)
        check.at_least(self, "threshold", threshold, least=0)
        check.integer(self, "interval", interval, least=1)
        check.one_of(self, "signal", signal, ("local", "reduced"))
        if lr_drop is not None:
            check.ratio(self, "lr_drop", lr_drop)
        self.threshold, self.interval = threshold, interval
        self.lr_drop = lr_drop
        self._norms: dict[str, float] = {}  # at the last check
        if budget is not None:
            if not (check.is_number(budget) and budget > 0):
                check.refuse(self, "budget", budget, "a number above 0 (MB a step), or None")
            if self.gate is not None:
                check.refuse(self, "gate", gate, "None with a budget, which it does not know of")
            self.capped = True

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
        self.method = _method(self, high)
        graded = [low] if self.method else [low, high]
        agree(self, [*graded, *self.overrides.values()])
        self.low, self.high = low, high
        self.gate = as_gate(self, self.gate)  # which not every output allows

    def complete(self) -> None:
        """See that there are levels, or batches that grow: then all is sent as it is.

        Raises:
            ValueError: there are neither; only an optimizer's own stages can replace levels.
        """
        if self.low is None and self.high is None and self.batch_size is not None:
            self._grows_only = True
            self.between(Dense(), Dense())
        self.between(self.low, self.high)

    def levels(self, name: str) -> tuple[Compressor, ...]:
        """(low, high), or the one override."""
        alone = self._grows_only or self.method is not None
        fixed = override(self.overrides, name) or (self.low if alone else None)
        return (fixed,) if fixed is not None else (self.low, self.high)

    def price(
        self, levels: Mapping[str, Sequence[float]], rest: float, models: float = 0.0
    ) -> None:
        """See `Policy`. Raises: ValueError when the budget is less than what must be sent."""
        self._prices, self._rest, self._models = levels, rest, models
        least, most = levers.least(self._prices, self._rest), self._ratio
        least = min(least, models) if self.method is not None else least
        if least > self._room(most):
            megabytes = f"{math.ceil(least / most) / levers.MEGABYTE:g}"
            allowed = f"at least {megabytes}, which the cheapest levels send, or None"
            check.refuse(self, "budget", self.megabytes, allowed)
        if least > self._room(1):
            self.large = True
            if not self.loader:
                self.resize()
        wanted = {name: LOW for name in self._prices}
        self._first = self._affordable(wanted, {}, self.micro_batches)
        if not self._step:
            self.apart = self._allowed(LOW, self.micro_batches) == HIGH

    def start(self, name: str) -> int:
        """The start of training is critical."""
        return self._first.get(name, LOW)

    def observing(self) -> bool:
        """Only windows that end in a check are summed, and only as long as that matters."""
        decided = self._grows_only and self.large
        return self._epoch % self.interval == 0 and not decided

    def decide(self, norms: Mapping[str, float], lr: Mapping[str, float]) -> list[Row]:
        """See the class; a row for each layer concerned, and once for each override."""
        checking = self._epoch % self.interval == 0
        rows = []
        for name, current in self.current.items():
            row = self._row(name, norms, lr)
            if len(self.levels(name)) == 1:
                once = override(self.overrides, name) is not None and not self._epoch
                row["reason"] = "override" if once else ""  # for the record
            else:
                row |= self._judge(row, current) if checking else {}
                if self._fell(row["previous_lr"], row["lr"]):
                    row |= {"level": LOW, "reason": "learning rate fell"}
            if row["reason"]:
                rows.append(row)
        batch = self._about_batch(norms, lr, checking)
        self._cap(rows, self.large or any(row["level"] == HIGH for row in batch))
        for row in rows:
            row["compressor"] = repr(self.levels(row["name"])[row["level"]])
        return rows + batch + self._about_models(norms, lr, checking, batch)

    def apply(self, rows: Sequence[Row]) -> None:
        """Put decisions into force, and begin the next window."""
        before = dict(self.current)
        super().apply([row for row in rows if row["name"] not in (BATCH, MODEL)])
        for row in rows:
            if row["name"] == BATCH:
                self._size(row)
            elif row["name"] == MODEL:
                self.history.append(row)
                self.turned |= self.apart != (row["level"] == HIGH)
                self.apart = row["level"] == HIGH
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
        self.settled = True  # as models were when they were saved
        self.resize()

    def resize(self) -> None:
        """From now on batches are as large as they are meant to be."""
        self.micro_batches = self._ratio if self.large else 1

    def __repr__(self) -> str:
        """As it is written."""
        return (
            f"Accordion(low={self.low!r}, high={self.high!r}, threshold={self.threshold!r}, "
            f"window={self.window!r}, interval={self.interval!r}, signal={self.signal!r}, "
            f"lr_drop={self.lr_drop!r}, overrides={self.overrides!r}"
            + (f", gate={self.gate!r}" if self.gate else "")
            + (f", batch_size={self.batch_size!r}" if self.batch_size else "")
            + (f", budget={self.megabytes!r})" if self.megabytes else ")")
        )

    _changed: set[str] = set()
    _first: Mapping[str, int] = {}  # levels at the start, where a budget has a say

    @property
    def _ratio(self) -> int:
        """Small batches in a large one."""
        return self.batch_size[1] // self.batch_size[0] if self.batch_size else 1

    def _about_batch(
        self, norms: Mapping[str, float], lr: Mapping[str, float], checking: bool
    ) -> list[Row]:
        """The row of a decision about the batch, if there is one to take; see the class."""
        if self.batch_size is None or (self.large and self._epoch):
            return []
        row = self._row(BATCH, norms, lr)
        if self.large:
            row |= {"level": HIGH, "reason": OVER}
        elif checking:
            row |= self._judge(row, LOW)
        if not self.large and self._fell(row["previous_lr"], row["lr"]):
            row |= {"level": LOW, "reason": "learning rate fell"}
        row["compressor"] = f"{self.batch_size[row['level']]} examples"
        return [row] if row["reason"] else []

    def _about_models(
        self,
        norms: Mapping[str, float],
        lr: Mapping[str, float],
        checking: bool,
        batch: Sequence[Row],
    ) -> list[Row]:
        """The row of a decision about averaging models, if there is one to take; see the class."""
        if self.method is None:
            return []
        row = self._row(MODEL, norms, lr)
        if checking:
            row |= self._judge(row, row["level"])
        if self._fell(row["previous_lr"], row["lr"]):
            row |= {"level": LOW, "reason": "learning rate fell"}
        large = self.large or any(about["level"] == HIGH for about in batch)
        level = self._allowed(row["level"], self._to_come(large))
        if row["reason"] and level != row["level"]:
            row |= {"level": level, "reason": f"{row['reason']}, but {OVER}"}
        row["compressor"] = repr((self.low, self.high)[row["level"]])
        return [row] if row["reason"] else []

    def _size(self, row: Row) -> None:
        """Put a decision about the batch into force; loaders follow when they can."""
        self.history.append(row)
        self.large = row["level"] == HIGH
        if not self.loader:
            self.resize()

    def _cap(self, rows: list[Row], large: bool) -> None:
        """Let `rows` have the levels that the budget allows; what has none stays as it is."""
        if not (self.capped and rows):
            return
        by_name = {row["name"]: row for row in rows}
        wanted = self.current | {name: row["level"] for name, row in by_name.items()}
        known = {name: row["change"] for name, row in by_name.items()}
        urgency = {name: 1e300 if math.isnan(change) else change for name, change in known.items()}
        chosen = self._affordable(wanted, urgency, self._to_come(large))
        for name, row in by_name.items():
            if row["level"] != chosen[name]:
                row |= {"level": chosen[name], "reason": f"{row['reason']}, but {OVER}"}

    def _to_come(self, large: bool) -> int:
        """Small batches in the next steps, if batches are or become large."""
        return self._ratio if large and not self.loader else self.micro_batches

    def _allowed(self, wanted: int, small_batches: int) -> int:
        """Whether to average gradients (LOW) or models (HIGH), where the budget has a say."""
        if self.method is None or not self.capped:
            return wanted
        costs = levers.least(self._prices, self._rest), self._models
        cheaper = LOW if costs[LOW] <= costs[HIGH] else HIGH
        return wanted if costs[wanted] <= self._room(small_batches) else cheaper

    def _affordable(
        self, wanted: Mapping[str, int], urgency: Mapping[str, float], small_batches: int
    ) -> dict[str, int]:
        room = self._room(small_batches) - self._rest
        return levers.affordable(wanted, self._prices, urgency, room)

    def _room(self, small_batches: int) -> float:
        """Bytes that an exchange for so many small batches may take."""
        assert self.megabytes is not None
        return self.megabytes * levers.MEGABYTE * small_batches

    def _row(self, name: str, norms: Mapping[str, float], lr: Mapping[str, float]) -> Row:
        whose, norm, level = name, norms.get(name, math.nan), self.current.get(name, LOW)
        if name in (BATCH, MODEL):  # goes by all norms, and by the rate that has fallen most
            before = self._lr
            norm = math.hypot(*norms.values()) if norms else math.nan
            level = HIGH if name == MODEL and self.apart else LOW
            whose = min(lr, key=lambda n: lr[n] / before[n] if before.get(n) else 1.0, default="")
        return {
            "step": self._step,
            "window": self._epoch,
            "name": name,
            "level": level,
            "compressor": "",
            "norm": norm,
            "previous": self._norms.get(name, math.nan),
            "change": math.nan,
            "lr": lr.get(whose, math.nan),
            "previous_lr": self._lr.get(whose, math.nan),
            "reason": "",
        }

    def _judge(self, row: Row, current: int) -> Row:
        """Level and reason by the norms."""
        norm, previous = row["norm"], row["previous"]
        if self._epoch == 0:
            return {"level": LOW, "reason": "first window"}
        whose = self.current if row["name"] in (BATCH, MODEL) else [row["name"]]
        if self.signal == "reduced" and not self._changed.isdisjoint(whose):
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


def _method(owner: Accordion, high: Any) -> Averaging | None:
    """What averages models, if that is what `high` is."""
    if not isinstance(high, Averaging):
        return None
    if high.inner != "any":
        check.refuse(owner, "high", high, "a compressor, WAGMA, LocalSGD, DiLoCo or DPSGD")
    for name, value, allowed in (("gate", owner.gate, None), ("signal", owner.signal, "local")):
        if value != allowed:
            check.refuse(owner, name, value, f"{allowed!r} where high averages models")
    return high


def _instance(level: Any) -> Any:
    return level() if isinstance(level, type) and issubclass(level, Compressor) else level
