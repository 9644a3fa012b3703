"""Simulated jobs on thousands of ranks, for docs/simulation.md; see `accordion_hvd.simulation`."""
