"""Settings of a run, from a YAML file and the command line, which takes precedence."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from accordion_hvd import check
from accordion_hvd.policies import Accordion
from accordion_hvd.resolve import VARIABLE, Served, parse, resolve
from examples import command_line, schedule


@dataclass
class Settings:
    """One training run.

    Args:
        name: name of the run; its results are written to `<output>/<name>`.
        data: image set: digits (part of scikit-learn), mnist or cifar10.
        limit: maximum number of images for training, and for testing.
        shift: maximum shift of training images in pixels, drawn again in each epoch.
        test_shift: maximum shift of test images; each image is tested once for each shift, which
            gives results with less noise.
        model: mlp or convnet.
        width: hidden units of the mlp, channels of the convnet's first layer.
        depth: hidden layers of the mlp, pairs of layers of the convnet.
        compression: a spec string ("topk:0.01" or "Accordion(low=PowerSGD(4),
            high=PowerSGD(1))"), or Accordion's arguments as a mapping; "none" for no compression.
            By default the environment variable ACCORDION_HVD_COMPRESSION, if set.
        skip: patterns for the names of layers that are not compressed.
        epochs: number of passes over the training images.
        batch_size: images per step on each rank.
        lr: initial learning rate of all ranks together (not scaled by the number of ranks).
        schedule: constant, drops (at the epochs in `drops`) or cosine.
        drops: epochs (from 0) before which the learning rate is multiplied by `drop`.
        drop: factor for the learning rate.
        momentum: momentum of SGD.
        weight_decay: weight decay of SGD.
        seed: seed of weights and shuffling.
        output: folder for results.
        checkpoint: whether to save a checkpoint after each epoch.
        resume: whether to continue from the last checkpoint of the run with this name.
        progress: whether to show a progress bar.
    """

    name: str = "run"
    data: Literal["digits", "mnist", "cifar10"] = "digits"
    limit: int | None = None
    shift: int = 0
    test_shift: int = 0
    model: Literal["mlp", "convnet"] = "mlp"
    width: int = 96
    depth: int = 4
    compression: str | dict[str, Any] | None = None
    skip: list[str] = field(default_factory=list)
    epochs: int = 10
    batch_size: int = 32
    lr: float = 0.1
    schedule: Literal["constant", "drops", "cosine"] = "constant"
    drops: list[int] = field(default_factory=list)
    drop: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 1e-4
    seed: int = 1
    output: str = "runs"
    checkpoint: bool = False
    resume: bool = False
    progress: bool = True

    def __post_init__(self) -> None:
        """Validate the settings.

        Raises:
            ValueError: if a value is invalid.
        """
        who = "settings"
        for key in ("width", "depth", "epochs", "batch_size"):
            check.integer(who, key, getattr(self, key), least=1)
        if self.limit is not None:
            check.integer(who, "limit", self.limit, least=1)
        for key in ("seed", "shift", "test_shift"):
            check.integer(who, key, getattr(self, key), least=0)
        for key in ("lr", "weight_decay"):
            check.at_least(who, key, getattr(self, key), least=0)
        if not check.is_number(self.lr) or not self.lr > 0:
            check.refuse(who, "lr", self.lr, "a number above 0")
        check.below_one(who, "momentum", self.momentum)
        check.ratio(who, "drop", self.drop)
        self._check_drops(who)
        if not re.fullmatch(r"[\w.+-]+", self.name) or set(self.name) == {"."}:
            check.refuse(who, "name", self.name, "made of letters, digits and . _ + -")
        self._check_compression()

    def _check_compression(self) -> None:
        name, value = "compression", self.compression
        if value is None and (value := os.environ.get(VARIABLE)):
            name = VARIABLE
        try:
            _policy(value)
        except (TypeError, ValueError) as error:
            raise ValueError(f"settings: {name} is {value!r}: {error}") from None

    def _check_drops(self, who: str) -> None:
        if self.schedule == "drops" and not self.drops:
            check.refuse(who, "drops", self.drops, "a list of epochs when schedule is 'drops'")
        if self.schedule != "drops" and self.drops:
            check.refuse(who, "schedule", self.schedule, "'drops' when drops are given")
        for epoch in self.drops:
            check.integer(who, "drops", epoch, least=1)

    @property
    def folder(self) -> Path:
        """Return the folder of the results."""
        return Path(self.output) / self.name

    def policy(self) -> Served | None:
        """Return a new policy or averaging method for `compression`; None if that is None."""
        return _policy(self.compression)

    def lr_at(self, epoch: int) -> float:
        """Return the learning rate of an epoch (from 0)."""
        if self.schedule == "drops":
            return schedule.drops(self.lr, epoch, self.drops, self.drop)
        if self.schedule == "cosine":
            return schedule.cosine(self.lr, epoch, self.epochs)
        return self.lr

    def as_dict(self) -> dict[str, Any]:
        """Return the settings as a dictionary."""
        return asdict(self)


def _policy(wanted: Any) -> Served | None:
    if wanted is None:
        return None
    if not isinstance(wanted, dict):
        return resolve(wanted).serving
    known = inspect.signature(Accordion).parameters
    for key in wanted:
        check.one_of("compression", "key", key, tuple(known))
    return Accordion(**{key: _levels(value) for key, value in wanted.items()})


def _levels(value: Any) -> Any:
    """Replace spec strings, also inside mappings, by the compressors."""
    if isinstance(value, str) and value not in ("local", "reduced"):
        return parse(value)
    if isinstance(value, dict):
        return {key: _levels(item) for key, item in value.items()}
    return value


# -------------------------------------------------------------------------------- the command line
def read(
    description: str | None, arguments: Sequence[str] | None = None, kind: Any = Settings
) -> Any:
    """Return the settings of the command line; see `command_line.read_settings`."""
    return command_line.read_settings(description, arguments, kind)


def parse_settings(
    description: str | None, arguments: Sequence[str] | None = None, kind: Any = Settings
) -> Any:
    """Return the settings as `read` does, but raise ValueError if they are invalid."""
    return command_line.parse_settings(description, arguments, kind)
