"""Ranks without a network: all in one process, or a thousand in virtual time."""

from accordion_hvd.simulation.one_process import World, simulate

__all__ = ["World", "simulate"]
