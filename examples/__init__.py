"""Shared code of the training scripts: settings from YAML, data, training, results, pictures.

The examples import `accordion_hvd` and are not installed with it. `scripts/train_*.py` run them.
"""
