"""Training on limited links within one machine: `run` a command, `bench` methods, `report` results.

`python scripts/netbench.py run --hosts 4 --rate 200mbit -- python train.py` runs any Horovod
command on four hosts whose links carry 200 Mbit/s, and `--rtt 20ms` delays their packets.
`python scripts/netbench.py bench` compares plain Horovod, DDP and this package. Both need Linux,
root, and the commands ip and tc.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.netbench.command import main  # noqa: E402

if __name__ == "__main__":
    main()
