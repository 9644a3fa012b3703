"""The cells of the comparison: models, numbers of hosts, and links."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path

MODELS = ("gpt", "resnet", "vgg")
HOSTS = (4, 2, 8)
RATES = ("50mbit", "200mbit", "1gbit")
TIMES = ("none", "20ms", "100ms")
METHODS = (
    "ours dense",
    "ours fp16",
    "ours powersgd:1",
    "ours powersgd:4",
    "ours topk:0.01",
    "ours qsgd:4",
    "ours over torch.distributed dense",
    "ours over torch.distributed powersgd:4",
    "ours over torch.distributed powersgd:4,alternate",
    "ours over torch.distributed topk:0.01",
)
"""Ten configurations, as `benchmarks.netbench.contestants` names them."""

HELD_OUT = Path(__file__).parent / "held_out.txt"


@dataclass(frozen=True)
class Cell:
    """A model on a number of hosts and a link; each cell has all configurations.

    Attributes:
        model: key of `benchmarks.netbench.torch_models.MODELS`.
        hosts: number of hosts, with one process each.
        rate: rate of the links.
        rtt: round-trip time of two hosts.
    """

    model: str
    hosts: int
    rate: str
    rtt: str

    @property
    def name(self) -> str:
        """Return the name, such as "vgg-4-200mbit-20ms"."""
        return f"{self.model}-{self.hosts}-{self.rate}-{self.rtt}"


def all_cells() -> list[Cell]:
    """Return all cells; those of a launch follow one another, by rising round-trip time."""
    return [
        Cell(model, hosts, rate, rtt)
        for hosts, model, rtt, rate in itertools.product(HOSTS, MODELS, TIMES, RATES)
    ]


def held_out() -> set[str]:
    """Return the names of the cells to which nothing is fitted."""
    return set(HELD_OUT.read_text().split())
