"""Generation of the pages in `docs/` from templates with prose and from results.

A template is Markdown with placeholders such as `$table`; `$$` is a dollar sign.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from string import Template
from typing import TypeAlias

import pandas as pd

from examples.results import Row

Table: TypeAlias = list[dict[str, str]]
"""The cells of each row of a table, by their heads."""

TEMPLATES = Path(__file__).resolve().parent / "templates"
END = "<!-- end of what was measured -->"
"""Mark of a page after which hand-written notes begin."""

NOISY = 0.3
"""Number of cores in use by other processes above which a measurement counts as noisy."""


def render(template: str, **values: object) -> str:
    """Fill in a template; drop the paragraph of a placeholder with an empty value.

    Args:
        template: path of the file below `templates/`, without its suffix.
        values: text for each placeholder.
    """
    text = Template((TEMPLATES / f"{template}.md").read_text()).substitute(values)
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def join(parts: Sequence[str]) -> str:
    """Join non-empty paragraphs with blank lines."""
    return "\n\n".join(part for part in parts if part)


def write_page(path: Path, text: str) -> None:
    """Write a page of results; keep the notes after `END` from an existing page."""
    mark, notes = path.read_text().partition(END)[1:] if path.is_file() else ("", "")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n\n{mark}{notes}" if mark else f"{text}\n")


SECTION = "section"
"""Column of a CSV with the heading of a row's table, and where it has two, "A / B"."""


def write_tables(path: Path, tables: Mapping[str, pd.DataFrame]) -> None:
    """Write tables with the same columns as one CSV, by the headings that they would have."""
    path.parent.mkdir(parents=True, exist_ok=True)
    parts = [table.assign(**{SECTION: title}) for title, table in tables.items()]
    rows = pd.concat(parts).set_index(SECTION)
    rows.to_csv(path)


def read_tables(page: Path) -> dict[tuple[str, ...], Table]:
    """Return the rows of the tables of a page or a CSV, by the headings above them.

    The headings are those from the first level on, which a CSV does not have.
    """
    if page.suffix == ".csv":
        by_title = pd.read_csv(page, dtype=str).fillna("").groupby(SECTION, sort=False)
        return {
            ("", *str(title).split(" / ")): rows.drop(columns=SECTION).to_dict("records")
            for title, rows in by_title
        }
    found: dict[tuple[str, ...], Table] = {}
    path: tuple[str, ...] = ()
    head: list[str] = []
    for line in page.read_text().splitlines():
        if match := re.match(r"(#+) (.*)", line):
            path = (*path[: len(match[1]) - 1], match[2])
        if not line.startswith("|"):
            head = []
            continue
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if not head:
            head = cells
        elif not re.fullmatch(r"[-:|]+", line):
            found.setdefault(path, []).append(dict(zip(head, cells, strict=False)))
    return found


# ------------------------------------------------------------------------------------------ numbers
def digits(count: int) -> Callable[[float], str]:
    """Return a function that formats a number with `count` decimal places."""
    return lambda value: f"{value:.{count}f}"


def significant(value: float) -> str:
    """Format a number with two or three digits."""
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def spread(
    values: Sequence[float],
    form: Callable[[float], str] = significant,
    middle: Callable[[Sequence[float]], float] = statistics.median,
    to: str = "-",
) -> str:
    """Format the median (or another mean) and the range of `values`; a dash if there are none.

    Args:
        values: one value per repetition or seed; a single value has no range.
        form: function that formats a number.
        middle: function that computes the number before the range.
        to: separator between the ends of the range.
    """
    if len(values) == 0:
        return "-"
    least, most = form(min(values)), form(max(values))
    return f"{form(middle(values))} ({least}{to}{most})" if len(values) > 1 else least


def interval(values: Sequence[float], form: Callable[[float], str] = significant) -> str:
    """Format the median of `values` and its bootstrap interval at 95 %; a dash if there are none.

    Args:
        values: one value per repetition; fewer than three have no interval.
        form: function that formats a number.
    """
    if len(values) < 3 or len(set(values)) == 1:
        return spread(values, form)
    from scipy.stats import bootstrap

    found = bootstrap((values,), statistics.median, vectorized=False, method="percentile", rng=0)
    low, high = found.confidence_interval
    return f"{form(statistics.median(values))} [{form(low)}, {form(high)}]"


# -------------------------------------------------------------------------------- the environment
def machine(found: Row) -> dict[str, object]:
    """Return the placeholders that describe the machine: date, cores, CPU, kernel, versions."""
    versions = ", ".join(f"{name} {number}" for name, number in found["versions"].items())
    return {**found, "versions": versions}


def hosts(settings: Row) -> dict[str, object]:
    """Return the placeholders of a launch on limited links: hosts, ranks, Horovod's backend."""
    return {
        "hosts": settings["hosts"],
        "ranks": settings["hosts"] * settings["per_host"],
        "backend": settings["backend"].upper().replace("GLOO", "Gloo"),
    }


def noise(cores: Sequence[float], unit: str, work: str) -> str:
    """Return a sentence about the load that other processes put on the machine.

    Args:
        cores: number of cores that other processes used, for each measurement.
        unit: name of a measurement, such as a repetition.
        work: work of the benchmark that is counted as load of other processes.
    """
    noisy = sum(count > NOISY for count in cores)
    return (
        f"Other processes kept {max(0.0, statistics.median(cores)):.1f} cores busy in the median "
        f"{unit}, and more than {NOISY} cores in {noisy} of {len(cores)} (including {work})."
    )
