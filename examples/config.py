"""The settings of a run: a YAML file, and what the command line says instead."""

from __future__ import annotations

import inspect
import os
import re
import sys
import typing
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, NoReturn

from accordion_hvd import check
from accordion_hvd.policies import Accordion, Policy
from accordion_hvd.resolve import VARIABLE, as_policy, parse
from examples import schedule


@dataclass
class Settings:
    """One training run.

    Args:
        name: of the run; its results are in `<output>/<name>`.
        data: which images: digits (inside scikit-learn), mnist or cifar10.
        limit: train and test on at most so many images.
        shift: move training images by up to so many pixels, anew in each epoch.
        model: mlp or convnet.
        width: hidden units of the mlp, channels of the convnet's first layer.
        depth: hidden layers of the mlp, pairs of layers of the convnet.
        compression: a word ("topk:0.01"), a call ("Accordion(low=PowerSGD(4), high=PowerSGD(1))")
            or Accordion's arguments as a mapping; none for no compression. Left out, the
            environment variable ACCORDION_HVD_COMPRESSION may name one.
        skip: patterns of the names of layers that are not compressed.
        epochs: passes over the training images.
        batch_size: images a step on each rank.
        lr: learning rate at the start, for all ranks together (it is not scaled by their number).
        schedule: constant, drops (at the epochs in `drops`) or cosine.
        drops: epochs (from 0) before which the learning rate is multiplied by `drop`.
        drop: the factor.
        momentum: of SGD.
        weight_decay: of SGD.
        seed: of weights and shuffling.
        output: folder for results.
        checkpoint: keep what is needed to resume, after each epoch.
        resume: go on from the last checkpoint of the run of this name.
        progress: show a progress bar.
    """

    name: str = "run"
    data: Literal["digits", "mnist", "cifar10"] = "digits"
    limit: int | None = None
    shift: int = 0
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
        """Raises: ValueError when a value is impossible."""
        who = "settings"
        for key in ("width", "depth", "epochs", "batch_size"):
            check.integer(who, key, getattr(self, key), least=1)
        if self.limit is not None:
            check.integer(who, "limit", self.limit, least=1)
        for key in ("seed", "shift"):
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

    def policy(self) -> Policy | None:
        """A new policy as `compression` says; None if it says nothing."""
        return _policy(self.compression)

    def lr_at(self, epoch: int) -> float:
        """The learning rate of an epoch (from 0)."""
        if self.schedule == "drops":
            return schedule.drops(self.lr, epoch, self.drops, self.drop)
        if self.schedule == "cosine":
            return schedule.cosine(self.lr, epoch, self.epochs)
        return self.lr

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def _policy(wanted: Any) -> Policy | None:
    if wanted is None:
        return None
    if not isinstance(wanted, dict):
        return as_policy(wanted)
    known = inspect.signature(Accordion).parameters
    for key in wanted:
        check.one_of("compression", "key", key, tuple(known))
    return Accordion(**{key: _levels(value) for key, value in wanted.items()})


def _levels(value: Any) -> Any:
    """Words for compressors, wherever they stand, as the compressors."""
    if isinstance(value, str) and value not in ("local", "reduced"):
        return parse(value)
    if isinstance(value, dict):
        return {key: _levels(item) for key, item in value.items()}
    return value


# -------------------------------------------------------------------------------- the command line
LOCAL_RANK = ("HOROVOD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK")
"""Environment variables in which launchers say which process of its machine this one is."""


def read(
    description: str | None, arguments: Sequence[str] | None = None, kind: Any = Settings
) -> Any:
    """The settings that the command line asks for.

    What is wrong ends the process with status 2 and one sentence that names the key, its value and
    what is allowed: on every rank, before anything has been started.

    Args:
        description: of the script, for --help.
        arguments: instead of the command line's.
        kind: the class of settings.
    """
    try:
        return parse_settings(description, arguments, kind)
    except ValueError as error:
        stop(str(error))


def stop(sentence: str) -> NoReturn:
    """End this rank with status 2; the sentence is written once a machine."""
    ranks = [os.environ.get(name, "0") for name in LOCAL_RANK]
    if set(ranks) == {"0"}:
        sys.stderr.write(f"{sentence}\n")
        sys.stderr.flush()
    raise SystemExit(2)


def parse_settings(
    description: str | None, arguments: Sequence[str] | None = None, kind: Any = Settings
) -> Any:
    """Like `read`, but raises ValueError."""
    try:
        import jsonargparse
    except ImportError:
        raise ValueError(
            "the scripts need jsonargparse, which is not installed; "
            "install the extra: pip install 'accordion_hvd[train]'."
        ) from None
    from argparse import ArgumentError

    warnings.filterwarnings("ignore", module="jsonargparse")
    parser = jsonargparse.ArgumentParser(description=description, exit_on_error=False)
    parser.add_argument("--config", action="config", help="a YAML file with any of these settings")
    parser.add_class_arguments(kind)
    try:
        found = parser.parse_args(None if arguments is None else list(arguments)).as_dict()
    except (ArgumentError, TypeError) as error:
        raise ValueError(_sentence(str(error), kind)) from None
    found.pop("config", None)
    return kind(**found)


def _sentence(message: str, kind: Any) -> str:
    """What the parser says, as one sentence with key, value and what is allowed."""
    flat = " ".join(message.split())
    names = ", ".join(item.name for item in fields(kind))
    if wrong := re.search(r"Option '([^']+)' is not accepted", flat):
        return f"settings: {wrong[1]!r} is not known; allowed are {names}."
    if wrong := re.search(r"[Uu]nrecognized arguments: (.*)", flat):
        return f"settings: {wrong[1]!r} is not known; allowed are --config and, as --key, {names}."
    if wrong := re.search(r'Parser key "([\w.]+)": .*?(?:Got|Given) value: (.*)', flat):
        return f"settings: {wrong[1]} is {wrong[2]!r}, but must be {allowed(wrong[1], kind)}."
    if "config" in flat:
        told = _tail(flat)
        return f"settings: --config must be a YAML file of settings: {told}; allowed are {names}."
    if wrong := re.search(r"argument --([\w.]+): expected one argument", flat):
        return f"settings: {wrong[1]} has no value, but must be {allowed(wrong[1], kind)}."
    return f"settings: {flat.rstrip('.')}."


def _tail(message: str) -> str:
    for start in ("Problems parsing config: ", 'Parser key "config": '):
        message = message.removeprefix(start)
    return message.rstrip(".")


def allowed(key: str, kind: Any = Settings) -> str:
    """What the value of a setting may be, in words."""
    hint = typing.get_type_hints(kind).get(key.partition(".")[0])
    if typing.get_origin(hint) is Literal:
        return "one of " + ", ".join(repr(choice) for choice in typing.get_args(hint))
    words: dict[Any, str] = {
        int: "an integer",
        float: "a number",
        bool: "true or false",
        str: "a text",
        list[int]: "a list of integers",
        list[str]: "a list of texts",
        list[float]: "a list of numbers",
        str | None: "a text or null",
        float | None: "a number or null",
        int | None: "an integer or null",
    }
    return words.get(hint, "a word such as 'topk:0.01' or a mapping with low and high")
