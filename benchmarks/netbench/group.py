"""A launch of the benchmark: workers on all hosts that hold contestants and wait for requests."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

from benchmarks.netbench.launch import Job
from benchmarks.netbench.network import Network
from benchmarks.netbench.sandbox import Refusal
from benchmarks.netbench.worker import SOCKET

START_LIMIT, ANSWER_LIMIT = 180.0, 300.0
"""Seconds that workers may take to start, and to answer a request."""

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TF_NUM_INTRAOP_THREADS": "1",
    "TF_NUM_INTEROP_THREADS": "2",  # one for ours inside a graph, one for what it calls
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "HOROVOD_GLOO_TIMEOUT_SECONDS": "3600",  # its clock runs while a group is stopped
}
"""Ranks share the cores of this machine, and wait for their turns."""


class Group:
    """Workers that hold the same contestants; stopped (SIGSTOP) while another group measures.

    Args:
        name: of the group.
        network: where the workers are.
        folder: the rig's.
        settings: what `worker.main` takes.
        backend: as of `Job`.
        per_host: workers on each host.

    Attributes:
        facts: what the workers say of their model.

    Raises:
        Refusal: a worker ended, or said nothing in time.
    """

    def __init__(
        self,
        name: str,
        network: Network,
        folder: Path,
        settings: Mapping[str, Any],
        backend: str,
        per_host: int,
    ) -> None:
        self.name = name
        path = str(folder / f"{name}.socket")
        with Listener(path, "AF_UNIX", backlog=256) as listener:
            self.job = Job(
                [sys.executable, "-m", "benchmarks.netbench.worker", json.dumps(settings)],
                network, folder / name, backend, per_host, {**ENVIRONMENT, SOCKET: path},
                show=False,
            )  # fmt: skip
            ranks = len(network.names) * per_host
            self._connections: list[Connection] = self._accept(listener, ranks)
        first = self._receive(START_LIMIT)
        self._pids = [said["pid"] for said in first]
        self.facts = {key: first[0][key] for key in first[0] if key not in ("rank", "pid")}

    def ask(self, action: str, method: str, count: int = 0) -> list[Any]:
        """What each worker answers.

        Raises:
            Refusal: a worker failed, ended, or took too long.
        """
        self._send((action, method, count))
        return self._answers(method, "value")

    def steps(
        self, method: str, count: int, begin: Callable[[], None] = lambda: None
    ) -> list[dict[str, float]]:
        """Take some steps; `begin` is called when all workers stand at the first.

        Raises:
            Refusal: see `ask`.
        """
        self._send(("steps", method, count))
        self._answers(method, "ready")
        begin()
        self._send("go")
        return self._answers(method, "value")

    def _send(self, message: Any) -> None:
        for connection in self._connections:
            connection.send(message)

    def _answers(self, method: str, key: str) -> list[Any]:
        answers = self._receive(ANSWER_LIMIT)
        if errors := [answer["error"] for answer in answers if "error" in answer]:
            raise Refusal(f"{method!r} failed:\n{errors[0]}")
        return [answer[key] for answer in answers]

    def pause(self) -> None:
        """Stop all workers, with the threads that Horovod keeps talking."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let them go on."""
        self._signal(signal.SIGCONT)

    def close(self) -> None:
        """Tell the workers to leave, and make sure."""
        self.resume()
        for connection in self._connections:
            connection.close()
        self.job.stop()

    def _signal(self, number: int) -> None:
        for pid in self._pids:
            os.kill(pid, number)

    def _accept(self, listener: Listener, ranks: int) -> list[Connection]:
        """Connections of all workers, as soon as they have started."""
        # The listener has no public method to wait with a limit.
        socket: Any = listener._listener._socket  # type: ignore[attr-defined]
        socket.settimeout(1.0)
        found: list[Connection] = []
        deadline = time.monotonic() + START_LIMIT
        while len(found) < ranks:
            try:
                found.append(listener.accept())
            except TimeoutError:
                self._check(deadline)
        return found

    def _receive(self, limit: float) -> list[Any]:
        """One message of each worker."""
        deadline, messages = time.monotonic() + limit, []
        for connection in self._connections:
            while not connection.poll(0.5):
                self._check(deadline)
            try:
                messages.append(connection.recv())
            except (EOFError, ConnectionError):
                self._fail("a worker ended")
        return messages

    def _check(self, deadline: float) -> None:
        if self.job.status() is not None:
            self._fail("a worker ended")
        if time.monotonic() > deadline:
            self._fail("a worker took too long")

    def _fail(self, what: str) -> None:
        self.job.stop()
        raise Refusal(f"{what} (launch {self.name!r}).\n{self.job.told()}")
