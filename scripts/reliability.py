"""What jobs do when ranks fail, leave and join; see `benchmarks.reliability`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.reliability import main  # noqa: E402

if __name__ == "__main__":
    main()
