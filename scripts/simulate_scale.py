"""Averaging methods on up to 1,024 virtual ranks; see `accordion_hvd.experiment.scale`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from accordion_hvd.experiment.scale import main  # noqa: E402

if __name__ == "__main__":
    main()
