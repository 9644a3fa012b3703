"""Logistic regression over a ring, to an error of 1e-8; see `benchmarks.averaging.logistic`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.averaging.logistic import main  # noqa: E402

if __name__ == "__main__":
    main()
