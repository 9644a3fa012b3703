"""Train on images with Keras: `horovodrun -np 4 python scripts/train_keras.py --config FILE`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from examples import config, start  # noqa: E402

if __name__ == "__main__":
    start.run("keras", config.read(__doc__))
