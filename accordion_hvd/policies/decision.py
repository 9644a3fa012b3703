"""The decisions of policies."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any


@dataclass(eq=False)
class Decision(Mapping[str, Any]):
    """One decision about a bucket, the batch size or model averaging.

    A decision is also a mapping: `row["level"]` is `row.level`, and `dict(row)` has all fields.

    Attributes:
        name: name of the bucket; "(batch size)" or "(model)" for a decision about the entire model.
        level: index of the chosen level.
        step: number of exchanges before the decision; of small batches if an exchange has several.
        window: number of windows that ended before the current one.
        compressor: the chosen level as text.
        reason: reason of the decision in a few words.
        norm: the evidence, such as the norm of the sum of a window's gradients.
        previous: the value with which `norm` was compared (`AdaQS`: `ratio`).
        change: the relative change from `previous`.
        lr: learning rate of the next step.
        previous_lr: learning rate at the start of the window.
        ratio: mean over standard deviation of the gradients (`AdaQS`).
        efficiency: progress of a step relative to an uncompressed one (`Goodput`).
        weight: weight of `efficiency` in a mean over buckets (`Goodput`).
    """

    name: str
    level: int
    step: int = 0
    window: int = 0
    compressor: str = ""
    reason: str = ""
    norm: float = math.nan
    previous: float = math.nan
    change: float = math.nan
    lr: float = math.nan
    previous_lr: float = math.nan
    ratio: float = math.nan
    efficiency: float = math.nan
    weight: float = math.nan

    def __getitem__(self, key: str) -> Any:
        return vars(self)[key]

    def __iter__(self) -> Iterator[str]:
        return iter(vars(self))

    def __len__(self) -> int:
        return len(vars(self))


def plain(decisions: Iterable[Decision]) -> list[dict[str, Any]]:
    """Return decisions as dicts for JSON."""
    return [dict(decision) for decision in decisions]


def read(rows: Iterable[Mapping[str, Any]]) -> list[Decision]:
    """Return decisions from dicts; missing fields get their defaults, unknown ones are ignored."""
    known = {field.name for field in fields(Decision)}
    return [Decision(**{k: v for k, v in row.items() if k in known}) for row in map(dict, rows)]
