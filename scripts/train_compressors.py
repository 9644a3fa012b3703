"""Train with each compressor for docs/compressor-accuracy.md; see `benchmarks.compressors`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.compressors.training import main  # noqa: E402

if __name__ == "__main__":
    main()
