"""Trainings on real ranks: averaged models, and Keras, on the settings of the demo."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.regimes.training import RANKS, Outcome, outcome_of
from examples import launcher
from examples.results import read_json

CONFIG = launcher.ROOT / "configs" / "demo.yaml"
LIMIT = 1800
"""Seconds of a training that hangs."""

LEVELS = "low=PowerSGD(4), high=PowerSGD(1)"
METHODS: Mapping[str, tuple[str, str]] = {
    "none": ("no compression", "none"),
    "low": ("low", "powersgd:4"),
    "high": ("high", "powersgd:1"),
    "accordion": ("Accordion", f"Accordion({LEVELS}, threshold=0.7, interval=10)"),
    "wagma": ("WAGMA throughout", "WAGMA(2)"),
    "accordion-wagma": (
        "Accordion, WAGMA as high",
        "Accordion(low=Dense(), high=WAGMA(2), threshold=0.7, interval=10)",
    ),
}
"""Label and spec string by the name of a method."""


@dataclass(frozen=True)
class RealStudy:
    """A framework and its methods.

    Attributes:
        title: title of the section on the page.
        script: program of a rank.
        methods: names of methods.
        epochs: number of epochs.
    """

    title: str
    script: str
    methods: tuple[str, ...]
    epochs: int = 48


STUDIES = {
    "digits-models": RealStudy(
        "Averaged models", "train_torch.py", ("none", "wagma", "accordion-wagma")
    ),
    "digits-keras": RealStudy("Keras", "train_keras.py", ("low", "high", "accordion")),
    "digits-torch": RealStudy(
        "PyTorch on the same digits", "train_torch.py", ("low", "high", "accordion")
    ),
}
"""Studies by name."""


def train(study: str, method: str, seed: int, epochs: int) -> Outcome:
    """Train once on four ranks of this machine.

    Raises:
        RuntimeError: if the training fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        script = launcher.ROOT / "scripts" / STUDIES[study].script
        command = launcher.command(RANKS, [script])
        command += ["--config", str(CONFIG), "--compression", METHODS[method][1]]
        command += ["--seed", str(seed), "--epochs", str(epochs), "--output", folder]
        done = subprocess.run(
            [*command, "--name", "run"],
            env=launcher.environment(),
            timeout=LIMIT,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            told = (done.stdout + done.stderr)[-2000:]
            raise RuntimeError(f"{study} with {method} failed with {done.returncode}:\n{told}")
        found = read_json(Path(folder) / "run" / "result.json")
    return outcome_of(study, method, seed, epochs, found)
