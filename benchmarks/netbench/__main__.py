"""Run `python -m benchmarks.netbench`, which is the same as `scripts/netbench.py`."""

from benchmarks.netbench.command import main

main()
