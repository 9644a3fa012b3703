"""Train on images with Keras: `horovodrun -np 4 python scripts/train_keras.py --config FILE`."""

from __future__ import annotations

from accordion_hvd.experiment import config, start

if __name__ == "__main__":
    start.run("keras", config.read(__doc__))
