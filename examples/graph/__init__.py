"""Training of GCNs with nodes distributed over ranks, to compare neighbour samplers."""
