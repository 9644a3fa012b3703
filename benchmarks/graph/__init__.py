"""Skewed neighbour sampling: its speed on one core, and docs/graph.md."""
