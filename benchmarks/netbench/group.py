"""Launch of the benchmark: workers on all hosts that hold contestants and serve requests."""

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
"""Timeouts in seconds for the start of workers and for an answer."""

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",  # huge pages, for all methods
    "TF_NUM_INTRAOP_THREADS": "1",
    "TF_NUM_INTEROP_THREADS": "2",  # one for an operation of this package, one for its callees
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "HOROVOD_GLOO_TIMEOUT_SECONDS": "3600",  # the timeout also counts while a group is stopped
}
"""Environment of ranks, which share the cores of this machine and are stopped in between."""


class Group:
    """Workers that hold the same contestants; stopped (SIGSTOP) while another group measures.

    Args:
        name: name of the group.
        network: hosts of the workers.
        folder: folder of the rig.
        settings: argument of `worker.main`.
        backend: backend of `Job`.
        per_host: number of workers per host.

    Attributes:
        facts: description of the model, from the workers.

    Raises:
        Refusal: if a worker ends or does not answer in time.
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
        answers = self._receive(START_LIMIT)
        order = sorted(range(ranks), key=lambda index: answers[index]["rank"])
        self._connections = [self._connections[index] for index in order]
        self._pids = [answers[index]["pid"] for index in order]
        first = answers[order[0]]
        self.facts = {key: first[key] for key in first if key not in ("rank", "pid")}

    def ask(self, action: str, method: str, count: int = 0) -> list[Any]:
        """Return the answers of all workers to a request, in rank order.

        Raises:
            Refusal: if a worker fails, ends or takes too long.
        """
        self._send((action, method, count))
        return self._answers(method, "value")

    def steps(
        self, method: str, count: int, begin: Callable[[], None] = lambda: None
    ) -> list[dict[str, float]]:
        """Take some steps; call `begin` when all workers are ready for the first step.

        Raises:
            Refusal: if a worker fails, ends or takes too long.
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
        """Stop all workers, including Horovod's background threads."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Resume all workers."""
        self._signal(signal.SIGCONT)

    def close(self) -> None:
        """End the workers."""
        self.resume()
        for connection in self._connections:
            connection.close()
        self.job.stop()

    def _signal(self, number: int) -> None:
        for pid in self._pids:
            os.kill(pid, number)

    def _accept(self, listener: Listener, ranks: int) -> list[Connection]:
        """Return the connections of all workers once they have started."""
        # The listener has no public method to wait with a timeout.
        socket: Any = listener._listener._socket  # type: ignore[attr-defined]
        socket.settimeout(1.0)
        connections: list[Connection] = []
        deadline = time.monotonic() + START_LIMIT
        while len(connections) < ranks:
            try:
                connections.append(listener.accept())
            except TimeoutError:
                self._check(deadline)
        return connections

    def _receive(self, limit: float) -> list[Any]:
        """Return one message from each worker."""
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
        raise Refusal(f"{what} (launch {self.name!r}).\n{self.job.output()}")
