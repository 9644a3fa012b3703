"""Simulation of ranks without a network: in one process, or in virtual time."""

from accordion_hvd.simulation.one_process import World, simulate

__all__ = ["World", "simulate"]
