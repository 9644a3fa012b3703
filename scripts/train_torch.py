"""Train on images with PyTorch: `horovodrun -np 4 python scripts/train_torch.py --config FILE`."""

from __future__ import annotations

from accordion_hvd.experiment import config, start

if __name__ == "__main__":
    start.run("torch", config.read(__doc__))
