"""Train a GCN with its nodes spread over ranks: `horovodrun -np 4 python scripts/train_gcn.py`.

Trains with one sampler after another (`--skews`, `--budgets`), with several seeds each (`--seeds`),
and ends with a table and a picture: test accuracy, rows and bytes received from other ranks, and
time per epoch.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from examples.graph import config, report  # noqa: E402

if __name__ == "__main__":
    report.start(config.read(__doc__))
