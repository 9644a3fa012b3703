"""Benchmarks of skewed neighbour sampling: speed on one core, and docs/graph.md."""
