"""Averaging methods on up to 1,024 virtual ranks; see `benchmarks.averaging.scale`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.averaging.scale import main  # noqa: E402

if __name__ == "__main__":
    main()
