"""Hosts on a bridge with limited links, within the network namespace of the calling process.

Each host is a network and UTS namespace with its own address and hostname, which a sleeping process
keeps alive. Both ends of a host's link are limited, so that it behaves like a full-duplex network
card: the host's end limits sending, the bridge's end receiving. Links add no delay: the benchmark
shows bandwidth, not the latency of long distances. Hosts can reach only each other.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.netbench.sandbox import Refusal

SUBNET = "10.77.0"
MOST_HOSTS = 200
UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}
LATENCY = "200ms"
"""Longest wait of a packet in a full link's queue."""

PACKET = 16 * 1024
"""Largest number of bytes that TCP passes down at once (a network card would segment them later). A
limited link's bucket must hold a packet, and traffic that fits into the bucket is not limited."""

BURST = 0.002
"""Size of the token bucket in seconds of the link's rate."""


def parse_rate(word: str) -> float | None:
    """Return the bits per second of "50mbit", "1gbit" etc.; None for "none", an unlimited link.

    Raises:
        ValueError: if `word` is not a rate.
    """
    if word == "none":
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?)bit", word.lower())
    if match is None or not float(match[1]):
        raise ValueError(f"rate {word!r} is invalid; write '200mbit', '1gbit' or 'none'.")
    return float(match[1]) * UNITS[match[2]]


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

    Attributes:
        names: hostnames.
        addresses: addresses of the hosts.
        address: address of the bridge, in the namespace of this process.

    Raises:
        Refusal: if `ip` or `tc` fails.
    """

    def __init__(self, hosts: int, tag: str, folder: Path) -> None:
        self.folder = folder
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
        """Limit all links in both directions, at any time; "none" removes the limits.

        Raises:
            ValueError: if `rate` is not a rate (see `parse_rate`).
        """
        bits = parse_rate(rate)
        for host in range(len(self.names)):
            for place, device in ((self.enter(host), "eth0"), ([], port(host))):
                if bits is None:
                    command = [*place, "tc", "qdisc", "delete", "dev", device, "root"]
                    subprocess.run(command, stderr=subprocess.DEVNULL)  # there may be none
                else:
                    call(*place, "tc", "qdisc", "replace", "dev", device, "root", *_filter(bits))

    def counters(self, host: int) -> tuple[int, int]:
        """Return the bytes that a host has received and sent so far, without loopback."""
        return read_counters(Path(f"/proc/{self.holders[host].pid}/net/dev").read_text())

    def goodput(self, seconds: float) -> float:
        """Return the bytes per second of a TCP connection from the first host to the second."""
        program = [sys.executable, "-m", "benchmarks.netbench.goodput"]
        receiver = subprocess.Popen(
            [*self.enter(1), *program, "receive", self.addresses[1]],
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            call(*self.enter(0), *program, "send", self.addresses[1], str(seconds))
            output, _ = receiver.communicate(timeout=30)
        finally:
            receiver.kill()
            receiver.wait()
        return float(output)

    def close(self) -> None:
        """End the processes that keep the hosts alive, and thereby the hosts."""
        for holder in self.holders:
            holder.kill()
            holder.wait()


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


def _filter(bits: float) -> Sequence[str]:
    """Return a token bucket that holds `BURST` seconds of the rate.

    It holds at least one packet, with headers for all its segments.
    """
    burst = max(PACKET * 5 // 4, int(bits / 8 * BURST))
    return ["tbf", "rate", f"{bits:.0f}bit", "burst", str(burst), "latency", LATENCY]


def _wait_for_namespace(holder: subprocess.Popen[Any]) -> None:
    """Wait until `unshare` has left this process' namespaces and become `sleep`."""
    deadline = time.monotonic() + 10
    while Path(f"/proc/{holder.pid}/comm").read_text().strip() != "sleep":
        if holder.poll() is not None or time.monotonic() > deadline:
            raise Refusal("a host's namespaces could not be created.")
        time.sleep(0.005)
