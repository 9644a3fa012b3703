"""Compressed optimizers compared with uncompressed Adam: loss by steps and by bytes, on real ranks.

`command.py` starts the ranks and saves results, `training.py` is the program of a rank, `tasks.py`
and `methods.py` define tasks and optimizers, and `page.py` writes docs/optimizers.md.
"""
