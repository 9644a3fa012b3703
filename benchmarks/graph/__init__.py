"""Benchmarks of skewed neighbour sampling: moments, speed on one core, and docs/graph.md."""
