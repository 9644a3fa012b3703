"""Measurements: what is compared with what, and the pages of `docs/` that show the results.

Benchmarks import `accordion_hvd` and `examples`, and are not installed. `scripts/` starts them.
"""
