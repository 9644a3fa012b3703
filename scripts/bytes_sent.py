"""Write docs/compressors.md, with the bytes that each compressor sends.

See `benchmarks.compressors.bytes_sent`.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.compressors.bytes_sent import main  # noqa: E402

if __name__ == "__main__":
    main()
