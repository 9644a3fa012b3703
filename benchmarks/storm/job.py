"""An elastic job on hosts of this machine, and the changes that disturb it.

Each rank is a host of its own, because Horovod never starts a rank again on a host on which one
has died. Hosts are addresses of the loopback interface.
"""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

from benchmarks import processes
from benchmarks.netbench import network
from benchmarks.storm.journal import Journal, evaluate

MOST_HOSTS = 250
CHANGES = ("kill", "join", "leave", "join")
"""Changes in their order, which repeats."""

NAME = "storm"
TORCHFT = "torchft"
"""First word of a compression: torchft instead of Horovod; alone, torchft's own dense DDP."""

QUIET_END = 0.05
"""Part of the steps at the end without changes: Horovod's driver fails a job in which a rank dies
while others have ended."""

FOLDER = "STORM_FOLDER"
"""Environment variable with the folder of a training."""


@dataclass(frozen=True)
class Settings:
    """Settings of a training.

    Attributes:
        compression: spec string of a compressor, a policy or an averaging method; or
            "torchft", or "torchft" and one of a compressor or policy.
        task: task of `benchmarks.optbench.tasks`.
        ranks: number of ranks at the beginning, and the largest.
        steps: number of steps.
        pace: least duration of a step in seconds.
        every: number of steps between commits.
        interval: seconds between changes of the ranks; 0 for none.
        lr: highest learning rate of Adam.
        seed: seed of weights, batches and victims.
    """

    compression: str
    task: str = "characters"
    ranks: int = 8
    steps: int = 1500
    pace: float = 0.3
    every: int = 5
    interval: float = 30.0
    lr: float = 0.004
    seed: int = 1


def prepare(folder: Path) -> None:
    """Set the addresses of the hosts and the hostname, in namespaces of this process."""
    network.call("ip", "link", "set", "lo", "up")
    for number in range(MOST_HOSTS):
        network.call("ip", "address", "add", f"{address(number)}/32", "dev", "lo")
    network.set_hostname(NAME, [("127.0.0.1", NAME)], folder)


def address(number: int) -> str:
    """Return the address of a host, by its number."""
    return f"127.0.1.{number + 1}"


class Hosts:
    """The hosts that Horovod may use, in a file that its discovery script prints.

    Args:
        folder: folder for the file and the script.
        count: number of hosts at the beginning.
    """

    def __init__(self, folder: Path, count: int) -> None:
        self._file, self.script = folder / "hosts", folder / "discover"
        self.script.write_text(f"#!/bin/sh\ncat {self._file}\n")
        self.script.chmod(0o700)
        self.names = [address(number) for number in range(count)]
        self._next = count
        self._write()

    def add(self) -> str:
        """Add a new host; return its name."""
        self.names.append(address(self._next))
        self._next += 1
        self._write()
        return self.names[-1]

    def remove(self, name: str) -> None:
        """Remove a host."""
        self.names.remove(name)
        self._write()

    def forget(self, name: str) -> None:
        """Remove a host on which a rank has died at the next change; Horovod avoids it anyway."""
        self.names.remove(name)

    def _write(self) -> None:
        temporary = self._file.with_suffix(".new")  # the script must never print a part
        temporary.write_text("".join(f"{name}:1\n" for name in self.names))
        temporary.replace(self._file)


class Storm:
    """One training, with its changes.

    Args:
        settings: settings of the training.
        folder: new folder for its files.
        limit: seconds after which the training counts as hung.
    """

    def __init__(self, settings: Settings, folder: Path, limit: float) -> None:
        self.settings, self.folder, self.limit = settings, folder, limit
        folder.mkdir(parents=True)
        self.hosts = Hosts(folder, settings.ranks)
        self.journal = Journal(folder / "journal.jsonl")
        self.random = random.Random(settings.seed)

    def run(self) -> dict[str, Any]:
        """Return status, duration, changes and the result of the training."""
        began = time.monotonic()
        with (self.folder / "output").open("w") as output:
            process = subprocess.Popen(
                self._command(), env=self._environment(), stdin=subprocess.DEVNULL,
                stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            try:
                status = self._wait(process, began)
            finally:
                processes.end(process, FOLDER, str(self.folder))
        result = self.folder / "result.json"
        return {
            "settings": asdict(self.settings),
            "status": status,
            "seconds": time.monotonic() - began,
            "changes": evaluate(self.journal.entries()),
            "result": json.loads(result.read_text()) if result.exists() else None,
        }

    def _command(self) -> list[str]:
        python = [sys.executable, "-m"]
        program = [str(self.folder), json.dumps(asdict(self.settings))]
        if self.settings.compression.startswith(TORCHFT):
            return [*python, "benchmarks.storm.torchft_launcher", *program]
        launcher = str(Path(sys.executable).with_name("horovodrun"))
        ranks = str(self.settings.ranks)
        command = [launcher, "--gloo", "--network-interface", "lo", "-np", ranks, "--min-np", "2"]
        command += ["--max-np", ranks, "--host-discovery-script", str(self.hosts.script)]
        return [*command, *python, "benchmarks.storm.worker", *program]

    def _environment(self) -> dict[str, str]:
        more = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        more["HOROVOD_GLOO_TIMEOUT_SECONDS"] = "120"  # ranks wait so long for one that starts
        return {**os.environ, **more, FOLDER: str(self.folder)}

    def _wait(self, process: subprocess.Popen[bytes], began: float) -> int | None:
        """Wait for the end, and disturb until then; return the status, None after the limit."""
        changes, due = cycle(CHANGES), math.inf
        while process.poll() is None:
            time.sleep(0.1)
            now = time.monotonic()
            if now - began > self.limit:
                return None
            if due == math.inf and self.settings.interval and self.journal.has("commit"):
                due = now + self.settings.interval
            if now >= due:
                if self.journal.last_step() < (1 - QUIET_END) * self.settings.steps:
                    self._change(next(changes))
                due += self.settings.interval
        return process.returncode

    def _running(self) -> dict[str, int]:
        """Return host -> process ID of the ranks that run."""
        files = {name: self.folder / f"pid-{name}" for name in self.hosts.names}
        pids = {name: int(file.read_text()) for name, file in files.items() if file.exists()}
        return {name: pid for name, pid in pids.items() if Path(f"/proc/{pid}").exists()}

    def _change(self, change: str) -> None:
        if change == "join":
            self.journal.write("join", host=self.hosts.add())
            return
        pids = self._running()
        if not pids:  # all have just ended
            return
        name = self.random.choice(sorted(pids))
        self.journal.write(change, host=name)
        if change == "kill":
            os.kill(pids[name], signal.SIGKILL)
            self.hosts.forget(name)
        else:
            self.hosts.remove(name)
