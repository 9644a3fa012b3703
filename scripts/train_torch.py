"""Train on images with PyTorch: `horovodrun -np 4 python scripts/train_torch.py --config FILE`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from examples import config, start  # noqa: E402

if __name__ == "__main__":
    start.run("torch", config.read(__doc__))
