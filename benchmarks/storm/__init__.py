"""Storms: elastic trainings whose ranks are killed, leave and join all the time.

`scripts/reliability.py` is the entry point. `job` starts a training and disturbs it; its program is
`worker` over Horovod, and `torchft_launcher` with `torchft_replica` over torchft. `journal`
evaluates the records of both, and `command` keeps the results, for docs/reliability.md.
"""
