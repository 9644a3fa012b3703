"""Start of a run in the chosen framework."""

from __future__ import annotations

import importlib
import logging
import sys

from examples.command_line import stop
from examples.config import Settings
from examples.data import DataError, Dataset, load
from examples.results import Row


def run(framework: str, settings: Settings) -> Row:
    """Train with "torch" or "keras". Load the data first: missing data end the run early."""
    logging.basicConfig(format="%(message)s")
    logging.getLogger("accordion_hvd").setLevel(logging.INFO)  # such as the gate's decisions
    data = load_for(settings)
    training = importlib.import_module(f"examples.{framework}_training")
    result = training.train(settings, data)
    if training.hvd.rank() == 0:
        sys.stdout.write(f"{summary(result)}\n")
        sys.stdout.flush()
    return result


def load_for(settings: Settings) -> Dataset:
    """Return the data of a run; without data, end the process with status 2 and a sentence."""
    try:
        data = load(settings.data, settings.limit, settings.seed)
    except DataError as error:
        stop(str(error))
    return data.tested_shifted(settings.test_shift) if settings.test_shift else data


def summary(result: Row) -> str:
    """Summarize a run in one line."""
    last, stats = result["epochs"][-1], result["stats"]
    text = f"{result['settings']['name']}: test accuracy {last['accuracy']:.1%}"
    if stats["sent"]:
        text += f", {stats['sent'] / 1e6:.2f} MB sent by each rank"
        text += f" (1/{stats['ratio']:.1f} of uncompressed)" if stats["ratio"] > 1.05 else ""
    return f"{text}, {result['seconds']:.0f} s; see {result['settings']['output']}/"
