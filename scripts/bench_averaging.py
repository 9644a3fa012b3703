"""Who waits for whom when ranks are late, measured; see `accordion_hvd.experiment.waiting`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from accordion_hvd.experiment.waiting import main  # noqa: E402

if __name__ == "__main__":
    main()
