"""Transformers with AdamW, for docs/transformers.md; see `benchmarks.regimes`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.regimes.transformers_command import main  # noqa: E402

if __name__ == "__main__":
    main()
