"""Tests of the fp16 reduction: the communicator adds, but on slow links the engine does."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from accordion_hvd import FP16, Accordion, Dense, Fixed, Goodput, PowerSGD, TwoLevel
from accordion_hvd.comm import fp16_reduction
from accordion_hvd.comm.collectives import Traffic
from accordion_hvd.comm.local import LocalCommunicator
from accordion_hvd.ops import numpy as xp
from accordion_hvd.policies import Policy


class Line(LocalCommunicator):
    """Communicator of one of four ranks; a launch takes 0.1 ms and its bytes divided by `rate`."""

    def __init__(self, rate: float, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(xp, 4)
        self.launched: list[str] = []
        self.traffic = Traffic()
        clock = SimpleNamespace(
            perf_counter=lambda: 1e-4 * len(self.launched) + self.traffic.sent / rate
        )
        monkeypatch.setattr(fp16_reduction, "time", clock)

    def launch(self, name: str, requests: Sequence[Any]) -> Any:
        """Launch requests; record the launch and count its bytes."""
        self.launched.append(name)
        pending = super().launch(name, requests)
        self.traffic.add(pending.traffic)
        return pending


@pytest.mark.parametrize(
    ("engine", "mbit", "slow", "probes"),
    [
        ("horovod", 5, True, fp16_reduction.ENOUGH),
        ("horovod", 290, True, fp16_reduction.TRIES),
        ("horovod", 350, False, 1),
        ("horovod", 100_000, False, 1),
        ("torch", 5, True, fp16_reduction.ENOUGH),
        ("torch", 1000, True, fp16_reduction.TRIES),
        ("torch", 3000, False, 1),
    ],
)
def test_the_engine_adds_where_links_are_slow(
    engine: str, mbit: float, slow: bool, probes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = Line(mbit * 1e6 / 8, monkeypatch)
    line.engine = engine
    fp16_reduction.choose_reduction(line, True)
    assert line.native_fp16_allreduce is slow
    assert line.traffic.sent // (2 * 3 / 4 * 4 * fp16_reduction.PROBE) == probes
    before = len(line.launched)
    fp16_reduction.choose_reduction(line, True)
    assert len(line.launched) == before  # the link is measured only once


@pytest.mark.parametrize(
    ("policy", "asks"),
    [
        (Fixed(FP16()), True),
        (Fixed(TwoLevel(FP16())), True),
        (Fixed(TwoLevel(PowerSGD(4, wire="float16"))), True),
        (Fixed(PowerSGD(4, wire="bfloat16")), False),
        (Fixed(PowerSGD(1), gate="auto"), False),
        (Goodput([Dense(), FP16(), PowerSGD(1)]), False),
        (Goodput([Dense(), FP16()]), True),
        (Accordion(low=FP16(), high=PowerSGD(1)), True),
        (Fixed(Dense()), False),
        (Accordion(low=PowerSGD(4), high=PowerSGD(1)), False),
    ],
)
def test_only_those_who_send_halves_ask(
    policy: Policy, asks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = Line(1e6, monkeypatch)
    fp16_reduction.choose_reduction(line, policy.fp16_reduction)
    assert bool(line.launched) == asks and line.native_fp16_allreduce is (True if asks else None)


def test_an_engine_that_adds_halves_well_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    line = Line(1e9, monkeypatch)
    line.native_fp16_allreduce = True
    fp16_reduction.choose_reduction(line, True)
    assert line.native_fp16_allreduce and not line.launched
