"""Results of several runs, as one table and one picture."""

from __future__ import annotations

import re
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from accordion_hvd import parse
from examples.results import Row

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


def table(runs: Runs) -> list[list[str]]:
    """Return head and rows; numbers are means over seeds, and the range of the accuracy."""
    head = ["framework", "compression", "test accuracy", "range", "MB sent/worker", "ratio"]
    rows = [[*head, "seconds"]]
    for (framework, method), results in runs.items():
        accuracies = [result["epochs"][-1]["accuracy"] for result in results]
        ratio = _mean(result["stats"]["ratio"] or 0.0 for result in results)
        rows.append(
            [
                FRAMEWORKS[framework],
                label(method, results[0]),
                f"{_mean(accuracies):.1%}",
                f"{100 * min(accuracies):.1f}-{max(accuracies):.1%}" if results[1:] else "1 seed",
                f"{_mean(result['stats']['sent'] for result in results) / 1e6:.2f}",
                f"{ratio:.1f}" if ratio else "-",
                f"{_mean(result['seconds'] for result in results):.1f}",
            ]
        )
    return rows


def _mean(values: Iterable[float]) -> float:
    return statistics.fmean(values)


def tabulate(columns: Mapping[str, str], rows: Iterable[Row]) -> list[list[str]]:
    """Return head and rows, given each column's head and cell format ("{seconds:.1f}")."""
    return [list(columns), *([cell.format(**row) for cell in columns.values()] for row in rows)]


def as_text(rows: Sequence[Sequence[str]]) -> str:
    """Format a table as aligned text."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [c.ljust(w) if i < 2 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths))]  # noqa: B905
        lines.append("  ".join(cells).rstrip())
    lines.insert(1, "-" * max(map(len, lines)))
    return "\n".join(lines)


def as_markdown(rows: Sequence[Sequence[str]], left: Collection[int] = (0, 1)) -> str:
    """Format a table as Markdown. Columns with indices in `left` are left-aligned, others right."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    rule = "|".join("---" if column in left else "---:" for column in range(len(rows[0])))
    return "\n".join([lines[0], f"|{rule}|", *lines[1:]])


# -------------------------------------------------------------------------------------- the picture
def picture(runs: Runs, path: Path) -> None:
    """Draw accuracy over MB sent, an enlarged view of the final values, and levels of layers."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    frameworks = list(dict.fromkeys(framework for framework, _ in runs))
    first = next(iter(runs.values()))[0]
    figure, axes = plt.subplots(
        2 + len(POLICIES), len(frameworks), figsize=(6.6 * len(frameworks), 14.2), squeeze=False,
        height_ratios=[1.45, 1, *[0.85] * len(POLICIES)], layout="constrained",
    )  # fmt: skip
    for column, framework in enumerate(frameworks):
        mine = {method: found for (which, method), found in runs.items() if which == framework}
        _curves(axes[0][column], FRAMEWORKS[framework], mine)
        _ends(axes[1][column], mine)
        for axis, (method, name) in zip(axes[2:, column], POLICIES.items(), strict=True):
            _levels(axis, name, mine[method][0])
    _explain_levels(figure, runs[frameworks[0], "accordion"][0])
    figure.suptitle(
        f"{first['settings']['data'].capitalize()}, {first['ranks']} workers: "
        "test accuracy and bytes sent",
        fontsize=14,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _curves(axis: Any, title: str, runs: Mapping[str, Sequence[Row]]) -> None:
    """Draw the test accuracy after each epoch over the megabytes sent so far, means over seeds."""
    for method, results in runs.items():
        sent, accuracy = [
            [_mean(row[key] for row in rows) * factor for rows in _epochs(results)]
            for key, factor in (("sent", 1e-6), ("accuracy", 100))
        ]
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
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set_title(f"{title}, {f'means of {count} seeds' if count > 1 else 'one seed'}")
    axis.grid(alpha=0.3, which="major")
    axis.legend(loc="lower right", fontsize=8.5, labelspacing=0.35)


def _epochs(results: Sequence[Row]) -> Iterable[tuple[Row, ...]]:
    """Yield the rows of each epoch, one per seed."""
    return zip(*(result["epochs"] for result in results), strict=True)


def _ends(axis: Any, runs: Mapping[str, Sequence[Row]]) -> None:
    """Draw the last epoch of each seed, and means; uncompressed, far to the right, as a line."""
    for method, results in runs.items():
        last, (line, marker) = [result["epochs"][-1] for result in results], STYLES[method]
        sent, accuracy = (
            [row["sent"] / 1e6 for row in last],
            [100 * row["accuracy"] for row in last],
        )
        mean = (_mean(sent), _mean(accuracy))
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
