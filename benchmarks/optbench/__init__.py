"""Compressed optimizers beside uncompressed Adam: loss by steps and by bytes, on real ranks.

`command.py` starts the ranks and keeps what they say, `training.py` is what a rank does, `tasks.py`
and `methods.py` say what is trained and how, `page.py` makes docs/optimizers.md of the results.
"""
