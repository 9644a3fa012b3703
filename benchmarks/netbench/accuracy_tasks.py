"""What is trained until it is good enough, and in which ways: `netbench.py accuracy`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.netbench import contestants
from benchmarks.netbench.contestants import ACCORDION, COMPUTE, DDP, FP16, OURS, STOCK
from benchmarks.task import Task
from examples.data import Dataset, load

ADAPTIVE = OURS + ACCORDION
GATED = f"{ADAPTIVE} auto"
INTERVAL = 2
"""Windows between Accordion's checks."""

METHODS = (
    STOCK, STOCK + FP16, DDP, f"{DDP} powersgd:4", f"{DDP} powersgd:1",
    OURS + "fp16", OURS + "powersgd:4", OURS + "topk:0.01", ADAPTIVE, GATED,
)  # fmt: skip
HOOK = f"{DDP} powersgd:4"
"""The method that ours are compared with besides plain Horovod."""

QUICK_METHODS = (STOCK, HOOK, OURS + "powersgd:4")


@dataclass(frozen=True, kw_only=True)
class TargetTask(Task):
    """A training that ends when a test accuracy is reached.

    Attributes:
        target: test accuracy, in [0, 1].
        lr: the highest learning rate.
        limit: steps after which it counts as not reached; the learning rate is 0 there.
        every: steps between evaluations.
        window: steps in a window of Accordion.
        shift: pixels by which training images are moved at most, anew in each epoch.
        tested: test images, None for all.
        rates: of the links, unless others are asked for.
    """

    target: float
    lr: float
    limit: int
    every: int
    window: int
    shift: int
    tested: int | None
    rates: tuple[str, ...]


TASKS = {
    "digits": TargetTask(
        title="scikit-learn's digits", target=0.97, batch=32, lr=0.03, limit=600, every=10,
        window=10, shift=1, tested=None, rates=("50mbit", "200mbit"),
    ),
    "cifar10": TargetTask(
        title="CIFAR-10", target=0.60, batch=32, lr=0.05, limit=800, every=25,
        window=25, shift=0, tested=2500, rates=("200mbit",),
    ),
}  # fmt: skip
"""By the name of the image set."""


def images(name: str) -> Dataset:
    """The images of a task; those for testing are drawn alike each time.

    Raises:
        DataError: they cannot be found or read.
    """
    data, count = load(name), TASKS[name].tested
    return data if count is None else dataclasses.replace(data, test=data.test.chosen(count, 0))


def spelled(method: str, window: int) -> str:
    """A method in a form that `contestants.compression` understands, with windows of some steps."""
    if method not in (ADAPTIVE, GATED):
        return method
    gate = ", gate='auto'" if method == GATED else ""
    levels = "low=PowerSGD(4), high=PowerSGD(1)"
    return f"{OURS}Accordion({levels}, window={window}, interval={INTERVAL}{gate})"


def choose(wanted: Sequence[str]) -> list[str]:
    """Methods by name; all of `METHODS` if none are wanted.

    Raises:
        ValueError: a name is not known, or the word of one of ours is not understood.
    """
    known = [method for method in (*METHODS, *contestants.METHODS["torch"]) if method != COMPUTE]
    for method in wanted:
        if method not in known and not method.startswith(OURS):
            allowed = ", ".join(map(repr, dict.fromkeys(known)))
            raise ValueError(f"--methods {method!r} is none of {allowed}, and not 'ours <word>'.")
        if method.startswith(OURS):
            contestants.compression(spelled(method, 1))
    return list(dict.fromkeys(wanted or METHODS))
