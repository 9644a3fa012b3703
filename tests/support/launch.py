"""The launcher side of distributed tests: start a script of `tests/ranks`, report its outcome."""

from __future__ import annotations

import ast
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from forked import BIN, ROOT, environment, fork_server, modules_of

from benchmarks import processes

RANKS = ROOT / "tests" / "ranks"
ONE = RANKS / "one_function.py"
END = "(end)"
SUITE = 1200
"""Seconds that a launch of a whole suite may take: ten times what it takes where cores are free.

A check that hangs ends by its own limit, long before.
"""
LAUNCHERS = {
    "gloo": "horovodrun",
    "mpirun": "mpirun",
    "torchrun": "torchrun",
    "carried": "horovodrun",
}
"""Launcher -> its program. In "carried", torch.distributed sends gradients of Horovod's ranks, and
in "carried-NAME" the engine of this name."""

PATIENT = {"HOROVOD_CYCLE_TIME": "5", "OMPI_MCA_mpi_yield_when_idle": "1"}
"""Horovod looks for work every 5 ms instead of 1, and ranks that wait for MPI leave the core.

Otherwise the waiting of ranks takes more CPU time than their checks. Ranks that are processes of
their own have the defaults of Horovod and Open MPI.
"""
_HOROVODRUN = [sys.executable, str(Path(__file__).with_name("horovodrun.py")), "--gloo"]
_TAIL = 4000
_CRASHED = re.compile(
    r"process rank (?P<mpirun>\d+) with PID"
    r"|Process (?P<gloo>\d+) exit with status code"
    r"|failed \(exitcode: -?\d+\) local_rank: (?P<torchrun>\d+)"
)
"""A launcher's words about the rank that ended first."""


@dataclass
class Outcome:
    """The outcome of a check on a rank: "ok", "fail" with a traceback, or "begin" if not ended."""

    status: str
    text: str = ""
    seconds: float = 0.0


@dataclass
class Report:
    """The outcome of a launch.

    Attributes:
        command: the command that was started.
        ranks: number of ranks that it starts.
        outcomes: check -> rank -> outcome.
        stacks: rank -> stack traces of its threads, if a time limit passed.
        status: exit status of the launcher; None if it had to be killed.
        output: stdout and stderr.
        seconds: duration of the launch.
        folder: its processes have it as CHECK_FOLDER in their environment.
    """

    command: list[str]
    ranks: int
    outcomes: dict[str, dict[int, Outcome]] = field(default_factory=dict)
    stacks: dict[int, str] = field(default_factory=dict)
    status: int | None = None
    output: str = ""
    seconds: float = 0.0
    folder: str = ""

    def seconds_of(self, check: str) -> float:
        """Return the seconds that a check took on the slowest rank."""
        return max((o.seconds for o in self.outcomes.get(check, {}).values()), default=0.0)

    def last(self, rank: int) -> str:
        """Return the last check that a rank began."""
        begun = [check for check, ranks in self.outcomes.items() if rank in ranks]
        return begun[-1] if begun else "(not started)"

    def problem(self, check: str) -> str | None:
        """Return a description of what went wrong in a check; None if every rank passed it."""
        told = self.outcomes.get(check, {})
        if len(told) == self.ranks and all(o.status == "ok" for o in told.values()):
            if check != END or self.status == 0:
                return None
        lines = [f"{check}: {self._verdict(told)}", f"command: {' '.join(self.command)}"]
        failed = [(r, o) for r, o in sorted(told.items()) if o.status == "fail"]
        lines += [f"--- rank {rank} failed:\n{outcome.text}" for rank, outcome in failed]
        if not told and self.culprits() and not self._ends_early():
            return "\n".join([f"{check}: not reached; {self._verdict({})}", *self.culprits()])
        for rank in range(self.ranks):
            state = told[rank].status if rank in told else "not reached"
            lines.append(f"rank {rank}: {state}; last in {self.last(rank)}")
            if rank in self.stacks and not failed:
                lines.append(f"--- rank {rank} was here:\n{self.stacks[rank][-2 * _TAIL :]}")
        return "\n".join([*lines, "--- output:", self.output[-_TAIL:]])

    def _ends_early(self) -> bool:
        """Return whether no rank has come to its first check, so that no test tells the output."""
        return set(self.outcomes) <= {"(init)"}

    def _has_crashed(self, rank: int) -> bool:
        return "Fatal Python error" in self.stacks.get(rank, "")

    def culprits(self) -> list[str]:
        """Return a line for each check that failed or hung on a rank."""
        return [
            f"rank {rank} {'failed in' if outcome.status == 'fail' else 'did not leave'} {check}"
            for check, told in self.outcomes.items()
            for rank, outcome in sorted(told.items())
            if outcome.status != "ok"
        ]

    def _verdict(self, told: dict[int, Outcome]) -> str:
        failed = [rank for rank, o in sorted(told.items()) if o.status == "fail"]
        if failed:
            return f"failed on rank(s) {failed}"
        if self.status is None:
            return f"the launch was ended after {self.seconds:.0f} s"
        waiting = [rank for rank, o in sorted(told.items()) if o.status == "begin"]
        stuck = [rank for rank in waiting if not self._has_crashed(rank)]
        if any(rank in self.stacks for rank in stuck):
            return f"took too long on rank(s) {[r for r in stuck if r in self.stacks]}"
        crashed = _CRASHED.search(self.output)
        which = f", since rank {crashed[crashed.lastgroup]} has ended" if crashed else ""
        return f"the launcher ended with status {self.status}{which}"


def checks_of(script: str) -> list[str]:
    """Return the names of a script's checks in the order of its source; [] without the script."""
    path = RANKS / script
    if not path.exists():
        return []
    body = ast.parse(path.read_text()).body
    functions = [node.name for node in body if isinstance(node, ast.FunctionDef)]
    return [name for name in functions if name.startswith("check_")]


def available(launcher: str) -> bool:
    """Return whether the launcher and Horovod (for torchrun: PyTorch) are installed."""
    import importlib.util

    package = "torch" if launcher == "torchrun" else "horovod"
    return _find(launcher) is not None and importlib.util.find_spec(package) is not None


@functools.cache
def launch(
    script: str,
    launcher: str,
    ranks: int,
    limit: float = 240,
    check_limit: float = 240,
    checks: tuple[str, ...] = (),
    forked: bool = True,
) -> Report:
    """Run `tests/ranks/<script>` once; later calls return the same report.

    Args:
        script: file name of the script.
        launcher: a key of `LAUNCHERS`.
        ranks: number of ranks.
        limit: seconds after which all started processes are killed.
        check_limit: seconds that a check may take on a rank.
        checks: names of the checks to run; () for all of the script's checks.
        forked: whether a process that has imported the frameworks forks the ranks.
    """
    return start(RANKS / script, checks, launcher, ranks, limit, check_limit, forked)


def start(
    script: Path,
    words: Sequence[str],
    launcher: str,
    ranks: int,
    limit: float,
    check_limit: float,
    forked: bool,
    imported: Path | None = None,
) -> Report:
    """Run a script with `launch`'s arguments once more.

    Args:
        script: path of the script.
        words: its arguments.
        launcher: a key of `LAUNCHERS`.
        ranks: number of ranks.
        limit: seconds after which all started processes are killed.
        check_limit: seconds that a check may take on a rank.
        forked: whether a process that has imported the frameworks forks the ranks.
        imported: the file that imports the frameworks, if it is not the script.
    """
    program = [str(script), *words]
    with tempfile.TemporaryDirectory(prefix="ranks") as folder:
        if forked:
            command = forked_command(launcher, ranks, program, imported)
        else:
            command = command_for(launcher, ranks, [sys.executable, *program])
        report = Report(command, ranks)
        carrier = launcher.partition("-")[2] or "torch"
        more = {"ACCORDION_HVD_ENGINE": carrier} if launcher.startswith("carried") else {}
        if forked:
            more |= PATIENT
        _run(report, folder, limit, {"CHECK_LIMIT": str(check_limit)} | more)
        _read(report, Path(folder))
        return report


def ranks(
    *counts: int, launcher: str | Sequence[str] = "gloo", limit: float = 60, forked: bool = True
) -> Callable[[Callable[[], None]], Callable[..., None]]:
    """Run a test function on each rank of a launch instead of once in pytest's process.

        @ranks(2, 4, launcher="mpirun")
        def test_the_mean_is_everybodys() -> None:
            hvd.init()
            ...

    The function takes no arguments. A failure names the ranks on which it failed.

    Args:
        counts: numbers of ranks, each of which is a test.
        launcher: a key of `LAUNCHERS`, or several, each of which is a test.
        limit: seconds that the function may take on a rank.
        forked: whether a process that has imported the frameworks forks the ranks.
    """
    launchers = [launcher] if isinstance(launcher, str) else launcher

    def decorate(function: Callable[[], None]) -> Callable[..., None]:
        name = function.__name__

        @pytest.mark.launch
        @pytest.mark.timeout(2 * limit + 60)
        @pytest.mark.parametrize(
            ("launcher", "count"), [(x, n) for x in launchers for n in counts], ids=lambda x: str(x)
        )
        def test(launcher: str, count: int) -> None:
            need(launcher)
            file = Path(function.__code__.co_filename)
            words = [str(file), name]
            report = start(ONE, words, launcher, count, 2 * limit + 30, limit, forked, file)
            problem = report.problem(name) or report.problem(END)
            if problem:
                pytest.fail(problem, pytrace=False)

        test.__name__, test.__doc__, test.__module__ = name, function.__doc__, function.__module__
        test.on_a_rank = function  # type: ignore[attr-defined]
        return test

    return decorate


def launch_elastic(script: str, words: Sequence[str], limit: float) -> tuple[Report, list[dict]]:
    """Run an elastic job of two ranks that may grow to three, over Gloo.

    Args:
        script: a file in `tests/ranks`. It adds ranks by writing to the file that the environment
            variable ELASTIC_HOSTS names, and reports facts with `harness.tell` when it ends.
        words: the script's arguments.
        limit: seconds after which all started processes are killed.

    Returns:
        The report, whose output includes the stack traces of ranks that hang, and the facts that
        the ranks reported.
    """
    with tempfile.TemporaryDirectory(prefix="ranks") as folder:
        hosts, discovery = Path(folder, "hosts"), Path(folder, "discover")
        hosts.write_text("localhost:2\n")
        discovery.write_text(f"#!/bin/sh\ncat {hosts}\n")
        discovery.chmod(0o700)
        command = [*_HOROVODRUN, "--network-interface", "lo", "-np", "2", "--min-np", "1"]
        command += ["--max-np", "3", "--host-discovery-script", str(discovery)]
        report = Report([*command, sys.executable, str(RANKS / script), *words], 3)
        _run(report, folder, limit, {"ELASTIC_HOSTS": str(hosts), "PYTHONHASHSEED": _hash_seed()})
        for file in sorted(Path(folder).glob("*.stacks")):
            report.output += f"\n--- {file.stem} was here:\n{file.read_text()}"
        return report, _told(folder)


def _hash_seed() -> str:
    """Return a seed with which sets, and so Horovod, order 127.0.0.1 before localhost."""
    one, other = "127.0.0.1", "localhost"
    program = (
        f"assert list({{{one!r}, {other!r}}}) == list({{{other!r}, {one!r}}}) == {[one, other]}"
    )
    for seed in map(str, range(100)):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, env=environment, capture_output=True, check=False)
        if done.returncode == 0:
            return seed
    raise RuntimeError("no hash seed orders the hosts")


def launch_job(script: str, words: Sequence[str], limit: float) -> tuple[Report, list[dict]]:
    """Run a script that starts the other processes of its job itself.

    Args:
        script: a file in `tests/ranks`, whose processes report facts with `harness.tell` when they
            end.
        words: the script's arguments.
        limit: seconds after which all started processes are killed.

    Returns:
        The report, and the facts that the processes reported.
    """
    with tempfile.TemporaryDirectory(prefix="ranks") as folder:
        report = Report([sys.executable, str(RANKS / script), *words], 1)
        _run(report, folder, limit, {})
        return report, _told(folder)


def _told(folder: str) -> list[dict]:
    return [json.loads(file.read_text()) for file in sorted(Path(folder).glob("told*"))]


def _run(report: Report, folder: str, limit: float, more: Mapping[str, str]) -> None:
    """Run the report's command for up to `limit` seconds, and end all processes that it started."""
    report.folder = folder
    variables = {**environment(), "CHECK_FOLDER": folder, **more}
    began = time.monotonic()
    with open(Path(folder, "output"), "w+", errors="replace") as output:
        process = subprocess.Popen(
            report.command,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            report.status = process.wait(limit)
        except subprocess.TimeoutExpired:
            # processes with a handler for the signal write their stack traces
            for pid in processes.started("CHECK_FOLDER", folder):
                if Path(folder, f"pid{pid}").exists():
                    os.kill(pid, signal.SIGUSR1)
            time.sleep(1)
        finally:
            processes.end(process, "CHECK_FOLDER", folder)
            report.seconds = time.monotonic() - began
        output.seek(0)
        report.output = output.read()


def forked_command(
    launcher: str, ranks: int, program: Sequence[str], imported: Path | None = None
) -> list[str]:
    """Return the command that has a launcher start a script as forked ranks.

    Args:
        launcher: a key of `LAUNCHERS`.
        ranks: number of ranks.
        program: path of the script, and its arguments.
        imported: the file that imports the frameworks, if it is not the script.
    """
    server = fork_server(modules_of(imported or Path(program[0])))
    command = command_for(launcher, ranks, server.program(program))
    # torchrun imports PyTorch itself, which takes as long as a rank's import
    return server.program(command[1:]) if launcher == "torchrun" else command


def command_for(launcher: str, ranks: int, program: Sequence[str]) -> list[str]:
    """Return the command that starts `ranks` processes of a program on this host."""
    path = _find(launcher)
    if path is None:
        raise FileNotFoundError(f"{LAUNCHERS[_kind(launcher)]} is neither in {BIN} nor on PATH")
    if _kind(launcher) in ("gloo", "carried"):
        return [*_HOROVODRUN, "-np", str(ranks), *program]
    if launcher == "torchrun":
        return [
            sys.executable, path, "--standalone", "--nproc-per-node", str(ranks), "--no-python",
            *program,
        ]  # fmt: skip
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    passed = ["PATH", "PYTHONPATH", "PYTHONUNBUFFERED", "OMP_NUM_THREADS", "CHECK_FOLDER"]
    passed += ["CHECK_LIMIT", "TF_CPP_MIN_LOG_LEVEL"]
    passed += [name for name in PATIENT if name.startswith("HOROVOD")]
    passed += ["TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"]
    passed += [name for name in ("ALL_TESTS",) if name in os.environ]
    exported = [word for name in passed for word in ("-x", name)]
    return [
        path,
        *root,
        "--oversubscribe",
        "--bind-to",
        "none",
        "-np",
        str(ranks),
        *exported,
        *program,
    ]


def _kind(launcher: str) -> str:
    return launcher.partition("-")[0]


def _find(launcher: str) -> str | None:
    program = LAUNCHERS[_kind(launcher)]
    return shutil.which(program, path=f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}")


def _read(report: Report, folder: Path) -> None:
    for rank in range(report.ranks):
        record, stacks = folder / f"rank{rank}.jsonl", folder / f"rank{rank}.stacks"
        for line in record.read_text().splitlines() if record.exists() else []:
            row = json.loads(line)
            outcome = Outcome(row["status"], row["text"], row["seconds"])
            report.outcomes.setdefault(row["check"], {})[rank] = outcome
        if stacks.exists() and stacks.stat().st_size:
            report.stacks[rank] = stacks.read_text(errors="replace")


def need(launcher: str) -> None:
    """Skip the test if the launcher is not installed; fail it if NEED_LAUNCHERS is set."""
    if not available(launcher):
        if os.environ.get("NEED_LAUNCHERS"):  # `make test` has installed them
            pytest.fail(f"{launcher} or Horovod is missing", pytrace=False)
        pytest.skip(f"{launcher} or Horovod is not installed")
