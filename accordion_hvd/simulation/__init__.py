"""Simulation of ranks without a network.

`one_process` exchanges gradients between ranks in one process, and `job` computes the time of whole
jobs without training.
"""

from accordion_hvd.simulation.compute_times import (
    Constant,
    LogNormal,
    Stragglers,
    Throughput,
    Traced,
)
from accordion_hvd.simulation.job import Failures, JobOutcome, simulate_job
from accordion_hvd.simulation.links import Link
from accordion_hvd.simulation.one_process import World, simulate

__all__ = [
    "Constant",
    "Failures",
    "JobOutcome",
    "Link",
    "LogNormal",
    "Stragglers",
    "Throughput",
    "Traced",
    "World",
    "simulate",
    "simulate_job",
]
