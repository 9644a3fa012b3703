"""`python -m accordion_hvd.netbench`: the same as `scripts/netbench.py`."""

from accordion_hvd.netbench.command import main

main()
