"""The time of a training job with each of several compressions, on thousands of simulated ranks.

Prints one row per compression: seconds per step, where they go, bytes, and failures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from accordion_hvd import check, parse
from accordion_hvd.simulation import (
    Constant,
    Failures,
    JobOutcome,
    Link,
    LogNormal,
    Throughput,
    simulate_job,
)
from benchmarks.jobs.models import model_of
from examples import command_line, config
from examples.tables import as_markdown, format_table

COLUMNS = {
    "compression": "`{name}`",
    "median s/step": "{job.median:.3f}",
    "p99": "{job.p99:.3f}",
    "compute": "{job.parts[compute]:.3f}",
    "encode, decode": "{coding:.3f}",
    "exposed": "{job.parts[exposed]:.3f}",
    "idle": "{job.parts[idle]:.3f}",
    "MB/rank": "{rank:.1f}",
    "MB/host": "{host:.1f}",
    "goodput": "{job.goodput:.1%}",
}


@dataclass
class Settings:
    """A job and its cluster.

    Args:
        compression: spec strings, one per row of the table.
        model: resnet50, gpt2, or a JSON file with the shape of each parameter by name.
        ranks: number of ranks.
        local_size: ranks per host.
        steps: optimizer steps.
        compute: median seconds of computation per step.
        sigma: standard deviation of the logarithm of the seconds of computation.
        latency: seconds per message between hosts.
        bandwidth: Gbit/s of each host's link.
        inside_latency: seconds per message within a host.
        inside_bandwidth: Gbit/s of each rank's link within its host.
        algorithm: tree or ring, for all operations.
        encoding: GB/s at which ranks encode and decode.
        slow_hosts: number of slow hosts.
        slow_compute: speed of the slow hosts' ranks, relative to the others.
        slow_link: bandwidth of the slow hosts' links, relative to the others.
        failures: mean hours between failures of the job; 0 for no failures.
        detection: seconds until a failure is noticed.
        restart: seconds until training continues after that.
        commit_every: steps between commits.
        commit: seconds that a commit takes.
        elastic: whether the job continues without the host that failed.
        overlap: whether gradients are sent during the backward pass.
        seed: seed of compute times and failures.
    """

    compression: list[str] = field(default_factory=lambda: ["dense", "powersgd:4"])
    model: str = "resnet50"
    ranks: int = 4096
    local_size: int = 8
    steps: int = 1000
    compute: float = 0.12
    sigma: float = 0.05
    latency: float = 2e-4
    bandwidth: float = 10.0
    inside_latency: float = 5e-6
    inside_bandwidth: float = 800.0
    algorithm: Literal["tree", "ring"] = "tree"
    encoding: float = 50.0
    slow_hosts: int = 0
    slow_compute: float = 1.0
    slow_link: float = 1.0
    failures: float = 0.0
    detection: float = 30.0
    restart: float = 120.0
    commit_every: int = 100
    commit: float = 0.0
    elastic: bool = False
    overlap: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise ValueError if a setting is not allowed; the simulation checks the others."""
        check.integer("settings", "ranks", self.ranks, least=1)
        check.integer("settings", "local_size", self.local_size, least=1)
        check.integer("settings", "slow_hosts", self.slow_hosts, least=0, most=self.hosts)
        check.at_least("settings", "failures", self.failures, least=0)
        for key in ("compute", "sigma"):
            check.at_least("settings", key, getattr(self, key), least=0)
        for key in ("slow_compute", "slow_link", "bandwidth", "inside_bandwidth", "encoding"):
            if not (check.is_number(getattr(self, key)) and getattr(self, key) > 0):
                check.refuse("settings", key, getattr(self, key), "a number above 0")

    @property
    def hosts(self) -> int:
        """Return the number of hosts."""
        return -(-self.ranks // self.local_size)

    def link(self) -> Link:
        """Return the link of each host."""
        bandwidth = np.full(self.hosts, self.bandwidth / 8 * 1e9)
        bandwidth[: self.slow_hosts] *= self.slow_link
        inside = Link(self.inside_latency, self.inside_bandwidth / 8 * 1e9, self.algorithm)
        slow = self.slow_hosts and self.slow_link != 1
        return Link(
            self.latency,
            tuple(bandwidth) if slow else float(bandwidth[0]),
            self.algorithm,
            self.local_size,
            inside,
        )

    def options(self) -> dict[str, Any]:
        """Return the arguments of `simulate_job` that all compressions share."""
        speeds = np.ones(self.ranks)
        speeds[: self.slow_hosts * self.local_size] = self.slow_compute
        costs = self.detection, self.restart, self.commit_every, self.commit, self.elastic
        mean = 3600 * self.failures or None
        return {
            "link": self.link(),
            "compute": LogNormal(self.compute, self.sigma)
            if self.sigma
            else Constant(self.compute),
            "speeds": list(speeds),
            "encoding": Throughput(1e9 * self.encoding),
            "failures": Failures(mean, (), *costs),
            "overlap": self.overlap,
            "seed": self.seed,
        }


def row(name: str, job: JobOutcome) -> dict[str, Any]:
    """Return the values of a row of the table."""
    coding = job.parts["encode"] + job.parts["decode"]
    sizes = {"rank": job.sent_by_rank / 1e6, "host": job.sent_by_host / 1e6}
    return {"name": name, "job": job, "coding": coding, **sizes}


def main(words: Sequence[str] | None = None) -> None:
    """Simulate the job with each compression and print the table."""
    settings = config.read((__doc__ or "").splitlines()[0], words, Settings)
    rows = []
    try:
        model, options = model_of(settings.model), settings.options()
        for name in settings.compression:
            outcome = simulate_job(model, parse(name), settings.ranks, settings.steps, **options)
            rows.append(row(name, outcome))
    except ValueError as error:
        command_line.stop(str(error))
    print(as_markdown(format_table(COLUMNS, rows), left=[0]))
