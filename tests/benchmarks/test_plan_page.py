"""Tests of the page about predictions: their errors in cells with known times."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

from benchmarks.plan import page
from benchmarks.plan.cells import METHODS, all_cells, held_out

FASTEST = "ours powersgd:1"


def compared(off: float = 1.0, wrong: tuple[str, ...] = ()) -> list[Any]:
    """Return all cells, with compression that pays and interfaces that count 2 % more bytes.

    Predictions are `off` times the measurement; in the cells `wrong`, 1 ms is predicted for dense.
    """
    found = []
    for cell in all_cells():
        ms = {name: 100.0 + 10 * i for i, name in enumerate(METHODS)} | {FASTEST: 50.0}
        guess = {name: off * x for name, x in ms.items()}
        if cell.name in wrong:
            guess["ours dense"] = 1.0
        rows = [{"method": name, "ms": x, "sent": 1.02e7} for name, x in ms.items()]
        steps = {name: SimpleNamespace(seconds=x / 1000, sent=1e7) for name, x in guess.items()}
        found.append(page.compare(cell, rows, steps))  # type: ignore[arg-type]
    return found


def test_figures() -> None:
    figures = page.summary(pd.concat(compared(), ignore_index=True))
    assert figures == {"cells": 81, "median": 0, "tenth": 0, "chosen": 100, "pays": 100}
    wrong = tuple(cell.name for cell in all_cells()[:27])
    figures = page.summary(pd.concat(compared(1.2, wrong), ignore_index=True))
    assert figures["median"] == figures["tenth"] == pytest.approx(20)
    assert figures["chosen"] == pytest.approx(100 * 2 / 3)
    assert figures["pays"] == pytest.approx(100 * (1 - 1 / 6))  # one of two engines in these cells


def test_the_page_compares_the_parts() -> None:
    machine = {"cores": 2, "cpu": "x", "kernel": "6", "date": "2025-01-01", "versions": {"a": "1"}}
    machine["congestion_control"] = "bbr"
    unseen = held_out()
    text = page.text({"machine": machine}, compared(1.1, tuple(unseen)[:1]))
    seen = len(all_cells()) - len(unseen)
    assert f"| fitted to | {seen} | 10 | 10 | 100 | 100 |" in text
    assert f"| held out | {len(unseen)} | 10 | 10 |" in text
    assert all(f"| {part} |" in text for part in ("gpt", "8 hosts", "50mbit", "RTT 20ms"))
    assert "| horovod | dense | 100 | 1 |" in text  # the worst prediction
    assert "counted 2.0 % more in the median" in " ".join(text.split())
