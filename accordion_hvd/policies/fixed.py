"""Policies that look at no gradient: one compressor, a schedule of epochs, a warm-up."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from accordion_hvd import averaging, check, compressors
from accordion_hvd.core import spec_strings
from accordion_hvd.core.base import Compressor
from accordion_hvd.core.observer import Observers
from accordion_hvd.policies import base
from accordion_hvd.policies.base import Decision, Policy, Seen, Windowed, agree
from accordion_hvd.policies.evidence import StateNorms
from accordion_hvd.policies.gate import Gate, as_gate
from accordion_hvd.policies.privacy_accountant import PrivacyAccountant


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
        if compressor.private:
            if gate is not None:
                check.refuse(self, "gate", gate, f"None: {compressor!r} is private")
            self.observers = Observers([PrivacyAccountant(self, compressor)])

    def levels(self, name: str) -> tuple[Compressor, ...]:
        return (override(self.overrides, name) or self.compressor,)

    def state_dict(self) -> dict[str, Any]:
        budget = self.compressor.budget
        return super().state_dict() | (budget.state_dict() if budget is not None else {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore from `state_dict`; privacy that was spent later stays spent."""
        super().load_state_dict(state)
        if self.compressor.budget is not None:
            self.compressor.budget.load_state_dict(state)

    def __repr__(self) -> str:
        more = f", overrides={self.overrides!r}" if self.overrides else ""
        more += f", gate={self.gate!r}" if self.gate else ""
        return f"Fixed({self.compressor!r}{more})"


def override(overrides: Mapping[str, Compressor], name: str) -> Compressor | None:
    """Return the compressor of the first pattern that a bucket's first tensor matches.

    The bucket's name is such as "fc.weight", or "fc.weight+2" for three tensors.
    """
    tensor, plus, others = name.rpartition("+")
    pattern = check.first_match(tensor if plus and others.isdigit() else name, overrides)
    return None if pattern is None else overrides[pattern]


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

    def levels(self, name: str) -> tuple[Compressor, ...]:
        return tuple(self.schedule.values())

    def start(self, name: str) -> int:
        return self._level_in(self._epoch)

    def due(self, lr: Mapping[str, float]) -> bool:
        """Return whether a window has ended and the next one changes the compressor."""
        return super().due(lr) and self._epoch + 1 in self.schedule

    def decide(self, seen: Seen, lr: Mapping[str, float]) -> list[Decision]:
        level = self._level_in(self._epoch + 1)
        common = level, self._step, self._epoch, repr(self.levels("")[level]), "schedule"
        return [Decision(name, *common, lr=lr[name]) for name in self.current]

    def __repr__(self) -> str:
        return f"StepSchedule({self.schedule!r}, window={self.window!r})"

    def _level_in(self, window: int) -> int:
        return sum(1 for key in self.schedule if key <= window) - 1


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
        self._step = 0  # exchanges so far
        self._done = steps == 0
        self._sums: list[float] = []  # |v|_1 at the last checks
        self._lr: list[dict[str, float]] = []  # learning rates at the last checks
        self._late: dict[str, int] = {}  # tensors in first stages of their own -> the last step

    def levels(self, name: str) -> tuple[Compressor, ...]:
        return self.first, self.then

    def start(self, name: str) -> int:
        """Return 0, the first stage; 1 if it has no steps."""
        if self._step > 0 and self.steps != 0:
            own = 2 * self._span if self.steps == "auto" else int(self.steps)
            self._late[name] = self._step + own
        return int(self.steps == 0)

    def due(self, lr: Mapping[str, float]) -> bool:
        """Return whether the first stage is over, or with "auto" whether a check is due."""
        if self._done or self._step in self._late.values():
            return self._step in self._late.values()
        if self.steps == "auto":
            return self._step > 0 and self._step % (self._span // LOOKS) == 0
        return self._step == self.steps

    def tick(self, lr: Mapping[str, float]) -> None:
        self._step += 1

    def decide(self, seen: Seen, lr: Mapping[str, float]) -> list[Decision]:
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
            if steady and not self._rising(lr):
                reason = "variance stable"
        level = int(bool(reason))
        common = level, self._step, 0, repr(self.levels("")[level]), reason
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
        return f"WarmUp({self.first!r}, {self.then!r}, steps={self.steps!r})"

    def _rising(self, lr: Mapping[str, float]) -> bool:
        return any(lr[name] > rates.get(name, lr[name]) for rates in self._lr for name in lr)


# --------------------------------------------------------------------- replay of recorded decisions
class Replay(Policy):
    """Repeats the decisions of a `history`, each at its recorded step, whatever the gradients are.

    Before the first decision about a layer, the compressor of the layer's first row serves it; with
    Accordion, that is the mild level.

    Args:
        history: rows as in `Accordion.history`, or the path of a JSON file with such rows, as
            `accordion-hvd replay --output` writes it. Only step, name and compressor are used.

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
        self._levels: dict[str, list[Compressor]] = {}
        for decided in self._rows:
            levels = self._levels.setdefault(decided.name, [])
            level = _read(decided.compressor)
            if level not in levels:
                levels.append(level)
        agree(self, [level for levels in self._levels.values() for level in levels])
        self._step = 0

    def _load(self, path: Path) -> Any:
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            allowed = f"a list of rows, or the path of a JSON file with such a list ({error})"
            check.refuse(self, "history", str(path), allowed)

    def levels(self, name: str) -> tuple[Compressor, ...]:
        """Return the compressors that served in the recorded run; ValueError if it has no row."""
        if name not in self._levels:
            known = ", ".join(sorted(self._levels))
            raise ValueError(f"Replay: the history has no layer {name!r}; it has {known}.")
        return tuple(self._levels[name])

    def due(self, lr: Mapping[str, float]) -> bool:
        return any(row.step == self._step for row in self._rows)

    def decide(self, seen: Seen, lr: Mapping[str, float]) -> list[Decision]:
        now = [row for row in self._rows if row.step == self._step and row.name in self.current]
        return [replace(r, level=self._levels[r.name].index(_read(r.compressor))) for r in now]

    def tick(self, lr: Mapping[str, float]) -> None:
        self._step += 1

    def __repr__(self) -> str:
        return f"Replay(<{len(self._rows)} rows>)"


def _read(text: str) -> Compressor:
    return spec_strings.parse(text, spec_strings.table(compressors, averaging))
