"""Options that all rigs share."""

from __future__ import annotations

from dataclasses import dataclass

from accordion_hvd import check
from benchmarks.netbench import links
from benchmarks.netbench.network import MOST_HOSTS

OWNER = "netbench"


@dataclass(kw_only=True)
class Rig:
    """Hosts and their links.

    Args:
        hosts: number of hosts.
        per_host: processes on each host.
        rtt: round-trip time of two hosts, such as 20ms.
        loss: share of lost packets, such as 0.1%.
    """

    hosts: int = 4
    per_host: int = 1
    rtt: str = "none"
    loss: str = "none"

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            ValueError: if an option is not allowed.
        """
        check.integer(OWNER, "--hosts", self.hosts, least=1, most=MOST_HOSTS)
        check.integer(OWNER, "--per-host", self.per_host, least=1)
        links.parse_rtt(self.rtt)
        links.parse_loss(self.loss)


def need_links(hosts: int) -> None:
    """Check that there are links to measure.

    Raises:
        ValueError: if there is one host only.
    """
    if hosts < 2:
        raise ValueError(
            f"--hosts is {hosts}, but must be at least 2, since one host needs no link."
        )
