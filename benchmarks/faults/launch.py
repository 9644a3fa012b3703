"""Launches of a case's ranks, observed from outside."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import processes
from benchmarks.faults import rank
from benchmarks.faults.cases import GLOO, PAUSE, TIMEOUT, TORCH, Case

ROOT = Path(__file__).resolve().parents[2]
_BIN = Path(sys.executable).parent  # of a virtual environment, whose python is a link
_STARTS = 300.0  # seconds in which the ranks of a launch must have met the fault, or ended
_GRACE = 15.0  # seconds beyond a case's limit after which a launch counts as hung
_POLL = 0.05

Event = dict[str, Any]


@dataclass
class Launch:
    """The events and the end of a launch.

    Attributes:
        events: events that each rank recorded.
        ended: time at which each rank's process ended; none if it was still there at the end.
        status: exit status of the launcher; None if it had to be ended.
        output: the output of launcher and ranks.
    """

    events: dict[int, list[Event]] = field(default_factory=dict)
    ended: dict[int, float] = field(default_factory=dict)
    status: int | None = None
    output: str = ""

    def first(self, number: int, *kinds: str) -> Event | None:
        """Return the first event of one of these kinds that a rank recorded."""
        return next((e for e in self.events.get(number, ()) if e["event"] in kinds), None)

    def fault(self) -> float | None:
        """Return the time of the fault."""
        found = [event["time"] for n in self.events if (event := self.first(n, "fault"))]
        return min(found, default=None)


def run(case: Case, framework: str, launcher: str, folder: Path, phase: int = 0) -> Launch:
    """Launch the ranks of a case, and end whatever does not end in time.

    Args:
        case: the case.
        framework: "PyTorch" or "Keras".
        launcher: name of the launcher.
        folder: folder of the ranks' records and checkpoints, equal for both phases.
        phase: 1 for the second launch, which loads a checkpoint.
    """
    script = ROOT / "benchmarks" / "faults" / f"train_{_SCRIPTS[framework]}.py"
    ranks = case.resumed_on if phase else case.ranks
    path = folder / f"output.{phase}"
    with open(path, "w") as output:
        process = subprocess.Popen(
            command(launcher, ranks, script),
            env=_environment(case, folder, phase),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        launch = Launch()
        try:
            _observe(launch, process, case, folder, phase)
        finally:
            launch.status = process.poll()
            processes.end(process, rank.FOLDER, str(folder))
    launch.events = _events(folder, phase)
    launch.output = path.read_text(errors="replace")
    return launch


_SCRIPTS = {"PyTorch": "torch", "Keras": "keras"}


def available(launcher: str) -> str | None:
    """Return the path of a launcher, or None."""
    return shutil.which(launcher, path=f"{_BIN}{os.pathsep}{os.environ.get('PATH', '')}")


def command(launcher: str, ranks: int, script: Path) -> list[str]:
    """Return the command that starts `ranks` processes of a script on this machine.

    Raises:
        SystemExit: if the launcher is not installed.
    """
    path = available(launcher)
    if path is None:
        raise SystemExit(f"reliability.py: {launcher} is not installed; run `make setup`.")
    if launcher == GLOO:
        return [path, "--gloo", "-np", str(ranks), sys.executable, str(script)]
    if launcher == TORCH:
        options = ["--standalone", "--nproc-per-node", str(ranks)]
        return [sys.executable, path, *options, str(script)]
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    placement = ["--oversubscribe", "--bind-to", "none", "-np", str(ranks)]
    return [path, *root, *placement, sys.executable, str(script)]


def _environment(case: Case, folder: Path, phase: int) -> dict[str, str]:
    return {
        **os.environ,
        "PATH": f"{_BIN}{os.pathsep}{os.environ.get('PATH', '')}",
        "PYTHONPATH": str(ROOT),
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "ACCORDION_HVD_TIMEOUT": str(TIMEOUT),
        rank.FOLDER: str(folder),
        rank.CASE: case.name,
        rank.PHASE: str(phase),
        **dict(case.environment),
    }


def _observe(
    launch: Launch, process: subprocess.Popen[bytes], case: Case, folder: Path, phase: int
) -> None:
    """Record when ranks end, until the launcher has ended or the time is over."""
    began, told = time.monotonic(), False
    while process.poll() is None:
        time.sleep(_POLL)
        now = time.monotonic()
        launch.events = _events(folder, phase)
        _note_ends(launch, now)
        fault = launch.fault()
        if fault is None and now > began + _STARTS:
            return
        if fault is not None and not told:
            told = True
            if case.action == "launcher":
                process.send_signal(signal.SIGINT)
            elif case.action == "pause":
                _pause(process, folder)
        if fault is not None and now > fault + case.limit + _GRACE:
            return
        survivors = set(range(case.ranks)) - {case.rank}
        if case.silent and survivors <= launch.ended.keys():
            return  # some launchers wait long for the stopped process before they kill it
    _note_ends(launch, time.monotonic())


def _pause(process: subprocess.Popen[bytes], folder: Path) -> None:
    """Stop all processes of the launch for a while, as a scheduler that suspends a job."""
    stopped = {process.pid, *processes.started(rank.FOLDER, str(folder))}
    for number, pause in ((signal.SIGSTOP, PAUSE), (signal.SIGCONT, 0.0)):
        for pid in stopped:
            os.kill(pid, number)
        time.sleep(pause)


def _note_ends(launch: Launch, now: float) -> None:
    for number, events in launch.events.items():
        if number not in launch.ended and not _alive(events[0]["pid"]):
            launch.ended[number] = now


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _events(folder: Path, phase: int) -> dict[int, list[Event]]:
    found = {}
    for path in folder.glob(f"rank*.{phase}.jsonl"):
        lines = path.read_text().splitlines(keepends=True)
        events = [json.loads(line) for line in lines if line.endswith("\n")]
        if events:
            found[int(path.name[4:].partition(".")[0])] = events
    return found
