"""Benchmarks of model averaging: accuracy, late ranks, simulated scale; write docs/averaging.md."""
