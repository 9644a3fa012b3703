"""Averaging of models, measured; see `accordion_hvd.experiment.averaging_bench`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from accordion_hvd.experiment.averaging_bench import main  # noqa: E402

if __name__ == "__main__":
    main()
