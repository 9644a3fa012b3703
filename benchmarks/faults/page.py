"""The page docs/reliability.md."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from benchmarks.faults.cases import (
    CASES,
    DEAD,
    EXPECTED,
    REFUSED,
    SECTIONS,
    SILENT,
    STEPS,
    TIMEOUT,
    Case,
)
from benchmarks.report import join, machine, render, write_page
from examples.tables import as_markdown, format_table

Row = dict[str, Any]

_WIDEST = 130  # characters of an error on the page
_GISTS = (
    r"(RanksDisagree|PayloadError|ReplicasDiffer): (.*)",
    r"(RankLost): (.*?):",
    r"(ConnectionLost): .*?\(([^;]*);",
    r"(a payload does not decode; sent by ranks\] \[\d+\])",
    r"(Horovod has been shut down)",
)
"""Regular expressions whose groups are the parts of an error that say what happened."""

_FOLDERS = re.compile(r"(?:/[^\s/:'\"]+){2,}/")
"""Folders of a path, which differ between machines."""

COLUMNS = {
    "case": "{title}",
    "framework": "{framework}",
    "launcher": "{launcher}",
    "what happened": "{happened}",
    "seconds": "{seconds}",
    "steps lost": "{lost}",
    "weights equal": "{equal}",
    "met": "{met}",
}


def write(found: Row, path: Path) -> None:
    """Write the page, with the results that there are."""
    rows = current(found["rows"])
    sections = [section(title, cases, rows) for title, cases in SECTIONS.items()]
    text = render(
        "reliability/page",
        **machine(found["machine"]),
        **counts(rows),
        dead_limit=f"{DEAD:g}",
        silent_limit=f"{SILENT:g}",
        timeout=TIMEOUT,
        steps=STEPS,
        sections=join(sections),
        missed=missed(rows),
    )
    write_page(path, text)


def current(rows: dict[str, Row]) -> dict[str, Row]:
    """Return the results of runs that are in the table of cases, in its order."""
    keys = [f"{case.name}/{f}/{launcher}" for case in CASES.values() for f, launcher in case.runs()]
    return {key: rows[key] for key in keys if key in rows}


def counts(rows: dict[str, Row]) -> Row:
    """Return the placeholders of the summary: numbers of cases and runs, longest times."""
    pairs = [(CASES[key.partition("/")[0]], row) for key, row in rows.items()]
    dead = [row["seconds"] or 0.0 for case, row in pairs if case.action == "kill"]
    silent = [row["seconds"] or 0.0 for case, row in pairs if case.silent]
    hung = [case for case, row in pairs if row["hung"]]
    unequal = sum(not row["equal"] for case, row in pairs if case.expected != REFUSED)
    wrong = sum(row["wrong"] for row in rows.values())
    found = {
        "cases": len({case.name for case, _ in pairs}),
        "runs": len(rows),
        "minutes": f"{sum(row['took'] for row in rows.values()) / 60:.0f}",
        "met": sum(not row["problem"] for row in rows.values()),
        "dead": f"{max(dead, default=0):.1f}",
        "dead_runs": len(dead),
        "dead_met": _met(
            max(dead, default=0) <= DEAD and not any(case.action == "kill" for case in hung)
        ),
        "silent": f"{max(silent, default=0):.1f}",
        "silent_runs": len(silent),
        "silent_hung": sum(case.silent for case in hung),
        "silent_met": _met(
            max(silent, default=0) <= SILENT and not any(case.silent for case in hung)
        ),
    }
    for name, number in (("hangs", len(hung)), ("wrong", wrong), ("unequal", unequal)):
        found |= {name: number, f"{name}_met": _met(number == 0)}
    return found


def _met(met: bool) -> str:
    return "met" if met else "**missed**"


def section(title: str, cases: tuple[Case, ...], rows: dict[str, Row]) -> str:
    """Return the heading and the table of a section; empty without results."""
    lines = []
    for case in cases:
        for framework, launcher in case.runs():
            row = rows.get(f"{case.name}/{framework}/{launcher}")
            if row is not None:
                place = {"title": case.title, "framework": framework, "launcher": launcher}
                lines.append({**place, **cells(case, row)})
    table = as_markdown(format_table(COLUMNS, lines), left=range(4))
    return f"### {title}\n\n{table}" if lines else ""


def cells(case: Case, row: Row) -> dict[str, str]:
    """Return the cells of a row; weights need not be equal where ranks refuse to train."""
    equal = "yes" if row["equal"] else "no"
    seconds = "" if row["seconds"] is None else f"{row['seconds']:.1f}"
    return {
        "happened": happened(row),
        "seconds": seconds,
        "lost": str(row["lost"]),
        "equal": "" if case.expected == REFUSED else equal,
        "met": "no" if row["problem"] else "yes",
    }


def happened(row: Row) -> str:
    """Return what happened, with the gist of the first error."""
    gist = phrase(row["errors"][0]) if row["errors"] else ""
    return f"{row['happened']}: {gist}".replace("|", "\\|") if gist else row["happened"]


def phrase(error: str) -> str:
    """Return the part of an error that says what happened, at most a line long."""
    line = _FOLDERS.sub("", " ".join(error.split()))
    own = [match for pattern in _GISTS if (match := re.search(pattern, line))]
    line = ": ".join(own[0].groups()) if own else line
    return line if len(line) <= _WIDEST else line[: _WIDEST - 3] + "..."


def missed(rows: dict[str, Row]) -> str:
    """Return a list of the runs that do not meet their expectation; empty if all do."""
    lines = []
    for key, row in rows.items():
        name, framework, launcher = key.split("/")
        if row["problem"]:
            expected = EXPECTED[CASES[name].expected]
            lines.append(
                f"- {CASES[name].title}, {framework}, {launcher}: {row['problem']} "
                f"(expected: {expected})."
            )
    return "\n".join(lines)
