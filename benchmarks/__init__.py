"""Benchmarks, and the pages of `docs/` that show their results.

Benchmarks import `accordion_hvd` and `examples`, and are not installed. `scripts/` starts them.
"""
