"""Train private generators (DataLens): `horovodrun -np 4 python scripts/train_datalens.py`."""

from __future__ import annotations

from accordion_hvd.experiment import config

if __name__ == "__main__":
    from accordion_hvd.experiment.datalens import Settings, run

    run(config.read(__doc__, kind=Settings))
