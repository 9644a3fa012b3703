"""Pages of `docs/`: their prose stands in `templates/`, and results fill its places.

A template is Markdown with places such as `$table`; `$$` is a dollar sign.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from string import Template

from examples.results import Row

TEMPLATES = Path(__file__).resolve().parent / "templates"
END = "<!-- end of what was measured -->"
"""What a page has after it was written by hand."""

NOISY = 0.3
"""Cores that other processes use, from which on a reader should know of it."""


def render(template: str, **values: object) -> str:
    """Fill in a template; where a value is empty, its paragraph is left out.

    Args:
        template: path of the file below `templates/`, without its ending.
        values: text for each place.
    """
    text = Template((TEMPLATES / f"{template}.md").read_text()).substitute(values)
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def join(parts: Sequence[str]) -> str:
    """Paragraphs below each other, without the empty ones."""
    return "\n\n".join(part for part in parts if part)


def write_page(path: Path, text: str) -> None:
    """Write a page of what was measured; what an older one says after `END` stays."""
    mark, notes = path.read_text().partition(END)[1:] if path.is_file() else ("", "")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n\n{mark}{notes}" if mark else f"{text}\n")


# ------------------------------------------------------------------------------------------ numbers
def digits(count: int) -> Callable[[float], str]:
    """Return a function that writes a number with so many digits after the point."""
    return lambda value: f"{value:.{count}f}"


def significant(value: float) -> str:
    """Write a number with two or three digits."""
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def spread(
    values: Sequence[float],
    told: Callable[[float], str] = significant,
    middle: Callable[[Sequence[float]], float] = statistics.median,
    to: str = "-",
) -> str:
    """The median (or another mean) and the range; a dash if there are no values.

    Args:
        values: one for each repetition or seed; a single one has no range.
        told: how a number is written.
        middle: what stands before the range.
        to: what stands between its ends.
    """
    if not values:
        return "-"
    if len(values) == 1:
        return told(values[0])
    return f"{told(middle(values))} ({told(min(values))}{to}{told(max(values))})"


# -------------------------------------------------------------------------------- what it ran on
def machine(found: Row) -> dict[str, object]:
    """The machine's places in a template: date, cores, cpu, kernel, python, versions."""
    versions = ", ".join(f"{name} {number}" for name, number in found["versions"].items())
    return {**found, "versions": versions}


def hosts(settings: Row) -> dict[str, object]:
    """The places of a launch on limited links: hosts, ranks, and Horovod's backend."""
    return {
        "hosts": settings["hosts"],
        "ranks": settings["hosts"] * settings["per_host"],
        "backend": settings["backend"].upper().replace("GLOO", "Gloo"),
    }


def noise(cores: Sequence[float], unit: str, work: str) -> str:
    """What else the machine did.

    Args:
        cores: that others used, in each unit.
        unit: what was measured at a time, such as a turn.
        work: what counts as others' although it is not.
    """
    loud = sum(one > NOISY for one in cores)
    return (
        f"Other processes kept {max(0.0, statistics.median(cores)):.1f} cores busy in the median "
        f"{unit}, and more than {NOISY} cores in {loud} of {len(cores)} (including {work})."
    )
