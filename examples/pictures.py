"""Pictures of results: a figure that is written when it has been drawn."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def figure(
    path: Path, size: tuple[float, float], rows: int = 1, columns: int = 1, **options: Any
) -> Iterator[tuple[Any, Any]]:
    """Yield a figure and its axes, an array of `rows` x `columns`; then write them to a file.

    Args:
        path: of the file, whose folder is made.
        size: width and height in inches.
        rows: of axes.
        columns: of axes.
        options: others of `pyplot.subplots`; `dpi` is 110 unless given.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    dpi = options.pop("dpi", 110)
    made, axes = plt.subplots(
        rows, columns, figsize=size, squeeze=False, layout="constrained", **options
    )
    try:
        yield made, axes
        path.parent.mkdir(parents=True, exist_ok=True)
        made.savefig(path, dpi=dpi)
    finally:
        plt.close(made)
