"""Accordion: adaptive communication by critical-regime detection (Agarwal et al., MLSys 2021)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from accordion_hvd import check
from accordion_hvd.averaging.base import Averaging
from accordion_hvd.compressors.dense import Dense
from accordion_hvd.core.base import Compressor
from accordion_hvd.policies.alternation import MODEL, Alternation
from accordion_hvd.policies.base import Seen, agree
from accordion_hvd.policies.batch_growth import BATCH, BatchGrowth
from accordion_hvd.policies.byte_budget import OVER, ByteBudget
from accordion_hvd.policies.critical_regimes import HIGH, LOW, CriticalRegimes
from accordion_hvd.policies.decision import Decision
from accordion_hvd.policies.evidence import GradientSums
from accordion_hvd.policies.fixed import override
from accordion_hvd.policies.gate import Gate, as_gate
from accordion_hvd.policies.windows import Windowed


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
    PyTorch, `AccordionDataset` in Keras). Windows are counted in small batches in both cases.

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
            what the old one still carried.
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
        self.growth = None if batch_size is None else BatchGrowth(self, batch_size, window)
        self.alternation: Alternation | None = None
        self.byte_budget: ByteBudget | None = None
        self.first: Mapping[str, int] = {}  # levels at the start, where a budget has a say
        self._grows_only = False  # no levels: batches are all there is to decide
        self._changed: set[str] = set()  # buckets whose level changed when the window began
        self.overrides = {key: _instance(value) for key, value in (overrides or {}).items()}
        self.low: Any = None
        self.high: Any = None
        self.signal = signal
        if low is not None or high is not None:
            self.between(_instance(low), _instance(high))
        self.gate = as_gate(self, gate)
        self._check_method(self.high)
        self.regimes = CriticalRegimes(self, threshold, interval, lr_drop)
        check.one_of(self, "signal", signal, ("local", "reduced"))
        if budget is not None:
            self.byte_budget = ByteBudget(self, budget)
            if self.gate is not None:
                check.refuse(self, "gate", gate, "None with a budget, which it does not know of")
        self._arrange()

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
        averages = self._check_method(high)
        agree(self, [*([low] if averages else [low, high]), *self.overrides.values()])
        self.low, self.high = low, high
        if averages and self.alternation is None:
            self.alternation = Alternation(self, high)
        self.gate = as_gate(self, self.gate)  # which not every output allows
        self._arrange()

    def _check_method(self, high: Any) -> bool:
        """Return whether `high` averages models; refuse what does not go with it."""
        if not isinstance(high, Averaging):
            return False
        if high.inner != "any":
            check.refuse(self, "high", high, "a compressor, WAGMA, LocalSGD, DiLoCo or DPSGD")
        for name, value, allowed in (("gate", self.gate, None), ("signal", self.signal, "local")):
            if value != allowed:
                check.refuse(self, name, value, f"{allowed!r} where high averages models")
        return True

    def _arrange(self) -> None:
        """Declare what is decided by, and what follows the exchange."""
        gate, parts = self.gate, (self.growth, self.alternation, self.byte_budget)
        self.features = tuple(part for part in parts if part is not None)
        self.gate = gate
        model = self.growth is not None or self.alternation is not None
        self.evidence = (GradientSums(self.signal, everywhere=model),)

    def complete(self) -> None:
        """See that there are levels, or batches that grow: then all is sent as it is.

        Raises:
            ValueError: there are neither; only an optimizer's own stages can replace levels.
        """
        if self.low is None and self.high is None and self.growth is not None:
            self._grows_only = True
            self.between(Dense(), Dense())
        self.between(self.low, self.high)

    @property
    def large(self) -> bool:
        """See the class."""
        return self.growth is not None and self.growth.large

    def levels(self, name: str) -> tuple[Compressor, ...]:
        """(low, high), or the one override."""
        alone = self._grows_only or self.alternation is not None
        fixed = override(self.overrides, name) or (self.low if alone else None)
        return (fixed,) if fixed is not None else (self.low, self.high)

    def start(self, name: str) -> int:
        """Return the low level: the start of training is critical."""
        return self.first.get(name, LOW)

    def observing(self) -> bool:
        """Only windows that end in a check are summed, and only as long as that matters."""
        return self.regimes.checks(self._epoch) and not (self._grows_only and self.large)

    @property
    def ready(self) -> bool:
        """Return whether models are equal, as decisions need them."""
        return self.alternation is None or self.alternation.equal

    def decide(self, seen: Seen, lr: Mapping[str, float]) -> list[Decision]:
        """See the class; a row for each layer concerned, and once for each override."""
        norms = seen.get(GradientSums.key, {})
        rows = [self._about_bucket(name, norms, lr) for name in self.current]
        rows = [row for row in rows if row.reason]
        batch = self._about_batch(norms, lr)
        large = self.large or any(row.level == HIGH for row in batch)
        to_come = 1 if self.growth is None else self.growth.to_come(large)
        if self.byte_budget is not None:
            self.byte_budget.cap(rows, self.current, to_come)
        for row in rows:
            row.compressor = repr(self.levels(row.name)[row.level])
        return rows + batch + self._about_models(norms, lr, to_come)

    def apply(self, decisions: Sequence[Decision]) -> None:
        """Put decisions into force, and begin the next window."""
        before, window = dict(self.current), self._epoch
        super().apply([row for row in decisions if row.name not in (BATCH, MODEL)])
        for row in decisions:
            if row.name == BATCH and self.growth is not None:
                self.growth.grow(row.level == HIGH)
                self.history.append(row)
            elif row.name == MODEL and self.alternation is not None:
                self.alternation.switch(row.level)
                self.history.append(row)
        if self.regimes.checks(window):
            self.regimes.remember(decisions)
        self._changed = {name for name, level in self.current.items() if before[name] != level}

    def on_level_override(self, names: Sequence[str]) -> None:
        """Discard averages of this window as evidence, because levels changed (see `signal`)."""
        self._changed = self._changed | set(names)

    def state_dict(self) -> dict[str, Any]:
        """Return the place in its windows, the norms of the last check, and all decisions."""
        apart = self.alternation is not None and self.alternation.averaging_models
        own = {"large": self.large, "apart": apart, "_norms": self.regimes.norms}
        return super().state_dict() | own | {"_changed": sorted(self._changed)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore from `state_dict`."""
        super().load_state_dict(state)
        self.regimes.norms, self._changed = state["_norms"], set(state["_changed"])
        if self.growth is not None:
            self.growth.large = state["large"]
            self.growth.resize()
        if self.alternation is not None:
            self.alternation.averaging_models = state["apart"]
            self.alternation.equal = True  # as models were when they were saved

    def __repr__(self) -> str:
        """Return the constructor call."""
        regimes = self.regimes
        return (
            f"Accordion(low={self.low!r}, high={self.high!r}, threshold={regimes.threshold!r}, "
            f"window={self.window!r}, interval={regimes.interval!r}, signal={self.signal!r}, "
            f"lr_drop={regimes.lr_drop!r}, overrides={self.overrides!r}"
            + (f", gate={self.gate!r}" if self.gate else "")
            + (f", batch_size={self.growth.sizes!r}" if self.growth else "")
            + (f", budget={self.byte_budget.megabytes!r})" if self.byte_budget else ")")
        )

    def _about_bucket(
        self, name: str, norms: Mapping[str, float], lr: Mapping[str, float]
    ) -> Decision:
        """Return the decision about a bucket; without a reason where there is none to take."""
        current = self.current[name]
        row = self._row(name, norms.get(name, math.nan), current, lr, name)
        if len(self.levels(name)) == 1:
            once = override(self.overrides, name) is not None and not self._epoch
            row.reason = "override" if once else ""  # for the record
            return row
        self.regimes.judge(row, self._unclear([name]), current)
        return row

    def _about_batch(self, norms: Mapping[str, float], lr: Mapping[str, float]) -> list[Decision]:
        if self.growth is None:
            return []
        row = self._row_of_model(BATCH, norms, LOW, lr)
        return self.growth.judge(row, self.regimes, self._unclear(self.current))

    def _about_models(
        self, norms: Mapping[str, float], lr: Mapping[str, float], to_come: int
    ) -> list[Decision]:
        if self.alternation is None:
            return []
        current = HIGH if self.alternation.averaging_models else LOW
        row = self._row_of_model(MODEL, norms, current, lr)
        self.regimes.judge(row, self._unclear(self.current), current)
        wanted = row.level
        if row.reason and self.byte_budget is not None:
            row.level = self.byte_budget.allowed(wanted, to_come)
        if row.level != wanted:
            row.reason = f"{row.reason}, but {OVER}"
        row.compressor = repr((self.low, self.high)[row.level])
        return [row] if row.reason else []

    def _row_of_model(
        self, name: str, norms: Mapping[str, float], level: int, lr: Mapping[str, float]
    ) -> Decision:
        """Return a row of the norm of all gradients and the learning rate that has fallen most."""
        before, norm = self._lr, math.hypot(*norms.values()) if norms else math.nan
        whose = min(lr, key=lambda n: lr[n] / before[n] if before.get(n) else 1.0, default="")
        return self._row(name, norm, level, lr, whose)

    def _row(
        self, name: str, norm: float, level: int, lr: Mapping[str, float], whose: str
    ) -> Decision:
        row = Decision(name, level, self._step, self._epoch, norm=norm)
        row.previous = self.regimes.norms.get(name, math.nan)
        row.lr, row.previous_lr = lr.get(whose, math.nan), self._lr.get(whose, math.nan)
        return row

    def _unclear(self, names: Any) -> bool:
        """Return whether averages of these buckets are no evidence; see `signal`."""
        return self.signal == "reduced" and not self._changed.isdisjoint(names)


def _instance(level: Any) -> Any:
    return level() if isinstance(level, type) and issubclass(level, Compressor) else level
