"""Figures of results, written to a file at the end of a `with` block."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def figure(
    path: Path, size: tuple[float, float], rows: int = 1, columns: int = 1, **options: Any
) -> Iterator[tuple[Any, Any]]:
    """Yield a figure and its axes, an array of `rows` x `columns`; then write the figure to a file.

    Args:
        path: path of the file; missing folders are created.
        size: width and height in inches.
        rows: number of rows of axes.
        columns: number of columns of axes.
        options: further options of `pyplot.subplots`, and `dpi` (110 by default) and `metadata`
            of the file.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    of_file = {"dpi": options.pop("dpi", 110), "metadata": options.pop("metadata", None)}
    drawing, axes = plt.subplots(
        rows, columns, figsize=size, squeeze=False, layout="constrained", **options
    )
    try:
        yield drawing, axes
        path.parent.mkdir(parents=True, exist_ok=True)
        drawing.savefig(path, **of_file)
    finally:
        plt.close(drawing)
