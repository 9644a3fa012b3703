"""Text of docs/performance.md: method and results."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

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

BASELINES = ((BETWEEN, SHARDED), (OVER, DDP), (OURS, GROUPED))
"""Prefixes of methods, each with the uncompressed training that the overview compares them with."""


def text(found: Sequence[Row]) -> str:
    """Return the text of the page, which contains only what the results hold."""
    places = report.machine(found[0]["machine"]) | report.hosts(found[0]["settings"])
    return report.render(
        "performance/page",
        overview=as_markdown(pd.concat(map(overview, found)).fillna("-")),
        networks="\n".join(map(network, found)),
        steady=STEADY,
        cautious=CAUTIOUS,
        **places,
    )


def write(found: Sequence[Row], folder: Path) -> None:
    """Write the page, and next to it the tables of all methods as CSV."""
    report.write_page(folder / "performance.md", text(found))
    for name, made in TABLES.items():
        parts = {title(result) + end: x for result in found for end, x in made(result).items()}
        report.write_tables(folder / "data" / f"performance_{name}.csv", parts)


def overview(found: Row) -> pd.DataFrame:
    """Return a row for each rate: how many times as fast compressed steps are, in the median."""
    methods, rates = list(found["equal"]), found["settings"]["rates"]
    prefix, base = next((pair for pair in BASELINES if pair[1] in methods), ("", ""))
    rows = [
        {"network": title(found), "rate": describe(rate, found["settings"])}
        | {
            method.removeprefix(prefix): report.spread(ratios).partition(" ")[0]
            for method in methods
            if prefix and method.startswith(prefix)
            if len(ratios := tables.ratios(found, method, base, rate))
        }
        for rate in rates
    ]
    words = ["fp16", "powersgd:1", "powersgd:4", "powersgd:4,alternate", "topk:0.01"]
    return pd.DataFrame(rows).reindex(columns=["network", "rate", *words])


def title(found: Row) -> str:
    """Return the title of one framework and network."""
    settings = found["settings"]
    return f"{FRAMEWORKS[settings['framework']]}, `{settings['model']}`{_rig(settings)}"


def network(found: Row) -> str:
    """Return the item about one framework and network."""
    settings, model = found["settings"], found["model"]
    silent = SILENT in found["equal"] and not found["equal"][SILENT]
    control = found["machine"].get("congestion_control")
    return report.render(
        "performance/network",
        title=title(found),
        parameters=f"{model['parameters']:,}",
        tensors=model["tensors"],
        batch=settings["batch"],
        repetitions=settings["repetitions"],
        goodput=", ".join(f"{x * 8 / 1e6:.0f}" for x in found["bandwidth"].values()),
        congestion_control=f" with the congestion control {control}" if control else "",
        noise=report.noise(
            [row["foreign"] for row in found["turns"]], "repetition", "the work of the links"
        ),
        notes=report.render("performance/silent", grouped=GROUPED) if silent else "",
    )


def _rig(settings: Row) -> str:
    """Describe distances, and hosts with several ranks, as an appendix to a title."""
    hosts, ranks = settings["hosts"], settings["per_host"]
    parts = [describe_distance(settings), f"{hosts} hosts with {ranks} ranks each"]
    return "".join(f", {part}" for part in parts[: 2 if ranks > 1 else 1] if part)


def steps(found: Row) -> dict[str, pd.DataFrame]:
    """Return the table of each rate, with the distinct verdicts of gates."""
    made = {}
    for rate in found["settings"]["rates"]:
        table = tables.table(found, rate)
        table["verdicts"] = [verdicts(found, rate, method) for method in table["method"]]
        made[f" / {describe(rate, found['settings'])}"] = table
    return made


def verdicts(found: Row, rate: str, method: str) -> str:
    """Return the distinct verdicts of a method's gate at a rate."""
    rows = [row for row in found["turns"] if (row["rate"], row["method"]) == (rate, method)]
    return "; ".join(dict.fromkeys(row["verdict"] for row in rows if "verdict" in row))


def speedups(found: Row) -> dict[str, pd.DataFrame]:
    """Return the table of speedups, with their ranges."""
    methods = list(found["equal"])
    return {"": tables.comparison(found, pairs(found["settings"]["framework"], methods))}


def excesses(found: Row) -> dict[str, pd.DataFrame]:
    """Return the table that compares excesses over computing alone with DDP's own hooks."""
    table = tables.excess(found, tables.excess_pairs(list(found["equal"])))
    return {"": table} if found["settings"]["framework"] == "torch" and len(table) else {}


TABLES = {"steps": steps, "speedups": speedups, "excesses": excesses}
"""The tables of `data/performance_NAME.csv`, by the ends of their titles."""


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
