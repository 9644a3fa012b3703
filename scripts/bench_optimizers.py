"""Compressed optimizers and uncompressed Adam: `run` trainings, `tune` rates, `report` results.

`python scripts/bench_optimizers.py run` trains on four real ranks of this machine.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve()
sys.path.insert(0, str(HERE.parent.parent))

from benchmarks.optbench.command import main  # noqa: E402

if __name__ == "__main__":
    main(HERE)
