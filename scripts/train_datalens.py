"""Train private generators (DataLens): `horovodrun -np 4 python scripts/train_datalens.py`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from examples import config  # noqa: E402

if __name__ == "__main__":
    from examples.datalens.training import Settings, run

    run(config.read(__doc__, kind=Settings))
