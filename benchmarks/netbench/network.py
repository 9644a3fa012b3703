"""Hosts on a bridge with limited links, within the network namespace of the calling process.

Each host is a network and UTS namespace with its own address and hostname, which a sleeping process
keeps alive. Both ends of a host's link are limited, so that it behaves like a full-duplex network
card: the host's end limits sending, the bridge's end receiving. If a round-trip time or a loss is
requested, the process `relay` delays and loses packets. Hosts can reach only each other.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.netbench import goodput, trace
from benchmarks.netbench.links import PACKET, token_bucket
from benchmarks.netbench.sandbox import Refusal

SUBNET = "10.77.0"
MOST_HOSTS = 200
WINDOW = 64 << 20
"""Bytes that a TCP connection may have in flight: 1 Gbit/s for half a second."""

STARTS = 15
"""Round trips until a TCP connection has reached its link's rate."""


def set_hostname(name: str, hosts: Sequence[tuple[str, str]], folder: Path) -> None:
    """Set the hostname of this process's namespace and an /etc/hosts for all its namespaces.

    Gloo connects to the address of the hostname, whichever interface it is configured to use.

    Args:
        name: the hostname.
        hosts: addresses and names besides localhost.
        folder: folder for the file that replaces /etc/hosts.
    """
    path = folder / "hosts"
    pairs = [("127.0.0.1", "localhost"), *hosts]
    path.write_text("".join(f"{address} {host}\n" for address, host in pairs))
    call("mount", "--bind", str(path), "/etc/hosts")
    call("hostname", name)


class Network:
    """Hosts on a bridge.

    Args:
        hosts: number of hosts.
        tag: part of the hostnames that distinguishes rigs.
        folder: folder for the hosts' files, such as /etc/hosts.
        rtt: round-trip time between two hosts in seconds; 0 for that of the machine, about 20 us.
        loss: probability that a packet to a host is lost.

    Attributes:
        names: hostnames.
        addresses: addresses of the hosts.
        address: address of the bridge, in the namespace of this process.

    Raises:
        Refusal: if `ip` or `tc` fails, or packets cannot be delayed.
    """

    def __init__(
        self, hosts: int, tag: str, folder: Path, rtt: float = 0.0, loss: float = 0.0
    ) -> None:
        self.folder, self.rtt = folder, rtt
        self.names = [f"rig{tag}-{host}" for host in range(hosts)]
        self.addresses = [f"{SUBNET}.{host + 1}" for host in range(hosts)]
        self.address = f"{SUBNET}.254"
        pairs = zip(self.addresses, self.names, strict=True)
        set_hostname(f"rig{tag}", [(self.address, f"rig{tag}"), *pairs], folder)
        call("ip", "link", "set", "lo", "up")
        call("ip", "link", "add", "br0", "type", "bridge")
        call("ip", "address", "add", f"{self.address}/24", "dev", "br0")
        call("ip", "link", "set", "br0", "up")
        self.holders = [self._host(host) for host in range(hosts)]
        self._changes: list[trace.Change] = []
        self._player: trace.Player | None = None
        self._relay: subprocess.Popen[str] | None = None
        if rtt or loss:
            self.widen_windows()
            self._relay = self._start_relay(loss)

    def delay(self, rtt: float) -> None:
        """Change the round-trip time, to one above 0; connections made before are delayed, too.

        Call `widen_windows` before connections are made.
        """
        self.rtt = rtt
        if self._relay is None:
            self._relay = self._start_relay(0.0)
        else:
            assert self._relay.stdin is not None
            self._relay.stdin.write(f"{rtt / 2}\n")
            self._relay.stdin.flush()

    def widen_windows(self) -> None:
        """Let the windows of new TCP connections cover long delays."""
        for name in ("tcp_rmem", "tcp_wmem"):
            path = f"/proc/sys/net/ipv4/{name}"
            least, default, _ = Path(path).read_text().split()
            for holder in self.holders:
                call(*_enter(holder), "sh", "-c", f"echo {least} {default} {WINDOW} > {path}")

    def _start_relay(self, loss: float) -> subprocess.Popen[str]:
        """Start the process that delays and loses packets."""
        relay = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.netbench.relay", str(self.rtt / 2), str(loss)]
            + [str(holder.pid) for holder in self.holders],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert relay.stdout is not None
        if not relay.stdout.readline():
            raise Refusal(f"packets cannot be delayed: {_last_line(relay)}")
        return relay

    def _host(self, host: int) -> subprocess.Popen[Any]:
        """Create a host; return the process that keeps it alive."""
        holder = subprocess.Popen(
            ["unshare", "--net", "--uts", "sleep", "infinity"], stdin=subprocess.DEVNULL
        )
        _wait_for_namespace(holder)
        call(
            "ip", "link", "add", port(host), "type", "veth",
            "peer", "name", "eth0", "netns", str(holder.pid),
        )  # fmt: skip
        call("ip", "link", "set", port(host), "master", "br0", "up")
        inside = _enter(holder)
        call(*inside, "hostname", self.names[host])
        call(*inside, "ip", "link", "set", "lo", "up")
        call(*inside, "ip", "address", "add", f"{self.addresses[host]}/24", "dev", "eth0")
        call(*inside, "ip", "link", "set", "eth0", "gso_max_size", str(PACKET), "up")
        return holder

    def enter(self, host: int) -> list[str]:
        """Return the prefix of a command that runs it on a host."""
        return _enter(self.holders[host])

    def limit(self, rate: str) -> None:
        """Limit the links in both directions, at any time; "none" removes the limits.

        Args:
            rate: a rate, a rate for each host, or the name of a trace, which starts now (see
                `trace.changes`).

        Raises:
            ValueError: if `rate` is not a rate.
        """
        self._changes = trace.changes(rate, len(self.names))
        self._play()

    def restart_trace(self) -> None:
        """Start the trace of the rates anew, if they change."""
        if any(change.seconds for change in self._changes):
            self._play()

    def _play(self) -> None:
        """Set the links' rates, and start a thread if they change later."""
        self._stop_player()
        for change in self._changes:
            if not change.seconds:
                self._limit_host(change.host, change.bits)
        if later := [change for change in self._changes if change.seconds]:
            self._player = trace.Player(later, self._limit_host)

    def _stop_player(self) -> None:
        if self._player is not None:
            self._player.stop()
            self._player = None

    def _limit_host(self, host: int, bits: float | None) -> None:
        for place, device in ((self.enter(host), "eth0"), ([], port(host))):
            if bits is None:
                command = [*place, "tc", "qdisc", "delete", "dev", device, "root"]
                subprocess.run(command, stderr=subprocess.DEVNULL)  # there may be none
            else:
                call(*place, "tc", "qdisc", "replace", "dev", device, "root", *token_bucket(bits))

    def check(self) -> None:
        """Raise `Refusal` if links are no longer as requested."""
        if self._relay is not None and self._relay.poll() is not None:
            raise Refusal(f"the process that delays packets ended: {_last_line(self._relay)}")
        if self._player is not None and self._player.error is not None:
            raise self._player.error

    def counters(self, host: int) -> tuple[int, int]:
        """Return the bytes that a host has received and sent so far, without loopback."""
        return read_counters(Path(f"/proc/{self.holders[host].pid}/net/dev").read_text())

    def overruns(self) -> int:
        """Return the number of packets that were lost because the relay was too slow."""
        if self._relay is None:
            return 0
        paths = (f"/proc/{holder.pid}/net/netfilter/nfnetlink_queue" for holder in self.holders)
        return sum(int(word) for path in paths for word in Path(path).read_text().split()[5:7])

    def goodput(self, seconds: float) -> float:
        """Return the bytes per second of a TCP connection from one host to another.

        One of them is the host with the slowest link. The connection first has time to reach the
        link's rate.
        """
        limited = [change for change in self._changes if change.bits is not None]
        slowest = min(limited, key=lambda change: change.bits or 0).host if limited else 1
        receiving, sending = (slowest, 0) if slowest else (1, 0)
        address = self.addresses[receiving]
        warm_up = str(goodput.WARM_UP + STARTS * self.rtt)
        program = [sys.executable, "-m", "benchmarks.netbench.goodput"]
        receiver = subprocess.Popen(
            [*self.enter(receiving), *program, "receive", address, warm_up],
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            seconds = max(seconds, STARTS * self.rtt)
            call(*self.enter(sending), *program, "send", address, warm_up, str(seconds))
            output, _ = receiver.communicate(timeout=30)
        finally:
            receiver.kill()
            receiver.wait()
        return float(output)

    def close(self) -> list[tuple[int, int]]:
        """End the processes that keep the hosts alive, and thereby the hosts.

        Returns:
            Pairs (packets, lost packets) of each host, if packets are delayed or lost.
        """
        self._stop_player()
        counts = []
        if self._relay is not None:
            self._relay.terminate()
            counts = json.loads(self._relay.communicate()[0] or "[]")
        for holder in self.holders:
            holder.kill()
            holder.wait()
        return [(packets, lost) for packets, lost in counts]


def port(host: int) -> str:
    """Return the name of the bridge's end of a host's link."""
    return f"port{host}"


def read_counters(text: str) -> tuple[int, int]:
    """Return the (received, sent) bytes of eth0 from the text of /proc/net/dev."""
    for line in text.splitlines():
        name, colon, values = line.partition(":")
        if colon and name.strip() == "eth0":
            numbers = values.split()
            return int(numbers[0]), int(numbers[8])
    raise ValueError("/proc/net/dev has no eth0.")


def call(*command: str) -> None:
    """Run a command that must succeed.

    Raises:
        Refusal: if the command fails.
    """
    result = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if result.returncode:
        raise Refusal(f"`{' '.join(command)}` failed: {' '.join(result.stderr.split())}")


def _enter(holder: subprocess.Popen[Any]) -> list[str]:
    return ["nsenter", "--target", str(holder.pid), "--net", "--uts", "--"]


def _last_line(process: subprocess.Popen[str]) -> str:
    """Return the last line that a process that has ended has written to its standard error."""
    lines = process.communicate()[1].strip().splitlines()
    return lines[-1] if lines else f"status {process.returncode}."


def _wait_for_namespace(holder: subprocess.Popen[Any]) -> None:
    """Wait until `unshare` has left this process' namespaces and become `sleep`."""
    deadline = time.monotonic() + 10
    while Path(f"/proc/{holder.pid}/comm").read_text().strip() != "sleep":
        if holder.poll() is not None or time.monotonic() > deadline:
            raise Refusal("a host's namespaces could not be created.")
        time.sleep(0.005)
