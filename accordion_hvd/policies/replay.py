"""Replay of recorded decisions, without the cost of the evidence."""

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
from accordion_hvd.policies import decision
from accordion_hvd.policies.base import Policy, Seen, agree
from accordion_hvd.policies.decision import Decision


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
        self._rows = decision.read([{"level": 0, **row} for row in rows])
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
