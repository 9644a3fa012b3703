"""Tasks and methods of `netbench.py accuracy`: trainings that end at a target accuracy."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from accordion_hvd.policies.gate import CHECK
from benchmarks.netbench import contestants
from benchmarks.netbench.contestants import ACCORDION, COMPUTE, DDP, FP16, OURS, STOCK
from benchmarks.task import Task
from examples.data import Dataset, load

ADAPTIVE = OURS + ACCORDION
GATED = f"{ADAPTIVE} auto"
GOODPUT = OURS + "goodput"
LADDER = "[Dense(), FP16(), PowerSGD(4), PowerSGD(1)]"
INTERVAL = 2
"""Number of windows between Accordion's decisions."""

METHODS = (
    STOCK, STOCK + FP16, DDP, f"{DDP} powersgd:4", f"{DDP} powersgd:1",
    OURS + "fp16", OURS + "powersgd:4", OURS + "topk:0.01", ADAPTIVE, GATED,
)  # fmt: skip
GOODPUT_METHODS = (
    OURS + "none", OURS + "fp16", OURS + "powersgd:4", OURS + "powersgd:1", GOODPUT
)  # fmt: skip
"""Methods of the page on `Goodput`: its levels, then the policy."""

GOODPUT_RATES = ("20mbit", "200mbit", "1000mbit")
CHANGING = "benchmarks/netbench/changing.csv"
"""Trace of links whose rate changes between 20 and 500 Mbit/s every 20 seconds."""

HOOK = f"{DDP} powersgd:4"
"""Baseline of comparisons, besides plain Horovod."""

QUICK_METHODS = (STOCK, HOOK, OURS + "powersgd:4")


@dataclass(frozen=True, kw_only=True)
class TargetTask(Task):
    """Training that ends when it reaches a test accuracy.

    Attributes:
        target: test accuracy, in [0, 1].
        lr: highest learning rate.
        limit: steps after which the target counts as missed; the learning rate is 0 there.
        every: number of steps between evaluations.
        window: steps in a window of Accordion.
        shift: largest random shift of a training image in pixels, new in each epoch.
        tested: number of test images; None means all.
        rates: default rates of the links.
    """

    target: float
    lr: float
    limit: int
    every: int
    window: int
    shift: int
    tested: int | None
    rates: tuple[str, ...]


TaskName = Literal["digits", "cifar10"]
TASKS: dict[str, TargetTask] = {
    "digits": TargetTask(
        title="scikit-learn's digits", target=0.97, batch=32, lr=0.03, limit=600, every=10,
        window=10, shift=1, tested=None, rates=("50mbit", "200mbit"),
    ),
    "cifar10": TargetTask(
        title="CIFAR-10", target=0.60, batch=32, lr=0.05, limit=800, every=25,
        window=25, shift=0, tested=2500, rates=("200mbit",),
    ),
}  # fmt: skip
"""Tasks by the name of the image set."""


def images(name: str) -> Dataset:
    """Return the images of a task; the selection of test images is always the same.

    Raises:
        DataError: if the images cannot be found or read.
    """
    data, count = load(name), TASKS[name].tested
    return data if count is None else dataclasses.replace(data, test=data.test.chosen(count, 0))


def spelled(method: str, window: int) -> str:
    """Return a method as `contestants.compression` accepts it.

    Args:
        method: name of the method.
        window: steps in a window of Accordion.
    """
    if method == GOODPUT:
        return f"{OURS}Goodput({LADDER}, window={CHECK})"  # its gate compares times as often
    if method not in (ADAPTIVE, GATED):
        return method
    gate = ", gate='auto'" if method == GATED else ""
    levels = "low=PowerSGD(4), high=PowerSGD(1)"
    return f"{OURS}Accordion({levels}, window={window}, interval={INTERVAL}{gate})"


def choose(wanted: Sequence[str], default: Sequence[str] = METHODS) -> list[str]:
    """Return methods by name; all of `default` if `wanted` is empty.

    Raises:
        ValueError: if a name or a spec string is invalid.
    """
    known = [
        method
        for method in (*METHODS, *GOODPUT_METHODS, *contestants.METHODS["torch"])
        if method != COMPUTE
    ]
    for method in wanted:
        if method not in known and not method.startswith(OURS):
            allowed = ", ".join(map(repr, dict.fromkeys(known)))
            raise ValueError(f"--methods {method!r} is not one of {allowed}, and not 'ours SPEC'.")
        if method.startswith(OURS):
            contestants.compression(spelled(method, 1))
    return list(dict.fromkeys(wanted or default))
