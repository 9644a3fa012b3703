"""Measured and predicted times per step: `measure` cells on limited links, `report` errors.

`python scripts/bench_plan.py measure` needs Linux, root, and the commands ip and tc.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.plan.command import main  # noqa: E402

if __name__ == "__main__":
    main()
