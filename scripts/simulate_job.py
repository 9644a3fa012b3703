"""The time of a whole training job on thousands of simulated ranks; see `benchmarks.jobs`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.jobs.command import main  # noqa: E402

if __name__ == "__main__":
    main()
