"""The section about storms of docs/reliability.md."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import END, digits, render, spread
from benchmarks.storm.job import TORCHFT
from examples.results import read_json
from examples.tables import as_markdown, format_table

BEGIN, STOP = "<!-- storms -->", "<!-- end of storms -->"
COLUMNS = {
    "compression": "`{compression}`",
    "changes": "{changes}",
    "s from a kill to a commit": "{killed}",
    "s from an orderly change": "{orderly}",
    "steps lost in a kill": "{lost}",
    "largest drift": "{drift}",
    "test loss, calm": "{calm:.4f}",
    "in the storm": "{loss:.4f}",
    "difference": "{off:+.1f} %",
    "weights equal": "{equal}",
    "minutes": "{minutes:.0f}",
}
Found = dict[str, Any]


def summary(found: Found) -> str:
    """Return one line about a training."""
    if found["status"] != 0:
        return f"failed with status {found['status']} after {found['seconds']:.0f} s"
    result, changes = found["result"], len(found["changes"])
    return f"loss {result['loss']:.4f}, {changes} changes, {found['seconds']:.0f} s"


def _of(found: Found, *events: str) -> list[Found]:
    return [row for row in found["changes"] if row["event"] in events]


def row(calm: Found, stormy: Found) -> Found:
    """Return the values of a table row."""
    kills, orderly = _of(stormy, "kill"), _of(stormy, "leave", "join")
    drifts = [entry["drift"] for entry in orderly if entry["drift"] is not None]
    losses = calm["result"]["loss"], stormy["result"]["loss"]
    return {
        "compression": stormy["settings"]["compression"],
        "changes": len(stormy["changes"]),
        "killed": spread([entry["seconds"] for entry in kills], digits(1)),
        "orderly": spread([entry["seconds"] for entry in orderly], digits(1)),
        "lost": spread([entry["lost"] for entry in kills], digits(0), statistics.median_high),
        "drift": f"{max(drifts):.1g}" if drifts else "-",
        "calm": losses[0],
        "loss": losses[1],
        "off": 100 * (losses[1] / losses[0] - 1),
        "equal": "yes" if stormy["result"]["equal"] else "**no**",
        "minutes": stormy["seconds"] / 60,
    }


def section(pairs: Sequence[tuple[Found, Found]]) -> str:
    """Return the section for pairs of calm and stormy trainings."""
    settings = pairs[0][1]["settings"]
    table = as_markdown(format_table(COLUMNS, [row(*pair) for pair in pairs]))
    shown = {name: f"{value:,g}" for name, value in settings.items() if not isinstance(value, str)}
    others = any(pair[1]["settings"]["compression"].startswith(TORCHFT) for pair in pairs)
    torchft = render("reliability/torchft") + "\n\n" if others else ""
    return render("reliability/storm", torchft=torchft, table=table, **shown)


def write(folder: Path, path: Path) -> None:
    """Write the section into the page, between its marks; a page without them gets them.

    Raises:
        SystemExit: if there are no results.
    """
    calm = {file.stem.removesuffix("-calm"): file for file in sorted(folder.glob("*-calm.json"))}
    found = [
        (read_json(file), read_json(storm))
        for name, file in calm.items()
        if (storm := folder / f"{name}-storm.json").is_file()
    ]
    if not found:
        raise SystemExit(f"reliability.py: {folder} has no results yet.")
    text = path.read_text()
    if END not in text:  # `make faults` keeps the text after this mark
        text = f"{text.rstrip()}\n\n{END}\n"
    if BEGIN not in text:
        text = f"{text.rstrip()}\n\n{BEGIN}\n{STOP}\n"
    before, _, remainder = text.partition(BEGIN)
    path.write_text(f"{before}{BEGIN}\n{section(found)}\n{STOP}{remainder.partition(STOP)[2]}")
