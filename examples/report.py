"""Results of several runs, as one table and one picture."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from accordion_hvd import parse
from examples.pictures import figure
from examples.results import Row
from examples.tables import format_table

FRAMEWORKS = {"torch": "PyTorch", "keras": "Keras", "simulated": "simulated"}
COLOURS = {
    "uncompressed": "#4d4d4d",
    "low": "#0072B2",
    "middle": "#56B4E9",
    "high": "#E69F00",
    "schedule": "#CC79A7",
    "accordion": "#009E73",
    "displacement": "#D55E00",
}
"""Colours that colour-blind readers can distinguish (Okabe & Ito)."""

STYLES: dict[str, tuple[Any, str]] = {
    "uncompressed": (":", "s"),
    "low": ("--", "^"),
    "middle": ((0, (6, 1.5, 1, 1.5, 1, 1.5)), "D"),
    "high": ("-.", "v"),
    "schedule": ((0, (7, 2)), "P"),
    "accordion": ("-", "o"),
    "displacement": ((0, (3, 1, 1, 1)), "X"),
}
POLICIES = {"accordion": "Accordion", "displacement": "Displacement"}
"""Configurations that choose between low and high for each layer."""

Runs = Mapping[tuple[str, str], Sequence[Row]]
"""Results, one per seed, by framework and configuration, whose names are the keys of `COLOURS`."""


def label(method: str, result: Row) -> str:
    """Return the name of a configuration, for tables and legends."""
    wanted = result["settings"]["compression"]
    if method in POLICIES:
        return f"{POLICIES[method]}: low or high for each layer"
    if method == "schedule":
        return f"schedule: low for {max(parse(wanted).schedule)} epochs, then high"
    return "uncompressed" if method == "uncompressed" else f"always {method}: {_call(wanted)}"


def _call(spec: str) -> str:
    """Return "PowerSGD(4)" for "powersgd:4"."""
    return re.sub(r"\w+=", "", repr(parse(spec)))


COLUMNS = {
    "framework": "{framework}",
    "compression": "{compression}",
    "test accuracy": "{accuracy:.1%}",
    "range": "{range}",
    "MB sent/worker": "{megabytes:.2f}",
    "ratio": "{ratio:.1f}",
    "seconds": "{seconds:.1f}",
}


def table(runs: Runs) -> pd.DataFrame:
    """Return a table with means over seeds, and the range of the accuracy."""
    found = pd.DataFrame(
        {
            "framework": FRAMEWORKS[framework],
            "compression": label(method, result),
            "accuracy": result["epochs"][-1]["accuracy"],
            "megabytes": result["stats"]["sent"] / 1e6,
            "ratio": result["stats"]["ratio"] or math.nan,
            "seconds": result["seconds"],
        }
        for (framework, method), results in runs.items()
        for result in results
    )
    by_method = found.groupby(["framework", "compression"], sort=False)
    rows = by_method.mean().assign(range=by_method["accuracy"].agg(_range))
    return format_table(COLUMNS, rows.reset_index())


def _range(values: pd.Series) -> str:
    return f"{100 * values.min():.1f}-{values.max():.1%}" if len(values) > 1 else "1 seed"


# -------------------------------------------------------------------------------------- the picture
def picture(runs: Runs, path: Path) -> None:
    """Draw accuracy over MB sent, an enlarged view of the final values, and levels of layers."""
    frameworks = list(dict.fromkeys(framework for framework, _ in runs))
    first = next(iter(runs.values()))[0]
    size, heights = (6.6 * len(frameworks), 14.2), [1.45, 1, *[0.85] * len(POLICIES)]
    with figure(path, size, len(heights), len(frameworks), height_ratios=heights) as (canvas, axes):
        for column, framework in enumerate(frameworks):
            mine = {method: found for (which, method), found in runs.items() if which == framework}
            _curves(axes[0][column], FRAMEWORKS[framework], mine)
            _ends(axes[1][column], mine)
            for axis, (method, name) in zip(axes[2:, column], POLICIES.items(), strict=True):
                _levels(axis, name, mine[method][0])
        _explain_levels(canvas, runs[frameworks[0], "accordion"][0])
        canvas.suptitle(
            f"{first['settings']['data'].capitalize()}, {first['ranks']} workers: "
            "test accuracy and bytes sent",
            fontsize=14,
        )


def _curves(axis: Any, title: str, runs: Mapping[str, Sequence[Row]]) -> None:
    """Draw the test accuracy after each epoch over the megabytes sent so far, means over seeds."""
    for method, results in runs.items():
        epochs = pd.concat(pd.DataFrame(result["epochs"]) for result in results)
        means = epochs.groupby("epoch")[["sent", "accuracy"]].mean()
        sent, accuracy = means["sent"].to_numpy() / 1e6, 100 * means["accuracy"].to_numpy()
        line, marker = STYLES[method]
        text = f"{label(method, results[0])}: ends at {accuracy[-1]:.1f} %, {sent[-1]:.1f} MB"
        axis.plot(
            sent, accuracy, ls=line, color=COLOURS[method], lw=1.6, label=text, marker=marker,
            markevery=[len(sent) - 1], ms=9, mec="white", clip_on=False,
        )  # fmt: skip
    count = len(results)
    axis.set(xscale="log", ylim=(0, 101))
    axis.set_xlabel("MB sent by each worker since the start (logarithmic)")
    axis.set_ylabel("test accuracy after each epoch (%)")
    axis.xaxis.set_major_formatter("{x:g}")
    axis.set_title(f"{title}, {f'means of {count} seeds' if count > 1 else 'one seed'}")
    axis.grid(alpha=0.3, which="major")
    axis.legend(loc="lower right", fontsize=8.5, labelspacing=0.35)


def _ends(axis: Any, runs: Mapping[str, Sequence[Row]]) -> None:
    """Draw the last epoch of each seed, and means; uncompressed, far to the right, as a line."""
    for method, results in runs.items():
        last, (line, marker) = [result["epochs"][-1] for result in results], STYLES[method]
        sent = pd.Series([row["sent"] / 1e6 for row in last])
        accuracy = pd.Series([100 * row["accuracy"] for row in last])
        mean = (sent.mean(), accuracy.mean())
        if method == "uncompressed":
            axis.axhline(mean[1], ls=line, color=COLOURS[method], lw=1.6)
            axis.annotate(
                f"uncompressed: {mean[0]:.0f} MB", (0, mean[1]), xytext=(5, 4),
                textcoords="offset points", fontsize=9, color=COLOURS[method],
            )  # fmt: skip
            continue
        if len(results) > 1:
            axis.plot(sent, accuracy, marker, color=COLOURS[method], ms=5, alpha=0.4, mec="none")
        axis.plot(*mean, marker, color=COLOURS[method], ms=11, mec="white", zorder=5)
    axis.margins(0.12)
    axis.set_xlim(left=0)
    axis.set_xlabel("MB sent by each worker in the entire training")
    axis.set_ylabel("final test accuracy (%)")
    more = ": seeds (small) and means" if len(results) > 1 else ""
    axis.set_title(f"Final values, enlarged{more}", loc="left", fontsize=11)
    axis.grid(alpha=0.3)


def _levels(axis: Any, policy: str, result: Row) -> None:
    """Draw each layer's level in each epoch."""
    rows, names = result["epochs"], sorted(result["epochs"][0]["levels"], key=_natural)
    for place, name in enumerate(names):
        for row in rows:
            low = row["levels"][name] == 0
            axis.barh(
                place, 1, left=row["epoch"] + 0.5, height=0.86, linewidth=0,
                color=COLOURS["low"] if low else COLOURS["high"], alpha=1 if low else 0.35,
            )  # fmt: skip
    falls = [b["epoch"] for a, b in zip(rows, rows[1:], strict=False) if b["lr"] < 0.9 * a["lr"]]
    if result["settings"]["schedule"] == "drops":
        for epoch in falls:
            axis.axvline(epoch + 0.5, color="black", lw=1.5)
            axis.annotate(
                "learning rate falls", (epoch + 0.5, 1), xycoords=("data", "axes fraction"),
                xytext=(0, 3), textcoords="offset points", ha="center", fontsize=9,
            )  # fmt: skip
    axis.set_yticks(range(len(names)), [str(place + 1) for place in range(len(names))])
    axis.set(xlim=(0.5, len(rows) + 0.5), ylim=(len(names) - 0.4, -0.6))
    axis.set_xlabel("epoch")
    axis.set_ylabel("layer, from the input")
    axis.set_title(
        f"{policy}'s level of each layer, seed {result['settings']['seed']}", loc="left",
        fontsize=11, pad=16,
    )  # fmt: skip


def _explain_levels(figure: Any, result: Row) -> None:
    """Add the legend of the levels."""
    from matplotlib.patches import Patch

    levels = _level_names(result["settings"]["compression"])
    marks = [
        Patch(color=COLOURS["low"], label=f"low compression, {levels['low']}"),
        Patch(color=COLOURS["high"], alpha=0.35, label=f"high compression, {levels['high']}"),
    ]
    figure.legend(handles=marks, loc="outside lower center", ncols=2, fontsize=10)


def _level_names(wanted: Mapping[str, Any]) -> dict[str, str]:
    """Return the levels of Accordion's settings as calls, such as "PowerSGD(4)"."""
    return {level: _call(wanted[level]) for level in ("low", "high")}


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a sort key that puts layer_2 before layer_10."""
    return [
        (int(part or 0), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)
    ]
