"""The same decisions again, without their cost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from accordion_hvd import averaging, compressors
from accordion_hvd.core import spec_strings
from accordion_hvd.core.base import Compressor
from accordion_hvd.policies import decision
from accordion_hvd.policies.base import Policy, Seen, agree
from accordion_hvd.policies.decision import Decision


class Replay(Policy):
    """Repeat the decisions of a `history`, each at its step, whatever the gradients are.

    A layer's level before its first decision is the one that Accordion starts with, the mild one:
    that of the first row about it.

    Args:
        history: rows as in `Accordion.history` (a list, or rows read from JSON); used are step,
            name and compressor.

    Raises:
        ValueError: the history is empty or a row lacks a key.
    """

    KEPT = ("_step",)

    def __init__(self, history: Iterable[Any]) -> None:
        super().__init__()
        rows = [dict(row) for row in history]
        for row in rows:
            for key in ("step", "name", "compressor"):
                if key not in row:
                    raise ValueError(f"Replay: row {row!r} has no {key!r}; give Accordion.history.")
            if row["name"] in ("(batch size)", "(model)"):
                raise ValueError(
                    f"Replay: row {row!r} is about batch sizes or averages of models, which are "
                    "not repeated; leave such rows out."
                )
        if not rows:
            raise ValueError("Replay: the history is empty; give Accordion.history of a run.")
        self._rows = decision.read([{"level": 0, **row} for row in rows])
        self._levels: dict[str, list[Compressor]] = {}
        for made in self._rows:
            known, level = self._levels.setdefault(made.name, []), _read(made.compressor)
            if level not in known:
                known.append(level)
        agree(self, [level for known in self._levels.values() for level in known])
        self._step = 0

    def levels(self, name: str) -> tuple[Compressor, ...]:
        """Return the compressors that served the layer in the recorded run.

        Raises:
            ValueError: the history does not know the layer.
        """
        if name not in self._levels:
            known = ", ".join(sorted(self._levels))
            raise ValueError(f"Replay: the history has no layer {name!r}; it has {known}.")
        return tuple(self._levels[name])

    def due(self, lr: Mapping[str, float]) -> bool:
        """Return whether the recorded run decided at this step."""
        return any(row.step == self._step for row in self._rows)

    def decide(self, seen: Seen, lr: Mapping[str, float]) -> list[Decision]:
        """Return the recorded rows of this step."""
        now = [row for row in self._rows if row.step == self._step and row.name in self.current]
        return [replace(r, level=self._levels[r.name].index(_read(r.compressor))) for r in now]

    def tick(self, lr: Mapping[str, float]) -> None:
        """Count an exchange."""
        self._step += 1

    def __repr__(self) -> str:
        """Return the length of the recorded run in a constructor call."""
        return f"Replay(<{len(self._rows)} rows>)"


def _read(text: str) -> Compressor:
    return spec_strings.parse(text, spec_strings.table(compressors, averaging))
