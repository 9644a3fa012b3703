"""Hosts on a bridge with limited links, within the network namespace of the calling process.

Each host is a network and UTS namespace (an address and a hostname of its own) that a sleeping
process keeps. Both ends of its link are limited, which makes it a full-duplex network card: the
host's end limits what it sends, the bridge's end what it receives. There is no delay: this shows
bandwidth, not the latency of long lines. Hosts reach each other and nothing else.
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
"""How long a packet may wait in a full link's queue."""

PACKET = 16 * 1024
"""The most bytes that TCP hands down at once (later a network card would cut them up). The larger,
the larger a limited link's bucket must be, and what fits into that passes without any limit."""

BURST = 0.002
"""Seconds of the link's rate that the bucket holds."""


def parse_rate(word: str) -> float | None:
    """Bits a second of "50mbit", "1gbit" and the like; None for "none", an unlimited link.

    Raises:
        ValueError: it is no such word.
    """
    if word == "none":
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?)bit", word.lower())
    if found is None or not float(found[1]):
        raise ValueError(f"rate {word!r} is not understood; write '200mbit', '1gbit' or 'none'.")
    return float(found[1]) * UNITS[found[2]]


class Network:
    """Some hosts on a bridge.

    Args:
        hosts: how many.
        tag: distinguishes their hostnames from those of other rigs.
        folder: for /etc/hosts and what else the hosts need.

    Attributes:
        names: hostnames.
        addresses: of the hosts.
        address: of the bridge, where this process is.

    Raises:
        Refusal: `ip` or `tc` failed.
    """

    def __init__(self, hosts: int, tag: str, folder: Path) -> None:
        self.folder = folder
        self.names = [f"rig{tag}-{host}" for host in range(hosts)]
        self.addresses = [f"{SUBNET}.{host + 1}" for host in range(hosts)]
        self.address = f"{SUBNET}.254"
        self._name_everybody(f"rig{tag}")
        call("ip", "link", "set", "lo", "up")
        call("ip", "link", "add", "br0", "type", "bridge")
        call("ip", "address", "add", f"{self.address}/24", "dev", "br0")
        call("ip", "link", "set", "br0", "up")
        self.holders = [self._host(host) for host in range(hosts)]

    def _name_everybody(self, mine: str) -> None:
        """Give this namespace a hostname and all of them an /etc/hosts.

        Gloo connects to what the hostname resolves to, whatever interface it is told to use.
        """
        pairs = [("127.0.0.1", "localhost"), (self.address, mine)]
        pairs += zip(self.addresses, self.names, strict=True)
        known = self.folder / "hosts"
        known.write_text("".join(f"{address} {name}\n" for address, name in pairs))
        call("mount", "--bind", str(known), "/etc/hosts")
        call("hostname", mine)

    def _host(self, host: int) -> subprocess.Popen[Any]:
        """Make a host; returns the process that keeps it."""
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
        """What to put before a command so that it runs on a host."""
        return _enter(self.holders[host])

    def limit(self, rate: str) -> None:
        """Limit all links, both ways; "none" lifts the limits. May be called at any time.

        Raises:
            ValueError: see `parse_rate`.
        """
        bits = parse_rate(rate)
        for host in range(len(self.names)):
            for place, device in ((self.enter(host), "eth0"), ([], port(host))):
                if bits is None:
                    command = [*place, "tc", "qdisc", "delete", "dev", device, "root"]
                    subprocess.run(command, stderr=subprocess.DEVNULL)  # perhaps there is none
                else:
                    call(*place, "tc", "qdisc", "replace", "dev", device, "root", *_filter(bits))

    def counters(self, host: int) -> tuple[int, int]:
        """Bytes that a host has received and sent so far, without what goes through loopback."""
        return read_counters(Path(f"/proc/{self.holders[host].pid}/net/dev").read_text())

    def goodput(self, seconds: float) -> float:
        """Bytes a second that a TCP connection carries from the first host to the second."""
        program = [sys.executable, "-m", "benchmarks.netbench.goodput"]
        receiver = subprocess.Popen(
            [*self.enter(1), *program, "receive", self.addresses[1]],
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            call(*self.enter(0), *program, "send", self.addresses[1], str(seconds))
            said, _ = receiver.communicate(timeout=30)
        finally:
            receiver.kill()
            receiver.wait()
        return float(said)

    def close(self) -> None:
        """End the processes that keep the hosts; the hosts go with them."""
        for holder in self.holders:
            holder.kill()
            holder.wait()


def port(host: int) -> str:
    """The bridge's end of a host's link."""
    return f"port{host}"


def read_counters(text: str) -> tuple[int, int]:
    """(received, sent) bytes of eth0 in the text of /proc/net/dev."""
    for line in text.splitlines():
        name, colon, rest = line.partition(":")
        if colon and name.strip() == "eth0":
            numbers = rest.split()
            return int(numbers[0]), int(numbers[8])
    raise ValueError("/proc/net/dev has no eth0.")


def call(*command: str) -> None:
    """Run a command that must succeed.

    Raises:
        Refusal: it did not.
    """
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise Refusal(f"`{' '.join(command)}` failed: {' '.join(done.stderr.split())}")


def _enter(holder: subprocess.Popen[Any]) -> list[str]:
    return ["nsenter", "--target", str(holder.pid), "--net", "--uts", "--"]


def _filter(bits: float) -> Sequence[str]:
    """A token bucket that holds `BURST`, but at least a packet (with headers for all its parts)."""
    burst = max(PACKET * 5 // 4, int(bits / 8 * BURST))
    return ["tbf", "rate", f"{bits:.0f}bit", "burst", str(burst), "latency", LATENCY]


def _wait_for_namespace(holder: subprocess.Popen[Any]) -> None:
    """Until the process has left our namespaces, and `unshare` has become `sleep`."""
    deadline = time.monotonic() + 10
    while Path(f"/proc/{holder.pid}/comm").read_text().strip() != "sleep":
        if holder.poll() is not None or time.monotonic() > deadline:
            raise Refusal("a host's namespaces could not be made.")
        time.sleep(0.005)
