"""The rank side of a distributed test.

A script in this folder defines functions `check_<what>()` that run on every rank, in the order of
their definition, and ends with

    if __name__ == "__main__":
        harness.main(globals())

An optional `INIT` (a callable, `hvd.init` say) runs first. `tests/support/launch.py` starts the
script once for each launcher and number of ranks and reports every check as a test of its own. Run
by hand:

    horovodrun -np 2 python tests/ranks/core_checks.py [check_this check_that]

A check that fails on one rank ends the launch (the others would wait for it); one that takes longer
than `CHECK_LIMIT` seconds prints the stacks of all threads and ends the launch, too.
"""

from __future__ import annotations

import copy
import faulthandler
import functools
import json
import operator
import os
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TextIO, TypeVar

from accordion_hvd.comm import fp16_reduction

# The links of a busy host can be slow, and the engine's fp16 addition rounds differently.
fp16_reduction.SLOW = dict.fromkeys(fp16_reduction.SLOW, 0.0)

T = TypeVar("T")
RANK = int(
    os.environ.get("OMPI_COMM_WORLD_RANK")
    or os.environ.get("HOROVOD_RANK")
    or os.environ.get("PMI_RANK")
    or os.environ.get("RANK")
    or 0
)
"""This process' number, known before any framework is loaded."""

LIMIT = float(os.environ.get("CHECK_LIMIT", "120"))
_FOLDER = os.environ.get("CHECK_FOLDER")  # launch.py reads its files
_GRACE = 3.0  # seconds in which other ranks may print their stacks


def _open(kind: str) -> TextIO:
    return open(os.path.join(str(_FOLDER), f"rank{RANK}.{kind}"), "a", buffering=1)


_record = _open("jsonl") if _FOLDER else None
_stacks = _open("stacks") if _FOLDER else sys.stderr
faulthandler.enable(_stacks)
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in jobs of the background
faulthandler.register(signal.SIGUSR1, _stacks)  # launch.py sends it after its own limit
if _FOLDER:
    open(os.path.join(_FOLDER, f"pid{os.getpid()}"), "w").close()  # this process handles SIGUSR1


def say(check: str, status: str, text: str = "", seconds: float = 0.0) -> None:
    """Report a check's status, in one write, so that the lines of ranks do not mix."""
    if _record:
        row = {"check": check, "status": status, "text": text, "seconds": round(seconds, 3)}
        _record.write(json.dumps(row) + "\n")
    if status != "begin":
        os.write(1, f"[{RANK}] {status:4} {check} {seconds:.2f} s {text}".rstrip().encode() + b"\n")


def some(cases: Sequence[T], few: Sequence[T]) -> Sequence[T]:
    """Return all cases of a check, or few of them in `make test`, which leaves some out."""
    return cases if os.environ.get("ALL_TESTS") else few


def held(exchange: Any, to_numpy: Callable[[Any], Any]) -> str:
    """Return all that an exchange holds, as text that shows any change."""
    from accordion_hvd.engine import checkpoint

    saved = checkpoint.snapshot(exchange)
    tensors = {key: to_numpy(x).tobytes() for key, x in saved["tensors"].items()}
    return repr((saved["about"], tensors))


def wrong_states(
    saved: dict[str, Any], change: Callable[[Any], Sequence[Any]]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield states like `saved`, which has a snapshot under "exchange", each with one fault.

    Args:
        change: function that returns wrong tensors in the place of one.
    """
    places = ((), ("exchange",), ("exchange", "about"), ("exchange", "about", "policy"),
              ("exchange", "about", "buckets", 0))  # fmt: skip
    for place in places:
        for key in functools.reduce(operator.getitem, place, saved):
            wrong = copy.deepcopy(saved)
            del functools.reduce(operator.getitem, place, wrong)[key]
            yield f"without {place} {key}", wrong
    for key, x in saved["exchange"]["tensors"].items():
        for number, other in enumerate(change(x)):
            wrong = copy.deepcopy(saved)
            wrong["exchange"]["tensors"][key] = other
            yield f"{key}, change {number}", wrong
    wrong = copy.deepcopy(saved)
    wrong["exchange"]["about"]["compression"] = "another"
    yield "another compression", wrong
    wrong = copy.deepcopy(saved)
    wrong["exchange"]["about"]["buckets"][0]["shape"] = [3, 5]
    yield "another model", wrong


@contextmanager
def refused(
    kind: type[BaseException] | tuple[type[BaseException], ...], *words: str
) -> Iterator[None]:
    """Assert that the block raises such an exception with all of these words in its message."""
    try:
        yield
    except kind as error:
        for word in words:
            assert word in str(error), f"{word!r} is not in: {error}"
    else:
        raise AssertionError(f"{kind} was not raised: {words}")


def raises(kind: type[BaseException], part: str, action: Callable[[], Any]) -> None:
    """Assert that the action raises such an exception with `part` in its message."""
    with refused(kind, part):
        action()


@contextmanager
def machines_of(ranks: int, barrier: Callable[[], Any]) -> Iterator[None]:
    """Treat each `ranks` consecutive ranks as a host; remove added process sets afterwards."""
    from horovod.common.process_sets import remove_process_set

    from accordion_hvd.comm.horovod.process_sets import registered

    known = [process_set.process_set_id for process_set in registered()]
    os.environ["ACCORDION_HVD_LOCAL_SIZE"] = str(ranks)
    try:
        yield
    finally:
        del os.environ["ACCORDION_HVD_LOCAL_SIZE"]
        for process_set in registered():
            if process_set.process_set_id not in known:
                remove_process_set(process_set)
        barrier()  # no rank may leave while others still remove


def tell(**facts: Any) -> None:
    """Write facts to a file of this process, for a test that reads them after the launch."""
    with open(os.path.join(str(_FOLDER), f"told{os.getpid()}"), "w") as file:
        json.dump(facts, file)


def main(names: dict[str, Any]) -> None:
    """Run the script's checks; end the process with status 1 if one fails."""
    wanted = sys.argv[1:]
    checks = {
        name: function
        for name, function in names.items()
        if name.startswith("check_")
        and getattr(function, "__module__", None) == names["__name__"]
        and (not wanted or name in wanted)
    }
    if names.get("INIT"):
        _run("(init)", names["INIT"])
    run(checks)


def run(checks: Mapping[str, Callable[[], None]]) -> None:
    """Run checks in their order; end the process with status 1 if one fails."""
    tf = sys.modules.get("tensorflow")  # an import here would put all scripts' ranks on its server
    if tf is not None and not os.environ.get("ALL_TESTS"):
        # A check runs a graph a few times. To rewrite it takes a quarter of the check's CPU time.
        tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    for name, function in checks.items():
        _run(name, function)
    say("(end)", "begin")
    _watch()  # the end of the process may hang as well
    say("(end)", "ok")


def _run(name: str, check: Callable[[], None]) -> None:
    say(name, "begin")
    timer, began = _watch(), time.perf_counter()
    try:
        check()
    except BaseException:  # SystemExit and KeyboardInterrupt too: the launcher must hear of it
        say(name, "fail", traceback.format_exc(), time.perf_counter() - began)
        sys.stdout.flush()
        time.sleep(min(_GRACE, 1.0))
        os._exit(1)
    timer.cancel()
    faulthandler.cancel_dump_traceback_later()
    say(name, "ok", seconds=time.perf_counter() - began)


def _watch() -> threading.Timer:
    """Start timers that print all stacks at the limit and end the process a little later."""
    faulthandler.dump_traceback_later(LIMIT, file=_stacks)
    timer = threading.Timer(LIMIT + _GRACE, _end_late)
    timer.daemon = True
    timer.start()
    return timer


def _end_late() -> None:
    """Print what all threads do outside Python, too, where gdb is at hand; end the process."""
    try:
        words = ["gdb", "-p", str(os.getpid()), "-batch", "-ex", "thread apply all backtrace 12"]
        found = subprocess.run(words, capture_output=True, text=True, timeout=60).stdout
        for thread in found.split("\nThread ")[1:]:
            frames = re.findall(r"^#\d+ +(?:0x\w+ in )?([^\s(]+)", thread, re.MULTILINE)
            _stacks.write(f"{thread.splitlines()[0]} {' < '.join(frames)}"[:400] + "\n")
    except (OSError, subprocess.SubprocessError) as error:
        _stacks.write(f"no native stacks: {error}\n")
    os._exit(1)
