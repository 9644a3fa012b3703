"""Entry point of the rig's first process."""

from benchmarks.plan.command import main

main()
