"""Text of docs/performance.md: method and results."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks import report
from benchmarks.netbench import tables
from benchmarks.netbench.contestants import (
    ACCORDION,
    BETWEEN,
    CAUTIOUS,
    COMPILED,
    COMPUTE,
    DDP,
    GATED,
    GROUPED,
    HOOK,
    OURS,
    OVER,
    SHARDED,
    SILENT,
    STEADY,
    STOCK,
)
from benchmarks.netbench.links import describe, describe_distance
from examples.report import FRAMEWORKS
from examples.results import Row
from examples.tables import as_markdown


def text(found: Sequence[Row]) -> str:
    """Return the text of the page, which contains only what the results hold."""
    places = report.machine(found[0]["machine"]) | report.hosts(found[0]["settings"])
    return report.render(
        "performance/page",
        frameworks=report.join([section(result) for result in found]),
        steady=STEADY,
        cautious=CAUTIOUS,
        **places,
    )


def section(found: Row) -> str:
    """Return the section of one framework."""
    settings, model = found["settings"], found["model"]
    framework, methods = settings["framework"], list(found["equal"])
    silent = SILENT in methods and not found["equal"][SILENT]
    return report.render(
        "performance/framework",
        framework=FRAMEWORKS[framework],
        rig=_rig(settings),
        model=settings["model"],
        parameters=f"{model['parameters']:,}",
        tensors=model["tensors"],
        batch=settings["batch"],
        repetitions=settings["repetitions"],
        noise=report.noise(
            [row["foreign"] for row in found["turns"]], "repetition", "the work of the links"
        ),
        notes=report.render("performance/silent", grouped=GROUPED) if silent else "",
        comparison=as_markdown(tables.comparison(found, pairs(framework, methods))),
        excess=on_excess(found, methods) if framework == "torch" else "",
        limits=as_markdown(tables.limits(found)),
        rates=report.join([at_rate(found, rate) for rate in settings["rates"]]),
    )


def _rig(settings: Row) -> str:
    """Describe distances, and hosts with several ranks, as an appendix to a title."""
    hosts, ranks = settings["hosts"], settings["per_host"]
    parts = [describe_distance(settings), f"{hosts} hosts with {ranks} ranks each"]
    return "".join(f", {part}" for part in parts[: 2 if ranks > 1 else 1] if part)


def on_excess(found: Row, methods: Sequence[str]) -> str:
    """Return the section that compares excesses over computing alone with DDP's own hooks."""
    table = tables.excess(found, tables.excess_pairs(methods))
    return report.render("performance/excess", table=as_markdown(table)) if len(table) else ""


def at_rate(found: Row, rate: str) -> str:
    """Return the table of a rate and the gates' verdicts."""
    control = found["machine"].get("congestion_control")
    return report.render(
        "performance/rate",
        rate=describe(rate, found["settings"]),
        goodput=f"{found['bandwidth'][rate] * 8 / 1e6:.0f}",
        congestion_control=f" with the congestion control {control}" if control else "",
        table=as_markdown(tables.table(found, rate)),
        verdicts=verdicts(found, rate),
    )


def verdicts(found: Row, rate: str) -> str:
    """Return the distinct verdicts of gates at a rate."""
    rows = [row for row in found["turns"] if row["rate"] == rate]
    lines = dict.fromkeys(row["verdict"] for row in rows if "verdict" in row)
    return "\n".join(f"- {line}" for line in lines)


def pairs(framework: str, methods: Sequence[str]) -> list[tuple[str, str]]:
    """Return the pairs of methods to compare.

    A method of this package is compared with what a user has now, and with other methods that use
    the same compression.
    """
    ours = [method for method in methods if method.startswith(OURS)]
    if framework == "keras":
        compiled = [(COMPILED, COMPUTE)] if COMPILED in methods else []
        return compiled + [(method, GROUPED) for method in ours]
    found = [(method, STOCK) for method in ours]
    found += [(method, SHARDED) for method in methods if method.startswith(BETWEEN)]
    found += [(method, DDP) for method in methods if method.startswith((OVER, HOOK))]
    peers = {f"{OURS}fp16": [f"{STOCK} fp16", f"{DDP} fp16"], f"{OURS}dense": [DDP]}
    peers |= {
        f"{OURS}{word}": [f"{DDP} {word}"] for word in ("powersgd:1", "powersgd:2", "powersgd:4")
    }
    peers[OURS + ACCORDION] = [f"{OURS}powersgd:1", f"{DDP} powersgd:1"]
    peers[OURS + GATED] = [f"{OURS}{word}" for word in ("dense", "fp16", "powersgd:1")]
    return found + [(method, peer) for method in ours for peer in peers.get(method, [])]
