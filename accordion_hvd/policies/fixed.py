"""Policies that look at no gradient: one compressor, schedules of epochs, a warm-up, a replay."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from accordion_hvd import averaging, check, compressors
from accordion_hvd.compressors.dense import FP16, Dense
from accordion_hvd.compressors.powersgd import PowerSGD
from accordion_hvd.compressors.scalecom import ScaleCom
from accordion_hvd.core import spec_strings
from accordion_hvd.core.base import Compressor, Private
from accordion_hvd.core.observer import Observers
from accordion_hvd.policies import base
from accordion_hvd.policies.base import Decision, Numbers, Policy, Seen, Windowed, agree, override
from accordion_hvd.policies.evidence import StateNorms
from accordion_hvd.policies.gate import Gate, as_gate


class Fixed(Policy):
    """Uses one compressor throughout; `compression=TopK(0.01)` means `Fixed(TopK(0.01))`.

    Args:
        compressor: the compressor of every bucket.
        overrides: name pattern -> compressor that serves the matching tensors instead, in messages
            of their own. `Fixed(LGC(), overrides={"fc*": TopK(0.001)})` sends layer `fc` by top-k.
        gate: "auto" or a `Gate`: compress only where compression saves time.
    """

    fixed = True

    def __init__(
        self,
        compressor: Compressor,
        *,
        overrides: Mapping[str, Compressor] | None = None,
        gate: str | Gate | None = None,
    ) -> None:
        super().__init__()
        self.compressor = compressor
        check.mapping(self, "overrides", overrides)
        self.overrides = dict(overrides or {})
        agree(self, [compressor], self.overrides)
        self.gate = as_gate(self, gate)
        if isinstance(compressor, Private):
            if gate is not None:
                check.refuse(self, "gate", gate, f"None: {compressor!r} is private")
            self.observers = Observers([compressor.accountant(self)])

    def levels(self, name: str) -> tuple[Compressor, ...]:
        return (override(self.overrides, name) or self.compressor,)

    def __repr__(self) -> str:
        more = {"overrides": self.overrides, "gate": self.gate}
        return self._call(self.compressor, **{name: value for name, value in more.items() if value})


class Serving(Policy):
    """One compressor for each bucket of a side exchange (`engine.rehearsal`).

    Args:
        policy: policy of the job's exchange.
        served: bucket -> its compressor.
        usual: the compressor of all other buckets; default: that of the first in `served`.
    """

    fixed = True

    def __init__(
        self, policy: Policy, served: Mapping[str, Compressor], usual: Compressor | None = None
    ) -> None:
        super().__init__()
        self._served, self._usual = served, usual or next(iter(served.values()), Dense())
        self.scope, self.plain = self._usual.scope, policy.plain
        if usual is None:
            self.scope, self.scopes = policy.scope, policy.scopes

    def levels(self, name: str) -> tuple[Compressor, ...]:
        return (self._served.get(name, self._usual),)


def alternatives(served: Iterable[Compressor], more: Iterable[Compressor]) -> list[Compressor]:
    """Return compressors to compare with those that serve now; `more` are among them.

    They are fp32, fp16 and, where no other compressor serves, `PowerSGD(4)`.
    """
    names = {repr(x) for x in served}
    usual = [Dense(), FP16(), *([PowerSGD(4)] if names <= PLAIN else [])]
    found = {repr(x): x for x in (*usual, *more)}
    return [x for name, x in found.items() if names != {name}]


PLAIN = {"Dense()", "FP16()", "BF16()"}


class StepSchedule(Windowed):
    """Changes the compressor of all layers at given windows (epochs), whatever the gradients are.

    `StepSchedule({0: PowerSGD(4), 30: PowerSGD(1)})` uses `PowerSGD(4)` in epochs 0 to 29. With
    `window=1`, the keys are optimizer steps.

    Args:
        schedule: window (counted from 0) -> compressor from the start of that window on; must have
            a key 0.
        window: batches in a window. In Keras, callbacks set it; in PyTorch, pass it or call
            `optimizer.end_window()` after each epoch.

    Attributes:
        history: one row per change and layer.
    """

    def __init__(self, schedule: Mapping[int, Compressor], *, window: int | None = None) -> None:
        super().__init__(window)
        if not isinstance(schedule, Mapping) or 0 not in schedule:
            allowed = "a dict with a key 0, such as {0: PowerSGD(4), 30: PowerSGD(1)}"
            check.refuse(self, "schedule", schedule, allowed)
        for key in schedule:
            check.integer(self, "a key of schedule", key, least=0)
        self.schedule = {key: schedule[key] for key in sorted(schedule)}
        agree(self, list(self.schedule.values()))

    def start(self, name: str) -> int:
        return self._level_in(self._epoch)

    def due(self, lr: Numbers) -> bool:
        """Return whether a window has ended and the next one changes the compressor."""
        return super().due(lr) and self._epoch + 1 in self.schedule

    def decide(self, seen: Seen, lr: Numbers) -> list[Decision]:
        level = self._level_in(self._epoch + 1)
        common = level, self._step, self._epoch, repr(self._levels[level]), "schedule"
        return [Decision(name, *common, lr=lr[name]) for name in self.current]

    def __repr__(self) -> str:
        return self._call(self.schedule, window=self.window)

    def _level_in(self, window: int) -> int:
        return sum(1 for key in self.schedule if key <= window) - 1


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
        if not (isinstance(first, (list, tuple)) and all(isinstance(x, str) for x in first)):
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

    def decide(self, seen: Seen, lr: Numbers) -> list[Decision]:
        """Return a row per layer that is compressed from now on."""
        return [
            replace(row, compressor=repr(self.levels(row.name)[row.level]))
            for row in super().decide(seen, lr)
            if row.level < len(self.levels(row.name))
        ]

    def __repr__(self) -> str:
        options = {"large_batch": self.large_batch, "dense": self.dense, "window": self.window}
        return self._call(self.first, self.flops, **options)


STABLE = 0.96
LOOKS = 10
"""Number of checks of the variance's norm per time constant of the variance."""


class WarmUp(Policy):
    """Switches all tensors from an optimizer's first stage to its second, once.

    With "auto", the first stage ends when the variance is stable (after 1-bit Adam). Let
    D = 1 / (1 - b2) steps be the time constant of the variance v, and a and b the sums |v|_1 now
    and D steps ago. The first stage ends if min(a, b) / max(a, b) >= 0.96, if at least 2 D steps
    have been taken, and if no learning rate has risen in the last D steps. (The paper tests b / a
    alone, which is true too early while v falls.) Rank 0 decides for all ranks; it checks every D /
    10 steps (ours).

    A tensor that is added later has a first stage of its own, of as many steps; with "auto", of 2 D
    steps (ours).

    Args:
        first: the first, dense stage.
        then: the second stage.
        steps: number of steps of the first stage, skipped ones included; or "auto".
    """

    evidence = (StateNorms("v"),)
    KEPT = ("_step", "_done", "_sums", "_lr", "_late")

    def __init__(self, first: Any, then: Any, steps: int | str = "auto") -> None:
        super().__init__()
        if steps != "auto":
            check.integer(self, "steps", steps, least=0)
        self.first, self.then, self.steps = first, then, steps
        agree(self, [first, then])
        if not hasattr(then, "betas"):
            check.refuse(self, "then", then, "an update rule with betas, such as OnebitAdam()")
        self._span = max(LOOKS, round(1 / (1 - then.betas[1])))
        self._done = steps == 0
        self._sums: list[float] = []  # |v|_1 at the last checks
        self._lr: list[dict[str, float]] = []  # learning rates at the last checks
        self._late: dict[str, int] = {}  # tensors in first stages of their own -> the last step

    def levels(self, name: str) -> tuple[Compressor, ...]:
        return self._levels

    def start(self, name: str) -> int:
        """Return 0, the first stage; 1 if it has no steps."""
        if self._step > 0 and self.steps != 0:
            own = 2 * self._span if self.steps == "auto" else int(self.steps)
            self._late[name] = self._step + own
        return int(self.steps == 0)

    def due(self, lr: Numbers) -> bool:
        """Return whether the first stage is over, or with "auto" whether a check is due."""
        if self._done or self._step in self._late.values():
            return self._step in self._late.values()
        if self.steps == "auto":
            return self._step > 0 and self._step % (self._span // LOOKS) == 0
        return self._step == self.steps

    def decide(self, seen: Seen, lr: Numbers) -> list[Decision]:
        """Return a row per tensor; `norm` is the tensor's |v|_1."""
        norms, reason = seen.get(StateNorms.key, {}), ""
        late = [name for name, last in self._late.items() if last == self._step]
        names = late or [name for name in self.current if name not in self._late]
        if late:
            reason = "late"
        elif self.steps != "auto":
            reason = f"{self.steps} steps"
        elif len(self._sums) >= LOOKS and self._step >= 2 * self._span:
            total, before = sum(norms.get(name, 0.0) for name in names), self._sums[-LOOKS]
            largest = max(total, before)
            steady = largest > 0 and min(total, before) / largest >= STABLE
            rising = any(lr[name] > rates.get(name, lr[name]) for rates in self._lr for name in lr)
            if steady and not rising:
                reason = "variance stable"
        level = int(bool(reason))
        common = level, self._step, 0, repr(self._levels[level]), reason
        return [Decision(name, *common, norms.get(name, 0.0), lr=lr[name]) for name in names]

    def apply(self, decisions: Any) -> None:
        """Switch to the second stage if that was decided; else store the sums of this check."""
        late = any(self._late.pop(row.name, None) for row in decisions)
        self._done |= not late and any(row.level for row in decisions)
        if late or self._done or not decisions:
            super().apply(decisions)
            return
        self._sums = [*self._sums[1 - LOOKS :], sum(row.norm for row in decisions)]
        self._lr = [*self._lr[1 - LOOKS :], {row.name: row.lr for row in decisions}]

    def __repr__(self) -> str:
        return self._call(self.first, self.then, steps=self.steps)


# --------------------------------------------------------------------- replay of recorded decisions
class Replay(Policy):
    """Repeats the decisions of a `history`, each at its recorded step, whatever the gradients are.

    Before the first decision about a layer, the compressor of the layer's first row serves it; with
    Accordion, that is the mild level.

    Args:
        history: rows as in `Accordion.history`, or the path of a JSON file with such rows, as
            `accordion-hvd inspect --output` writes it. Only step, name and compressor are used.

    Raises:
        ValueError: if the file cannot be read, the history is empty, or a row lacks a key or is not
            about a layer.
    """

    KEPT = ("_step",)

    def __init__(self, history: Iterable[Any] | str | os.PathLike[str]) -> None:
        super().__init__()
        given: Any = history
        if isinstance(history, str | os.PathLike):
            given = self._load(Path(history))
        try:
            rows = [dict(row) for row in given]
        except (TypeError, ValueError):
            check.refuse(self, "history", history, "a list of rows as in Accordion.history")
        for row in rows:
            for key in ("step", "name", "compressor"):
                if key not in row:
                    raise ValueError(f"Replay: row {row!r} has no {key!r}; give Accordion.history.")
            if row["name"] in ("(batch size)", "(model)"):
                raise ValueError(
                    f"Replay: row {row!r} is about batch sizes or model averaging, which Replay "
                    "cannot repeat; leave such rows out."
                )
        if not rows:
            raise ValueError("Replay: the history is empty; give Accordion.history of a run.")
        self._rows = base.read([{"level": 0, **row} for row in rows])
        self._served: dict[str, list[Compressor]] = {}  # compressors of each layer
        table = spec_strings.table(compressors, averaging)
        for decided in self._rows:
            levels = self._served.setdefault(decided.name, [])
            level = spec_strings.parse(decided.compressor, table)
            if level not in levels:
                levels.append(level)
            decided.level = levels.index(level)
        agree(self, [level for levels in self._served.values() for level in levels])

    def _load(self, path: Path) -> Any:
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            allowed = f"a list of rows, or the path of a JSON file with such a list ({error})"
            check.refuse(self, "history", str(path), allowed)

    def levels(self, name: str) -> tuple[Compressor, ...]:
        """Return the compressors that served in the recorded run; ValueError if it has no row."""
        if name not in self._served:
            known = ", ".join(sorted(self._served))
            raise ValueError(f"Replay: the history has no layer {name!r}; it has {known}.")
        return tuple(self._served[name])

    def tick(self, lr: Numbers) -> None:
        """Count the backward passes of the exchange that is about to begin, as rows do."""
        self._step += self.passes

    def due(self, lr: Numbers) -> bool:
        return any(self._is_next(row) for row in self._rows)

    def decide(self, seen: Seen, lr: Numbers) -> list[Decision]:
        return [row for row in self._rows if self._is_next(row) and row.name in self.current]

    def _is_next(self, row: Decision) -> bool:
        return self._step - self.passes < row.step <= self._step

    def __repr__(self) -> str:
        return f"Replay(<{len(self._rows)} rows>)"
