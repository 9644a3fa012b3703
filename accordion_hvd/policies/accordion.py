"""Accordion: adaptive communication by critical-regime detection (Agarwal et al., MLSys 2021)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, get_args

from accordion_hvd import check
from accordion_hvd.averaging.base import Averaging
from accordion_hvd.compressors.dense import Dense
from accordion_hvd.core.base import Compressor
from accordion_hvd.core.observer import Observer, Observers
from accordion_hvd.policies.base import Decision, Numbers, Seen, Windowed, agree, override
from accordion_hvd.policies.cost_model import averaging_share, bytes_sent
from accordion_hvd.policies.evidence import GradientSums, Signal
from accordion_hvd.policies.gate import Gate, as_gate

if TYPE_CHECKING:
    from accordion_hvd.engine.exchange import Exchange
    from accordion_hvd.engine.layout import Bucket


class Accordion(Windowed):
    """Switches each layer between low and high compression by the critical regimes of training.

    In a *critical regime*, a layer's gradients change quickly, as at the start of training, and
    strong compression costs accuracy. Outside critical regimes it costs little. Accordion detects
    the critical regimes of each layer by gradient norms. A layer is compressed by `low` (mild
    compression: more bytes, less error) in critical regimes and by `high` (strong compression:
    fewer bytes, more error) elsewhere:

    1. Training is divided into windows, normally epochs. In window e, rank 0 adds up its own
       uncompressed gradients of the layer. Let n be the Euclidean norm of that sum, and m the same
       norm `interval` windows earlier. On accelerators, norms of layers above 65,536 elements are
       estimates from a sketch of the sum, with errors of about 2 % (ours: see `GradientSums`).
    2. At the end of windows 0, `interval`, 2 `interval`, ... (the checks), the layer is critical if
       |m - n| / m >= `threshold`, and also if e = 0, if m = 0 or if a norm is not finite.
    3. The decision holds from the next window on, until the next check. Before the first check, all
       layers use `low`.
    4. When the learning rate of a layer falls (see `lr_drop`), the layer is critical until the next
       check.

    This is Algorithm 1 of the paper; item 4 is section (b) of the authors' code. Rank 0 decides for
    all ranks, and all ranks switch at the same step. The new level takes over the residual of the
    old one.

    ```python
    policy = Accordion(low=PowerSGD(4), high=PowerSGD(1))
    optimizer = hvd.DistributedOptimizer(optimizer, compression=policy)
    for epoch in range(epochs):
        train(model, optimizer)
        optimizer.end_window()  # PyTorch only; in Keras a callback does it
    ```

    Three options go further. For the first two, the test of item 2 uses one norm for the entire
    model, the norm of the gradients of all layers together.

    - **Batch size** (the paper's batch mode): `batch_size=(small, large)`. Batches are small until
      the first check that finds no critical regime, and large from then on, even if the learning
      rate falls later. Let r = large / small. One optimizer step then uses the average gradient of
      a large batch and r times the learning rate (linear scaling); users and schedules still see
      the learning rate that they set. The optimizer accumulates the gradients of r small batches,
      unless a data loader gives large batches (`AccordionBatchSampler` in PyTorch,
      `AccordionDataset` in Keras). Windows are counted in small batches in both cases.
    - **Model averaging** (ours): a method that averages models as `high`, such as
      `Accordion(low=Dense(), high=WAGMA(4))`. In critical regimes, all ranks average their
      gradients in each step, compressed by `low`. Elsewhere, each rank takes its own optimizer
      steps, and `high` averages the models. A decision waits for an average over all ranks, so that
      all models are equal when it is made. When the ranks return to averaging gradients, they
      average the optimizer's state (momentum) once, because it differs between ranks.
    - **Bytes** (ours): `budget` caps the bytes that the levels may send.

    Args:
        low: the level of low compression (the paper's l_low), for critical regimes. Leave out both
            levels if the policy switches an optimizer between the optimizer's own stages
            (`hvd.OnebitAdam(policy=Accordion())`), or if only the batch size is to change.
        high: the level of high compression (l_high), for all other regimes; or a method that
            averages models: `WAGMA`, `LocalSGD`, `DiLoCo` or `DPSGD`. `DPSGD` itself never averages
            over all ranks, so the ranks average once at the end of each window.
        threshold: the relative change of the norm that makes a layer critical, at least 0 (the
            paper's eta).
        window: batches (small ones) in a window, as `len(loader)`. In Keras, callbacks set it; in
            PyTorch, pass it or call `optimizer.end_window()` after each epoch.
        interval: windows between checks.
        signal: which gradients are summed. "local": rank 0's own uncompressed gradients, as in the
            paper; this costs rank 0 a pass over them. "reduced": the averaged gradients, which
            every rank has anyway. With "reduced", a window in which a layer's level changed
            is no evidence about the layer, because the new level first sends the residual of the
            old one.
        lr_drop: the learning rate falls if it is at most `lr_drop` times its value one window
            before. None: if it is less than that value (the authors' rule). With None, a schedule
            that lowers the learning rate in every step makes all windows critical.
        overrides: name pattern (as of file names) -> compressor that serves the matching tensors in
            all regimes.
        gate: "auto" or a `Gate`: compress only where compression saves time.
        batch_size: (small, large), numbers of examples over all ranks; large is a multiple of
            small. Data loaders give each rank its part of a small batch.
        budget: MB (10^6 bytes) that a rank may send per small batch, on average over a large batch.
            First, each layer gets its cheapest level. Then layers get the level that the regimes
            call for, those with the largest change of norm first, as long as the budget has room.
            This holds until the next check. If small batches exceed the budget even at the cheapest
            levels, batches are large. With model averaging, if the mode that the regimes call for
            exceeds the budget, the cheaper mode is used. The policy computes the bytes, those of
            `stats()["sent"]`, before training (`cost_model.bytes_sent`); flags (8 bytes per
            message), sparse gradients and decisions are not counted. Ours, not the paper's.

    Attributes:
        history: one `Decision` for each decision and layer, with its evidence. Rows about the batch
            size are named "(batch size)", rows about model averaging "(model)".
        large: whether batches are large from now on.
    """

    watches_rates = True
    KEPT = (*Windowed.KEPT, "_norms", "_changed")

    def __init__(
        self,
        low: Compressor | None = None,
        high: Compressor | None = None,
        *,
        threshold: float = 0.5,
        window: int | None = None,
        interval: int = 10,
        signal: Signal = "local",
        lr_drop: float | None = 0.5,
        overrides: Mapping[str, Compressor] | None = None,
        gate: str | Gate | None = None,
        batch_size: tuple[int, int] | None = None,
        budget: float | None = None,
    ) -> None:
        super().__init__(window)
        self.growth = None if batch_size is None else BatchGrowth(self, batch_size, window)
        self.alternation: Alternation | None = None
        self.byte_budget = None if budget is None else ByteBudget(self, budget)
        self.first: Mapping[str, int] = {}  # bucket -> level at the start, if there is a budget
        self._grows_only = False  # no levels were given: only the batch size changes
        self._norms: dict[str, float] = {}  # at the last check, by the names of decisions
        self._changed: list[str] = []  # buckets whose level changed at the start of the window
        check.mapping(self, "overrides", overrides)
        self.overrides = {key: _instance(value) for key, value in (overrides or {}).items()}
        self.observers = Observers(x for x in (self.growth, self.byte_budget) if x is not None)
        self.gate = as_gate(self, gate)
        check.at_least(self, "threshold", threshold, least=0)
        check.integer(self, "interval", interval, least=1)
        if lr_drop is not None:
            check.ratio(self, "lr_drop", lr_drop)
        check.one_of(self, "signal", signal, get_args(Signal))
        if budget is not None and self.gate is not None:
            check.refuse(self, "gate", gate, "None with a budget, which gates ignore")
        self.threshold, self.interval, self.lr_drop = threshold, interval, lr_drop
        self.signal = signal
        self.evidence = (GradientSums(signal, everywhere=self.growth is not None),)
        self.low: Any = None
        self.high: Any = None
        if low is not None or high is not None:
            self.between(_instance(low), _instance(high))

    def between(self, low: Any, high: Any) -> None:
        """Set the two levels; ValueError if one is missing, or they do not agree."""
        for name, level in (("low", low), ("high", high)):
            if level is None:
                raise ValueError(
                    f"Accordion: {name} is missing; give both levels, for example "
                    "Accordion(low=PowerSGD(4), high=PowerSGD(1))."
                )
        averages = isinstance(high, Averaging)
        if averages:
            self._check_method(high)
        agree(self, [low] if averages or self._grows_only else [low, high], self.overrides)
        as_gate(self, self.gate)  # not every output allows a gate
        self.low, self.high = low, high
        if averages and self.alternation is None:
            self.alternation = Alternation(self, high)
            self.observers = Observers([*self.observers, self.alternation])
            self.evidence = (GradientSums(self.signal, everywhere=True),)

    def _check_method(self, high: Averaging) -> None:
        """Refuse methods that cannot alternate, and arguments that exclude model averaging."""
        if high.inner != "any":
            check.refuse(self, "high", high, "a compressor, WAGMA, LocalSGD, DiLoCo or DPSGD")
        for name, value, allowed in (("gate", self.gate, None), ("signal", self.signal, "local")):
            if value != allowed:
                check.refuse(self, name, value, f"{allowed!r} where high averages models")

    def complete(self) -> None:
        """Check the levels. If only the batch size changes, send all gradients uncompressed.

        Raises:
            ValueError: if there are neither levels nor batch sizes. (An optimizer with stages of
                its own passes these as levels.)
        """
        if self.low is None and self.high is None and self.growth is not None:
            self._grows_only = True
            self.low = self.high = Dense()
        self.between(self.low, self.high)

    @property
    def large(self) -> bool:
        return self.growth is not None and self.growth.large

    def start(self, name: str) -> int:
        """Return `LOW`, because the start of training is critical, unless a budget forbids it."""
        return self.first.get(name, LOW)

    def observing(self) -> bool:
        """Return whether this window ends in a check that may still change a decision."""
        return self._epoch % self.interval == 0 and not (self._grows_only and self.large)

    @property
    def ready(self) -> bool:
        """Return whether all ranks' models are equal, as a decision requires."""
        return self.alternation is None or self.alternation.equal

    def decide(self, seen: Seen, lr: Numbers) -> list[Decision]:
        """Return a row for each bucket with a decision, and in window 0 one for each override."""
        norms = seen.get(GradientSums.key, {})
        rows = [self._decide_bucket(name, norms, lr) for name in self.current]
        rows = [row for row in rows if row.reason]
        batch = self._decide_batch(norms, lr)
        large = self.large or any(row.level == HIGH for row in batch)
        batches = 1 if self.growth is None else self.growth.to_come(large)
        if self.byte_budget is not None:
            self.byte_budget.cap(rows, self.current, batches)
        for row in rows:
            row.compressor = repr(self.levels(row.name)[row.level])
        return rows + batch + self._decide_models(norms, lr, batches)

    def apply(self, decisions: Sequence[Decision]) -> None:
        before, checked = dict(self.current), self._epoch % self.interval == 0
        super().apply([row for row in decisions if row.name not in (BATCH, MODEL)])
        for row in decisions:
            if row.name == BATCH and self.growth is not None:
                self.growth.grow(row.level == HIGH)
                self.history.append(row)
            elif row.name == MODEL and self.alternation is not None:
                self.alternation.switch(row.level)
                self.history.append(row)
        if checked:  # a new dict: a state_dict holds the old one
            norms = {row.name: row.norm for row in decisions if row.reason != CHANGED}
            self._norms = self._norms | norms
        self._changed = sorted(name for name, x in self.current.items() if before[name] != x)

    def on_level_override(self, names: Sequence[str]) -> None:
        """Mark this window's averages as no evidence about these buckets (see `signal`)."""
        self._changed = sorted({*self._changed, *names})

    def state_dict(self) -> dict[str, Any]:
        averaging = self.alternation is not None and self.alternation.averaging_models
        return super().state_dict() | {"large": self.large, "apart": averaging}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        if self.growth is not None:
            self.growth.large = state["large"]
            self.growth.resize()
        if self.alternation is not None:
            self.alternation.averaging_models = state["apart"]
            self.alternation.equal = True  # models are equal whenever they are saved

    def __repr__(self) -> str:
        more = {
            "gate": self.gate,
            "batch_size": self.growth and self.growth.sizes,
            "budget": self.byte_budget and self.byte_budget.megabytes,
        }
        names = ("low", "high", "threshold", "window", "interval", "signal", "lr_drop", "overrides")
        arguments = {name: getattr(self, name) for name in names}
        return self._call(**arguments, **{name: x for name, x in more.items() if x is not None})

    def _decide_bucket(self, name: str, norms: Numbers, lr: Numbers) -> Decision:
        """Return a row about a bucket; its reason is "" if there is nothing to decide."""
        row = self._row(name, self.current[name], norms, lr)
        if len(self.levels(name)) > 1:
            self._judge(row, [name])
        elif override(self.overrides, name) is not None and not self._epoch:
            row.reason = "override"
        return row

    def _decide_batch(self, norms: Numbers, lr: Numbers) -> list[Decision]:
        """Return the decision about the batch size as a list; empty if there is none."""
        if self.growth is None or (self.large and self._epoch):
            return []
        row = self._row(BATCH, LOW, norms, lr)
        if self.large:
            row.level, row.reason = HIGH, OVER
        else:
            self._judge(row, self.current)
        row.compressor = f"{self.growth.sizes[row.level]} examples"
        return [row] if row.reason else []

    def _decide_models(self, norms: Numbers, lr: Numbers, batches: int) -> list[Decision]:
        if self.alternation is None:
            return []
        row = self._row(MODEL, HIGH if self.alternation.averaging_models else LOW, norms, lr)
        self._judge(row, self.current)
        wanted = row.level
        if row.reason and self.byte_budget is not None:
            row.level = self.byte_budget.allowed(wanted, batches)
        if row.level != wanted:
            row.reason = f"{row.reason}, but {OVER}"
        row.compressor = repr((self.low, self.high)[row.level])
        return [row] if row.reason else []

    def _row(self, name: str, level: int, norms: Numbers, lr: Numbers) -> Decision:
        """Return a row about a bucket or the model, with its norm and learning rates.

        Those of the model are the norm of all gradients and the learning rate that fell most.
        """
        bucket, norm, before = name, norms.get(name, math.nan), self._lr
        if name in (BATCH, MODEL):
            norm = math.hypot(*norms.values()) if norms else math.nan
            bucket = min(lr, key=lambda n: lr[n] / before[n] if before.get(n) else 1.0, default="")
        row = Decision(name, level, self._step, self._epoch, norm=norm)
        row.previous = self._norms.get(name, math.nan)
        row.lr, row.previous_lr = lr.get(bucket, math.nan), before.get(bucket, math.nan)
        return row

    def _judge(self, row: Decision, buckets: Iterable[str]) -> None:
        """Fill in a row whose window ends in a check, or whose learning rate falls after it.

        The norm is no evidence if it is one of averages, and the level of one of the `buckets`
        changed at the start of the window: the averages then contain the residual of the old level.
        """
        if self._epoch % self.interval == 0:
            unclear = self.signal == "reduced" and not set(self._changed).isdisjoint(buckets)
            self._compare(row, unclear)
        if row.lr < row.previous_lr:
            if self.lr_drop is None or row.lr <= self.lr_drop * row.previous_lr:
                row.level, row.reason = LOW, FELL

    def _compare(self, row: Decision, unclear: bool) -> None:
        """Judge a row by the change of the norm; if that is `unclear`, its level remains."""
        norm, previous = row.norm, row.previous
        if row.window == 0:
            row.level, row.reason = LOW, "first window"
        elif unclear:
            row.reason = CHANGED
        elif not (math.isfinite(norm) and math.isfinite(previous)):
            row.level, row.reason = LOW, "norm not finite"
        elif previous == 0:
            row.level, row.reason = LOW, "previous norm was zero"
        else:
            row.change = abs(previous - norm) / previous
            critical = row.change >= self.threshold
            row.level = LOW if critical else HIGH
            row.reason = "norm changed" if critical else "norm steady"


def _instance(level: Any) -> Any:
    return level() if isinstance(level, type) and issubclass(level, Compressor) else level


LOW, HIGH = 0, 1
"""Levels of low compression, for critical regimes, and of high compression."""

CHANGED = "level changed in this window"
FELL = "learning rate fell"


# ----------------------------------------------------------------------------------- a cap on bytes
MEGABYTE = 1e6
OVER = "over the budget"

Levels = Mapping[str, int]
Prices = Mapping[str, Sequence[float]]
"""Bucket -> bytes that a rank sends for it at each level."""


class ByteBudget(Observer):
    """Caps the bytes of an exchange, on average over its small batches.

    The cap also sets the policy's `first`, `growth` and `alternation`.
    """

    def __init__(self, policy: Accordion, megabytes: float) -> None:
        if not (check.is_number(megabytes) and megabytes > 0):
            check.refuse(policy, "budget", megabytes, "a number above 0 (MB a step), or None")
        self.policy, self.megabytes = policy, megabytes
        self._prices: Prices = {}
        self._exempt = 0.0  # bytes per exchange of the buckets exempt from the policy
        self._models = 0.0  # bytes per step while models are averaged

    def extending(self, exchange: Exchange, buckets: Sequence[Bucket]) -> None:
        """Compute the bytes of each level; refuse tensors that exceed the budget at all levels."""
        ranks, prices, exempt, models = exchange.communicator.size, {}, 0.0, 0.0
        for bucket in buckets:
            levels = self.policy.choices(bucket)
            sent = [bytes_sent(level, bucket.shape, bucket.dtype, ranks) for level in levels]
            if bucket.compress:
                prices[bucket.name] = sent
            else:
                exempt += sent[0]
        if self.policy.alternation is not None:
            dense = sum(bucket.dense_bytes for bucket in buckets)
            models = averaging_share(self.policy.alternation.method, ranks) * dense
        self.price(prices, exempt, models)

    def price(self, levels: Prices, rest: float, models: float = 0.0) -> None:
        """Set the bytes that an exchange sends; equal on all ranks.

        Args:
            levels: bucket -> bytes that a rank sends for it at each level.
            rest: bytes of the buckets exempt from the policy.
            models: mean bytes per step while models are averaged instead.

        Raises:
            ValueError: if even the cheapest levels exceed the budget.
        """
        self._prices, self._exempt, self._models = levels, rest, models
        growth, alternation = self.policy.growth, self.policy.alternation
        most = 1 if growth is None else growth.ratio
        least = self._least() if alternation is None else min(self._least(), models)
        if least > self._room(most):
            megabytes = f"{math.ceil(least / most) / MEGABYTE:g}"
            allowed = f"at least {megabytes}, the MB that the cheapest levels send, or None"
            check.refuse(self.policy, "budget", self.megabytes, allowed)
        if growth is not None and least > self._room(1):
            growth.grow(True)
        now = self.policy.observers.weight
        self.policy.first = self._affordable(dict.fromkeys(levels, LOW), {}, now)
        if alternation is not None and not self.policy.steps:
            alternation.averaging_models = self.allowed(LOW, now) == HIGH

    def cap(self, rows: Sequence[Decision], current: Levels, batches: int) -> None:
        """Replace the levels of `rows` that exceed the budget by cheaper ones.

        Buckets without a row keep their `current` level. `batches` is the number of small batches
        in each of the next exchanges.
        """
        if not rows:
            return
        wanted = dict(current) | {row.name: row.level for row in rows}
        urgency = {row.name: 1e300 if math.isnan(row.change) else row.change for row in rows}
        chosen = self._affordable(wanted, urgency, batches)
        for row in rows:
            if row.level != chosen[row.name]:
                row.level, row.reason = chosen[row.name], f"{row.reason}, but {OVER}"

    def allowed(self, wanted: int, batches: int) -> int:
        """Return `wanted` (LOW: gradients, HIGH: models) if affordable, else the cheaper mode."""
        costs = self._least(), self._models
        cheaper = LOW if costs[LOW] <= costs[HIGH] else HIGH
        return wanted if costs[wanted] <= self._room(batches) else cheaper

    def _affordable(self, wanted: Levels, urgency: Numbers, batches: int) -> dict[str, int]:
        return affordable(wanted, self._prices, urgency, self._room(batches) - self._exempt)

    def _least(self) -> float:
        return self._exempt + sum(map(min, self._prices.values()))

    def _room(self, batches: int) -> float:
        return self.megabytes * MEGABYTE * batches


def affordable(wanted: Levels, prices: Prices, urgency: Numbers, room: float) -> dict[str, int]:
    """Return the wanted levels as far as the budget allows, otherwise the cheapest ones.

    Every bucket starts at its cheapest level. Then buckets get their wanted level, the most urgent
    first (a missing urgency is the largest), as long as there is `room` for the bytes of all
    buckets.
    """
    chosen = {}
    for name, level in wanted.items():  # the wanted level if none is cheaper
        chosen[name] = min((level, *range(len(prices[name]))), key=prices[name].__getitem__)
    room -= sum(prices[name][level] for name, level in chosen.items())
    for name in sorted(wanted, key=lambda name: -urgency.get(name, math.inf)):
        more = prices[name][wanted[name]] - prices[name][chosen[name]]
        if more <= room:
            chosen[name] = wanted[name]
            room -= more
    return chosen


# ------------------------------------------------------------------------- growth of the batch size
BATCH = "(batch size)"
"""Name of decisions about the batch size."""


class BatchGrowth(Observer):
    """Switches a training from small to large batches, once.

    Attributes:
        large: whether batches are large from now on.
        micro_batches: number of small batches in the current exchange, which is also the factor of
            the learning rate in its step.
        loader: whether a data loader gives batches of these sizes. Otherwise, the optimizer
            accumulates small batches.
    """

    decides_ahead = True
    needed_alone = True

    def __init__(self, owner: Accordion, sizes: Any, window: int | None) -> None:
        pair = tuple(sizes) if isinstance(sizes, (tuple, list)) else ()
        if len(pair) != 2 or not all(check.is_integer(size) and size >= 1 for size in pair):
            check.refuse(owner, "batch_size", sizes, "two positive integers such as (512, 4096)")
        small, large = int(pair[0]), int(pair[1])
        if small > large or large % small:
            allowed = "(small, large), where large is a multiple of small"
            check.refuse(owner, "batch_size", sizes, allowed)
        self.owner, self.sizes, self.ratio = type(owner).__name__, (small, large), large // small
        if window is not None and window < self.ratio:
            least = f"at least {self.ratio}, the number of small batches in a large one"
            check.refuse(owner, "window", window, f"{least}, with batch_size={self.sizes}")
        self.large = self.loader = False
        self.micro_batches = 1

    @property
    def weight(self) -> int:  # type: ignore[override]
        return self.micro_batches

    @property
    def accumulated(self) -> int:  # type: ignore[override]
        return 1 if self.loader else self.micro_batches

    def share(self, ranks: int) -> int:
        """Return the examples of a small batch on each rank; ValueError if that is no integer."""
        if self.sizes[0] % ranks:
            allowed = f"multiples of {ranks}, the number of ranks"
            check.refuse(self.owner, "batch_size", self.sizes, allowed)
        return self.sizes[0] // ranks

    def resize(self) -> None:
        """Apply the size that `large` calls for to the batches from now on."""
        self.micro_batches = self.ratio if self.large else 1

    def grow(self, large: bool) -> None:
        """Set whether batches are to be large; a data loader applies the change by `resize`."""
        self.large = large
        if not self.loader:
            self.resize()

    def to_come(self, large: bool) -> int:
        """Return the small batches in each next exchange, if batches are or become `large`."""
        return self.ratio if large and not self.loader else self.micro_batches

    def stats(self) -> dict[str, Any]:
        return {"batch_size": self.sizes[0] * self.micro_batches}

    def agreement(self) -> str:
        return f"loader={self.loader}"


# --------------------------------------------------------------------- switching to averaged models
MODEL = "(model)"
"""Name of decisions about model averaging."""


class Alternation(Observer):
    """Switches between averaging gradients in each step and averaging models by `method`.

    The windows of `policy`, which decides, last until the models are equal.

    Attributes:
        averaging_models: whether the ranks average models now, so that models may differ.
        mode_changed: whether `averaging_models` has changed since `take_mode_change` was called.
        equal: whether the models of all ranks are equal now; no decision is due while they differ.
            The model averager keeps this attribute up to date.
    """

    decides_ahead = True
    every_step = True

    def __init__(self, policy: Accordion, method: Averaging) -> None:
        self.policy, self.method = policy, method
        self.averaging_models = self.mode_changed = False
        self.equal = True

    @property
    def withholds(self) -> bool:  # type: ignore[override]
        return self.averaging_models

    @property
    def over(self) -> bool:
        """Return whether a window has ended, so that the ranks must make their models equal."""
        return self.policy.over

    def switch(self, level: int) -> None:
        """Average models (HIGH) or gradients (LOW) from now on."""
        self.mode_changed |= self.averaging_models != (level == HIGH)
        self.averaging_models = level == HIGH

    def take_mode_change(self) -> bool:
        """Return whether `averaging_models` has changed since the last call."""
        changed, self.mode_changed = self.mode_changed, False
        return changed
