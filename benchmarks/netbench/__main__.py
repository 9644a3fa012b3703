"""`python -m benchmarks.netbench`: the same as `scripts/netbench.py`."""

from benchmarks.netbench.command import main

main()
