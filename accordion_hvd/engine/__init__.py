"""Runs algorithms: buckets, their state, steps, decisions, checkpoints."""
