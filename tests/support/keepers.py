"""Ranks in threads that save and load arrays, and a process that is killed while it saves.

`python keepers.py FOLDER N` saves state 2 into the folder and kills itself (SIGKILL) in the N-th
operation on its files. If this operation is a write, it writes the first half of the content.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from threads import Threaded

from accordion_hvd.engine import checkpoint
from accordion_hvd.engine.checkpoint import Loader, Restore, load_state, save_state
from accordion_hvd.ops import numpy as xp
from accordion_hvd.simulation.one_process import Hub


class Numbers(checkpoint.Keeper):
    """One rank's arrays, which `save_state` saves and `load_state` restores.

    Args:
        communicator: this rank's communicator.
        kind: name that is saved with the arrays; `restore` refuses arrays of another kind.
    """

    def __init__(self, communicator: Any, kind: str = "numbers") -> None:
        self.communicator, self.kind, self.exchange = communicator, kind, self
        self.arrays: Mapping[str, np.ndarray] = {}
        self.steps = 0
        self.policy: dict[str, Any] = {}

    def expect(self, names: Sequence[str]) -> None:
        assert names == []

    def describe(self) -> dict[str, Any]:
        return {"kind": self.kind, "steps": self.steps, "tensors": [], "policy": self.policy}

    def export(self) -> dict[str, np.ndarray]:
        return dict(self.arrays)

    def restoring(self, row: dict[str, Any], load: Loader, ranks: int) -> Restore:
        if row["kind"] != self.kind:
            raise ValueError(f"{self.kind} cannot be restored: {row['kind']} were saved")
        arrays = load(self.communicator.rank % ranks)

        def restore() -> None:
            self.arrays, self.steps = arrays, row["steps"]

        return restore


def new_ranks(count: int, kind: str = "numbers") -> list[Numbers]:
    hub = Hub(count)
    return [Numbers(Threaded(hub, rank, xp), kind) for rank in range(count)]


def on_all(ranks: Sequence[Numbers], action: Callable[[Numbers], Any]) -> list[Any]:
    """Run an action on all ranks, in threads; return the exception of each, or None."""

    def outcome(rank: Numbers) -> Exception | None:
        try:
            action(rank)
        except Exception as error:
            return error
        return None

    lock, load = threading.Lock(), checkpoint._load

    def load_alone(*args: Any) -> Any:
        with lock:
            return load(*args)

    # Threads that parse array headers concurrently can make Python 3.11 raise SystemError.
    with mock.patch.object(checkpoint, "_load", load_alone), ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(outcome, ranks))


def save(folder: Path, number: int, ranks: int = 2, size: int = 100) -> list[Any]:
    """Save state `number` of new ranks; return each rank's exception, or None."""
    savers = new_ranks(ranks)
    for rank, saver in enumerate(savers):
        saver.arrays, saver.steps = {"x": np.full(size, 10.0 * number + rank)}, number
    return on_all(savers, lambda saver: save_state(folder, only=[saver]))


def load(folder: Path, ranks: int = 2, size: int = 100) -> int | str:
    """Load a state on new ranks; return its number, or the error message of all ranks."""
    loaders = new_ranks(ranks)
    raised = on_all(loaders, lambda loader: load_state(folder, only=[loader]))
    if any(raised):
        return message(raised)
    for rank, loader in enumerate(loaders):
        np.testing.assert_array_equal(loader.arrays["x"], [10.0 * loader.steps + rank] * size)
    assert len({loader.steps for loader in loaders}) == 1
    return loaders[0].steps


def message(raised: Sequence[Any]) -> str:
    """Return the message of all ranks' RuntimeErrors, which must be one and the same sentence."""
    assert all(isinstance(error, RuntimeError) for error in raised), raised
    texts = {str(error) for error in raised}
    assert len(texts) == 1, texts
    (text,) = texts
    assert text.endswith(".") and "\n" not in text
    return text


OPERATIONS = ("open", "write", "fsync", "replace", "mkdir", "unlink", "rmdir", "ftruncate", "close")


@contextmanager
def counted(
    tell: Callable[[str, Any], None], names: Sequence[str] = OPERATIONS[:-2]
) -> Iterator[None]:
    """Call `tell` before every operation on files within the context.

    Its arguments are the operation's name and arguments. An "open" that may make a file is a
    "create", and others are not told; a "close" is told after it.
    """

    def told(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*args: Any, **more: Any) -> Any:
            made = name == "open" and args[1] & os.O_CREAT
            if name == "close":
                real(*args)
                return tell(name, args)
            if made or name != "open":
                tell("create" if made else name, args)
            return real(*args, **more)

        return operation

    with mock.patch.multiple(os, **{name: told(name, getattr(os, name)) for name in names}):
        yield


def failing(number: int, fault: int, lasting: bool) -> tuple[Any, Callable[[], int]]:
    """Return a context in which the `number`-th operation on files fails, or all from it on.

    Returns:
        The context, and a function that returns how many operations are left until the first error.
    """
    left = number

    def fail(name: str, about: Any) -> None:
        nonlocal left
        left -= 1
        if left == 0 or (lasting and left < 0):
            raise OSError(fault, os.strerror(fault))

    return counted(fail, OPERATIONS), lambda: left


def main(folder: str, last: str) -> None:
    left, real_write = int(last), os.write

    def kill_at_the_last(name: str, about: Any) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            if name == "write":
                descriptor, content = about
                real_write(descriptor, content[: len(content) // 2])
            os.kill(os.getpid(), signal.SIGKILL)

    with counted(kill_at_the_last):
        (raised,) = save(Path(folder), 2, ranks=1)
    assert raised is None, raised


if __name__ == "__main__":
    main(*sys.argv[1:])
