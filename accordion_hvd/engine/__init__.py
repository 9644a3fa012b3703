"""Engine that runs the algorithms: buckets and their states, steps, decisions, checkpoints."""
