"""A torchft job whose replicas come and go with the hosts of a file.

`benchmarks.storm.job` starts it: `python -m benchmarks.storm.torchft_launcher FOLDER SETTINGS`.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from pathlib import Path

from torchft.coordination import LighthouseServer

FEWEST = 2  # as horovodrun's --min-np
JOIN_TIMEOUT = 60_000  # ms, as that of torchft_lighthouse; live replicas wait for others
PATIENCE = 60.0  # seconds for the others after the first replica has ended


class Launcher:
    """A lighthouse, and a replica per host.

    Args:
        folder: folder with the file of hosts.
        settings: settings of the training, as JSON.
    """

    def __init__(self, folder: Path, settings: str) -> None:
        self._folder, self._settings = folder, settings
        self._lighthouse = LighthouseServer(
            bind="[::]:0", min_replicas=FEWEST, join_timeout_ms=JOIN_TIMEOUT
        )
        self._replicas: dict[str, subprocess.Popen[bytes]] = {}

    def run(self) -> None:
        """Start and end replicas as hosts come and go, until the training has ended."""
        deadline = math.inf
        while time.monotonic() < deadline:
            time.sleep(0.1)
            hosts = [line.split(":")[0] for line in (self._folder / "hosts").read_text().split()]
            for host in hosts:
                if host not in self._replicas and deadline == math.inf:
                    self._replicas[host] = self._start(host)
            for host, replica in self._replicas.items():
                if host not in hosts and replica.poll() is None:
                    replica.terminate()
            statuses = [replica.poll() for replica in self._replicas.values()]
            if None not in statuses:
                return
            if 0 in statuses:
                deadline = min(deadline, time.monotonic() + PATIENCE)

    def _start(self, host: str) -> subprocess.Popen[bytes]:
        module = "benchmarks.storm.torchft_replica"
        command = [sys.executable, "-m", module, str(self._folder), self._settings, host]
        return subprocess.Popen([*command, self._lighthouse.address()])

    def result(self) -> dict[str, float | bool]:
        """Return the test loss, and whether all replicas at the end have equal weights.

        Raises:
            SystemExit: if no replica has come to the end.
        """
        files = sorted(self._folder.glob("end-*"))
        if not files:
            raise SystemExit("torchft_launcher: no replica has come to the end.")
        found = [json.loads(file.read_text()) for file in files]
        return {"loss": found[0]["loss"], "equal": all(one == found[0] for one in found)}


def main() -> None:
    """Run the job."""
    folder = Path(sys.argv[1])
    launcher = Launcher(folder, sys.argv[2])
    launcher.run()
    (folder / "result.json").write_text(json.dumps(launcher.result()))


if __name__ == "__main__":
    main()
