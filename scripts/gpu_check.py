"""Check this package on one GPU; see `benchmarks.gpu.command`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.gpu.command import main  # noqa: E402

if __name__ == "__main__":
    main()
