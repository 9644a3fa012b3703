"""Launch of a command on the hosts of a network, with Horovod over Gloo or MPI.

The backend `torch` starts the command without Horovod, with the variables of `torch.distributed`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from benchmarks.netbench.network import SUBNET, Network

Backend = Literal["gloo", "mpi", "torch"]
"""Backends of Horovod; torch starts processes for torch.distributed, without Horovod."""
GRACE = 5.0
"""Seconds in which processes may end by themselves after one has failed."""

PORT = 29500
TAIL = 3000
WRAPPER = """folder=$1 shown=$2; shift 2
rank=${RANK:-$OMPI_COMM_WORLD_RANK}
[ "$rank" = "$shown" ] || exec >"$folder/$rank" 2>&1
exec "$@" """
"""Shell code that shows the output of one rank and writes that of others to files."""


class Job:
    """A command that runs on all hosts.

    Args:
        command: program and arguments.
        network: hosts on which to run the command.
        folder: new folder for the output that is not shown.
        backend: a `Backend`.
        per_host: number of processes per host.
        environment: variables to add to the environment of this process.
        show: whether to show the output of rank 0.
    """

    def __init__(
        self,
        command: Sequence[str],
        network: Network,
        folder: Path,
        backend: str = "gloo",
        per_host: int = 1,
        environment: Mapping[str, str] | None = None,
        show: bool = True,
    ) -> None:
        self.network, self.folder, self.per_host = network, folder, per_host
        self.environment = {**os.environ, **(environment or {})}
        shown = "0" if show else "none"
        self.command = ["sh", "-c", WRAPPER, "sh", str(folder), shown, *command]
        self._rendezvous: Any = None
        folder.mkdir()
        start = {"gloo": self._gloo, "mpi": self._mpi, "torch": self._torch}[backend]
        self.processes: list[subprocess.Popen[Any]] = start()

    def status(self) -> int | None:
        """Return the exit status, or None while processes run.

        The status is that of the first failed process, or 0 once all have succeeded.

        Raises:
            Refusal: if the network's links are no longer as requested.
        """
        self.network.check()
        codes = [process.poll() for process in self.processes]
        failed = [code for code in codes if code]
        if failed:
            return failed[0] if failed[0] > 0 else 128 - failed[0]
        return 0 if None not in codes else None

    def wait(self, limit: float | None = None) -> int:
        """Wait until all processes have ended; return the exit status, 124 on a timeout.

        After a process fails, the others are ended within `GRACE` seconds; the first status counts.

        Args:
            limit: timeout in seconds.
        """
        deadline = time.monotonic() + limit if limit else None
        while (status := self.status()) is None:
            if deadline is not None and time.monotonic() > deadline:
                self.stop()
                return 124
            time.sleep(0.05)
        until = time.monotonic() + GRACE
        while any(process.poll() is None for process in self.processes):
            if time.monotonic() > until:
                break
            time.sleep(0.05)
        self.stop()
        return status

    def stop(self) -> None:
        """End the running processes."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            running = [process for process in self.processes if process.poll() is None]
            for process in running:
                process.send_signal(signal.SIGCONT)  # a stopped process receives no other signal
                process.send_signal(number)
            until = time.monotonic() + 3
            while running and time.monotonic() < until:
                running = [process for process in running if process.poll() is None]
                time.sleep(0.02)
        if self._rendezvous is not None:
            self._rendezvous.stop()
            self._rendezvous = None

    def output(self) -> str:
        """Return the last output of the ranks that are not shown."""
        parts = []
        for path in sorted(self.folder.iterdir()):
            if text := path.read_text(errors="replace").strip():
                parts.append(f"--- rank {path.name}:\n{text[-TAIL:]}")
        return "\n".join(parts)

    # ------------------------------------------------------------------------------------ backends
    def _each(self, variables: Any) -> list[subprocess.Popen[Any]]:
        """Start all processes; `variables(host, local)` returns the environment of one of them."""
        return [
            subprocess.Popen(
                [*self.network.enter(host), *self.command],
                env={**self.environment, **variables(host, local)},
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
            for host in range(len(self.network.names))
            for local in range(self.per_host)
        ]

    def _torch(self) -> list[subprocess.Popen[Any]]:
        """Start all processes with the variables that torchrun sets."""
        return self._each(self._ranks)

    def _ranks(self, host: int, local: int) -> dict[str, str]:
        return {
            "RANK": str(host * self.per_host + local),
            "WORLD_SIZE": str(len(self.network.names) * self.per_host),
            "LOCAL_RANK": str(local),
            "LOCAL_WORLD_SIZE": str(self.per_host),
            "MASTER_ADDR": self.network.addresses[0],
            "MASTER_PORT": str(PORT),
            "GLOO_SOCKET_IFNAME": "eth0",
        }

    def _gloo(self) -> list[subprocess.Popen[Any]]:
        """Start all processes as horovodrun --gloo does, with the rendezvous beside the bridge."""
        from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
        from horovod.runner.http.http_server import RendezvousServer

        names = self.network.names
        hosts = parse_hosts(",".join(f"{name}:{self.per_host}" for name in names))
        self._rendezvous = RendezvousServer(0)
        port = self._rendezvous.start()
        self._rendezvous.init(get_host_assignments(hosts, len(names) * self.per_host))

        def variables(host: int, local: int) -> dict[str, str]:
            ranks = self._ranks(host, local)
            return ranks | {
                "HOROVOD_HOSTNAME": names[host],
                "HOROVOD_RANK": ranks["RANK"],
                "HOROVOD_SIZE": ranks["WORLD_SIZE"],
                "HOROVOD_LOCAL_RANK": ranks["LOCAL_RANK"],
                "HOROVOD_LOCAL_SIZE": ranks["LOCAL_WORLD_SIZE"],
                "HOROVOD_CROSS_RANK": str(host),
                "HOROVOD_CROSS_SIZE": str(len(names)),
                "HOROVOD_CONTROLLER": "gloo",
                "HOROVOD_CPU_OPERATIONS": "gloo",
                "HOROVOD_GLOO_RENDEZVOUS_ADDR": self.network.address,
                "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
                "HOROVOD_GLOO_IFACE": "eth0",
            }

        return self._each(variables)

    def _mpi(self) -> list[subprocess.Popen[Any]]:
        """Start mpirun in the bridge's namespace; an agent in place of ssh enters the hosts."""
        agent, names = self.folder.with_suffix(".agent"), self.network.names
        enter = (f"{name}) exec {' '.join(self.network.enter(i))} sh -c \"$*\" ;;"
                 for i, name in enumerate(names))  # fmt: skip
        agent.write_text(
            "\n".join(["#!/bin/sh", "host=$1; shift", 'case "$host" in', *enter, "esac"])
        )
        agent.chmod(0o700)
        settings = {
            "plm_rsh_agent": str(agent),
            "plm_rsh_no_tree_spawn": "1",
            "pml": "ob1",
            "btl": "tcp,self" if self.per_host == 1 else "tcp,self,vader",
            "btl_tcp_if_include": f"{SUBNET}.0/24",
            "oob_tcp_if_include": f"{SUBNET}.0/24",
            "orte_tmpdir_base": str(self.folder.parent),
        }
        words = [word for key, value in settings.items() for word in ("--mca", key, value)]
        self.environment |= {"HOROVOD_CONTROLLER": "mpi", "HOROVOD_CPU_OPERATIONS": "mpi"}
        self.environment.pop("RANK", None)
        exported = ["PATH", "PYTHONPATH", "HOROVOD_CONTROLLER", "HOROVOD_CPU_OPERATIONS"]
        mpirun = Path(sys.executable).parent / "mpirun"
        command = [
            str(mpirun if mpirun.exists() else "mpirun"),
            "--allow-run-as-root", "--bind-to", "none",
            "-np", str(len(names) * self.per_host),
            "-H", ",".join(f"{name}:{self.per_host}" for name in names),
            *words, *(word for name in exported for word in ("-x", name)), *self.command,
        ]  # fmt: skip
        return [
            subprocess.Popen(
                command, env=self.environment, stdin=subprocess.DEVNULL, start_new_session=True
            )
        ]
