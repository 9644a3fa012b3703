"""The side of a rank: it meets its fault at a named place and records its steps."""

from __future__ import annotations

import json
import os
import re
import time
import zlib
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from accordion_hvd.compressors.topk import TopK
from accordion_hvd.engine import checkpoint_files, policy_sync, wait_avoiding
from accordion_hvd.engine.ledger import files
from benchmarks.faults.actions import ACTIONS, LATE
from benchmarks.faults.cases import CASES, Case

FOLDER, CASE, PHASE = "FAULTS_FOLDER", "FAULTS_CASE", "FAULTS_PHASE"
"""Environment variables: folder of the records, name of the case, number of the launch."""

_NUMBERS = ("OMPI_COMM_WORLD_RANK", "HOROVOD_RANK", "RANK")  # mpirun, horovodrun, torchrun


class Rank:
    """This process: its number, its case, and its record.

    Attributes:
        case: the case that is tried.
        folder: folder that all ranks of the launch share.
        resumed: whether this is the second launch, which loads a checkpoint and meets no fault.
        step: the present step, from 0.
        skipped: number of steps that the ranks skipped.
    """

    def __init__(self) -> None:
        self.case: Case = CASES[os.environ[CASE]]
        self.folder, self.resumed = Path(os.environ[FOLDER]), os.environ[PHASE] == "1"
        self.number = next(int(os.environ[name]) for name in _NUMBERS if name in os.environ)
        self.step, self.skipped, self._met, self._pid = 0, 0, self.resumed, os.getpid()
        path = self.folder / f"rank{self.number}.{os.environ[PHASE]}.jsonl"
        self._record = open(path, "a", buffering=1)
        self.tell("started", pid=os.getpid())

    def tell(self, event: str, **facts: Any) -> None:
        """Append an event to the record, with its time on the clock that all processes share."""
        if os.getpid() != self._pid:
            return  # a child of this rank
        self._record.write(json.dumps({"event": event, "time": time.monotonic(), **facts}) + "\n")

    def at(self, place: str, value: Any = None) -> Any:
        """Meet the fault, if this is its place, rank and step; return `value`, perhaps altered."""
        case = self.case
        if self._met or place != case.place or self.step < case.step:
            return value
        if self.number != case.rank:
            if "others late" in case.options:
                self._met = True
                time.sleep(2 * LATE)
            return value
        self._met = True
        self.tell("fault")
        return ACTIONS[case.action](value)

    def differs(self, setting: str) -> bool:
        """Return whether this rank is set up differently from the others in this setting."""
        case = self.case
        own = case.place == "settings" and case.action == setting and self.number == case.rank
        if own:
            self.tell("fault")
        return own

    def stepped(self, weights: list[Any]) -> None:
        """Record that a step has ended, with a checksum of the weights."""
        arrays = [np.ascontiguousarray(weight) for weight in weights]
        crc = 0
        for array in arrays:
            crc = zlib.crc32(array.tobytes(), crc)
        finite = all(bool(np.isfinite(array).all()) for array in arrays)
        self.step += 1
        self.tell("step", step=self.step, crc=crc, finite=finite)

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Record how the training within this context ends."""
        try:
            yield
        except SystemExit:
            self.tell("left")
            raise
        except BaseException as error:
            self.tell("error", text=f"{type(error).__name__}: {error}")
            raise
        self.tell("end", skipped=self.skipped)

    def install(self) -> None:
        """Put the places of faults into the package: checkpoints, decisions, encoders, WAGMA."""
        _before(self, checkpoint_files, "write_file", "checkpoint")
        _before(self, checkpoint_files, "claim", "claim")
        _before(self, checkpoint_files, "new_folder", "checkpoint folder")
        _before(self, checkpoint_files, "write_manifest", "manifest")
        _before(self, files, "write", "ledger")
        _before(self, files, "write_receipt", "receipt")
        _before(self, TopK, "encode_accumulating", "encode")
        _before(self, wait_avoiding.WaitAvoiding, "average", "average")
        share = policy_sync.share

        def shared(*arguments: Any) -> Generator[Any, Any, Any]:
            self.at("decision")
            return (yield from share(*arguments))

        policy_sync.share = shared  # type: ignore[assignment]

    def install_sending(self, communicator: type, alter: Callable[[str, Any], Any]) -> None:
        """Put a place of faults before the collectives of exchanges and averages.

        Args:
            communicator: the engine's communicator.
            alter: function of a place and a tensor that calls `at`, and returns a tensor.
        """
        allgather, allreduce = (getattr(communicator, n) for n in ("allgather", "allreduce"))

        def gathering(link: Any, name: str, tensor: Any, *more: Any) -> Any:
            place = _place(name)
            if place:
                tensor = alter("payload", alter(place, tensor))
            return allgather(link, name, tensor, *more)

        def reducing(link: Any, name: str, tensors: list[Any], *more: Any) -> Any:
            place = _place(name)
            if place:
                tensors = [alter(place, tensors[0]), *tensors[1:]]
            return allreduce(link, name, tensors, *more)

        communicator.allgather = gathering  # type: ignore[attr-defined]
        communicator.allreduce = reducing  # type: ignore[attr-defined]


def _before(rank: Rank, owner: Any, name: str, place: str) -> None:
    """Make a function pass a place of faults, with its first argument, when it is called."""
    function = getattr(owner, name)

    def passing(*arguments: Any, **options: Any) -> Any:
        rank.at(place, arguments[0])
        return function(*arguments, **options)

    setattr(owner, name, passing)


def _place(name: str) -> str:
    """Return the place of a collective by its name, or an empty string."""
    if name.startswith("accordion.averaging"):
        return "average"
    return "exchange" if re.search(r"\.g\d+\.r\d+", name) else ""
