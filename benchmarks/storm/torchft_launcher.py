"""Start one replica of torchft on each host, as `horovodrun` does in elastic jobs.

`benchmarks.storm.job` starts it: `python -m benchmarks.storm.torchft_launcher FOLDER SETTINGS`. A
file names the hosts. A replica on a new host is started, one on a host that is removed is told to
leave, and one that has died is not started again.
"""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import time
from pathlib import Path

from torchft.coordination import LighthouseServer

GRACE = 60.0
"""Seconds in which all replicas end after the first one has."""


class Launcher:
    """A lighthouse and the replicas.

    Args:
        folder: folder with the file of hosts.
        settings: settings of the training, as JSON.
    """

    def __init__(self, folder: Path, settings: str) -> None:
        self.folder, self.settings = folder, settings
        self.lighthouse = LighthouseServer(bind="[::]:0", min_replicas=2)
        self.replicas: dict[str, subprocess.Popen[bytes]] = {}

    def update(self) -> None:
        """Start and end replicas, such that they are those of the file."""
        text = (self.folder / "hosts").read_text()
        names = [line.partition(":")[0] for line in text.splitlines()]
        for name in names:
            if name not in self.replicas:
                command = [sys.executable, "-m", "benchmarks.storm.torchft_replica"]
                command += [str(self.folder), self.settings, name, self.lighthouse.address()]
                self.replicas[name] = subprocess.Popen(command)
        for name, process in self.replicas.items():
            if name not in names and process.poll() is None:
                process.send_signal(signal.SIGTERM)

    def ended(self) -> list[Path]:
        """Return the results of the replicas that have reached the last step."""
        return sorted(self.folder.glob("end-*"))

    def run(self) -> int:
        """Run until the training ends; return 0 if it reached the last step."""
        deadline = math.inf
        self.update()
        while time.monotonic() < deadline and self.running():
            time.sleep(0.5)
            if deadline < math.inf:
                continue
            if self.ended():
                deadline = time.monotonic() + GRACE
            else:
                self.update()
        return self.report()

    def running(self) -> bool:
        """Return whether a replica runs."""
        return any(process.poll() is None for process in self.replicas.values())

    def report(self) -> int:
        """Write the result; return the exit status."""
        found = [json.loads(file.read_text()) for file in self.ended()]
        if not found:
            return 1
        equal = all(each["sums"] == found[0]["sums"] for each in found)
        result = {"loss": found[0]["loss"], "equal": equal, "ended": len(found)}
        (self.folder / "result.json").write_text(json.dumps(result))
        return 0


if __name__ == "__main__":
    launcher = Launcher(Path(sys.argv[1]), sys.argv[2])
    status = launcher.run()
    for process in launcher.replicas.values():
        process.kill()
    sys.exit(status)
