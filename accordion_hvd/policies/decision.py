"""The decisions of policies."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any


@dataclass(eq=False)
class Decision(Mapping[str, Any]):
    """One decision about one bucket, about the batch or about averaging models.

    It reads as a mapping, too: `row["level"]` is `row.level`, and `dict(row)` has all fields.

    Attributes:
        name: the bucket's; "(batch size)" and "(model)" for decisions about the whole model.
        level: index of the chosen level.
        step: exchanges before it; batches, where an exchange has several.
        window: windows before it.
        compressor: the level as it is written.
        reason: in words.
        norm: the evidence that was judged, such as the norm of a window's gradients.
        previous: what it was compared with.
        change: the relative change.
        lr: the learning rate of the next step.
        previous_lr: the learning rate when the window began.
        ratio: mean over deviation of the gradients (`AdaQS`).
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

    def __getitem__(self, key: str) -> Any:
        return vars(self)[key]

    def __iter__(self) -> Iterator[str]:
        return iter(vars(self))

    def __len__(self) -> int:
        return len(vars(self))


def plain(decisions: Iterable[Decision]) -> list[dict[str, Any]]:
    """Return decisions as dicts that JSON can hold."""
    return [dict(decision) for decision in decisions]


def read(rows: Iterable[Mapping[str, Any]]) -> list[Decision]:
    """Return the decisions of such dicts, in which fields at their defaults may be missing."""
    known = {field.name for field in fields(Decision)}
    return [Decision(**{k: v for k, v in row.items() if k in known}) for row in map(dict, rows)]
