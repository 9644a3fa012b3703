"""What the training scripts share: settings from YAML, data, training, results and pictures.

Examples import `accordion_hvd` and are not installed with it. `scripts/train_*.py` start them.
"""
