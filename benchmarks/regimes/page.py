"""The page of results."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd

from accordion_hvd.policies.displacement import BOUND
from benchmarks import report
from benchmarks.regimes import bounds, real
from benchmarks.regimes.methods import BATCHES, METHODS, methods_of
from benchmarks.regimes.studies import STUDIES, Study
from benchmarks.regimes.training import RANKS, Outcome
from examples.results import Row
from examples.tables import as_markdown, format_table

Seeds = Mapping[int, Outcome]
Found = Mapping[str, Seeds]
"""Method -> seed -> result."""

RIVALS = (
    ("accordion", "accordion-first"),
    ("accordion", "accordion-random"),
    ("accordion", "middle"),
    ("accordion", "rate"),
    ("displacement", "displacement-first"),
    ("displacement", "rate"),
    ("displacement", "accordion"),
)
"""Pairs of methods whose scores the first table compares, within seeds."""


def write(path: Path, outcomes: Sequence[Outcome]) -> None:
    """Write the page."""
    report.write_page(path, text(outcomes))


def text(outcomes: Sequence[Outcome]) -> str:
    """Return the text of the page."""
    known: dict[str, Sequence[str]] = {name: methods_of(x) for name, x in STUDIES.items()}
    known |= {name: bounds.METHODS for name in bounds.STUDIES}
    known |= {name: study.methods for name, study in real.STUDIES.items()}
    found = {name: _by_method(name, methods, outcomes) for name, methods in known.items()}
    sections = [_section(STUDIES[name], found[name]) for name in STUDIES if found[name]]
    rows = [row for name in STUDIES if found[name] for row in rivals(STUDIES[name], found[name])]
    columns = {
        "network": "{study}", "method": "{method}", "compared with": "{rival}", "MB": "{bytes}",
        "better by": "{better}",
    }  # fmt: skip
    return report.render(
        "results/page",
        ranks=RANKS,
        rivals=as_markdown(format_table(columns, rows), left=(0, 1, 2)) if rows else "",
        studies=report.join(sections),
        batches=_batches(found),
        bounds=_bounds(found),
        real=_real(found),
    )


def _by_method(study: str, methods: Sequence[str], outcomes: Sequence[Outcome]) -> Found:
    """Return the results of a study; methods keep their order."""
    found: dict[str, dict[int, Outcome]] = {}
    for name in methods:
        seeds = {o.seed: o for o in outcomes if (o.study, o.method) == (study, name)}
        if seeds:
            found[name] = dict(sorted(seeds.items()))
    return found


# ---------------------------------------------------------------------------------------- sections
def _section(study: Study, found: Found) -> str:
    """Return the section of a study, with a table of its methods."""
    batch = study.batch * RANKS
    columns = {
        "method": "{method}", "test loss" if study.losses else "test accuracy in %": "{score}",
        "MB": "{megabytes}", "of the bytes of low": "{part}", "low in": "{low}",
        "changes": "{changes}", "seeds": "{seeds}",
    }  # fmt: skip
    names = [name for name in found if name not in BATCHES]
    rows = [_row(METHODS[name].label, name, found, study.losses) for name in names]
    lengths = sorted({o.epochs for seeds in found.values() for o in seeds.values()})
    return report.render(
        "results/study",
        title=study.title,
        about=study.about,
        epochs=" or ".join(map(str, lengths)),
        batch=batch,
        lr=f"{study.lr:g}",
        low=study.low,
        middle=f", `{study.middle}` (middle)" if study.middle else "",
        high=study.high,
        interval=study.interval,
        table=as_markdown(format_table(columns, rows), left=(0,)),
    )


def _row(label: str, name: str, found: Found, losses: bool) -> Row:
    """Return the values of a row: means over seeds, with ranges."""
    seeds = list(found[name].values())
    low = [o.megabytes for o in found.get("low", {}).values()]
    sent = statistics.fmean(o.megabytes for o in seeds)
    chooses = any(o.changes for o in seeds)
    return {
        "method": label,
        "score": _mean([o.score for o in seeds], 3 if losses else 1),
        "megabytes": f"{sent:.1f}",
        "part": f"{sent / statistics.fmean(low):.0%}" if low else "-",
        "low": f"{statistics.fmean(o.low for o in seeds):.0%}" if chooses else "-",
        "changes": f"{statistics.fmean(o.changes for o in seeds):.0f}" if chooses else "-",
        "seeds": len(seeds),
    }


def _mean(values: Sequence[float], places: int) -> str:
    return report.spread(values, report.digits(places), statistics.fmean)


def rivals(study: Study, found: Found) -> list[Row]:
    """Return a row for each pair of `RIVALS`: differences within seeds, above 0 if better."""
    rows = []
    for name, rival in RIVALS:
        seeds = sorted(found.get(name, {}).keys() & found.get(rival, {}).keys())
        if not seeds:
            continue
        pairs = [(found[name][seed], found[rival][seed]) for seed in seeds]
        sign, places = (-1, 3) if study.losses else (1, 1)
        better = [sign * (one.score - other.score) for one, other in pairs]
        sent = [statistics.fmean(o.megabytes for o in side) for side in zip(*pairs, strict=True)]
        rows.append(
            {
                "study": study.title,
                "method": METHODS[name].label,
                "rival": METHODS[rival].label,
                "bytes": f"{sent[0]:.1f} and {sent[1]:.1f}",
                "better": report.spread(
                    better, f"{{:+.{places}f}}".format, statistics.fmean, " to "
                ),
            }
        )
    return rows


def _batches(found: Mapping[str, Found]) -> str:
    """Return the table of batch sizes."""
    rows = []
    for name, study in STUDIES.items():
        for method in ("none", *BATCHES):
            if study.grows and any(batch in found[name] for batch in BATCHES):
                seeds = list(found[name].get(method, {}).values())
                label = "small batches" if method == "none" else BATCHES[method].label
                exchanges = [float(o.steps) for o in seeds]
                rows.append(
                    {
                        "study": study.title,
                        "method": label,
                        "score": _mean([o.score for o in seeds], 1),
                        "steps": report.spread(exchanges, report.digits(0), statistics.fmean),
                        "megabytes": _mean([o.megabytes for o in seeds], 0),
                    }
                )
    columns = {
        "network": "{study}", "batches": "{method}", "test accuracy in %": "{score}",
        "exchanges": "{steps}", "MB": "{megabytes}",
    }  # fmt: skip
    table = as_markdown(format_table(columns, rows))
    return report.render("results/batches", table=table) if rows else ""


def _bounds(found: Mapping[str, Found]) -> str:
    """Return the section about the bounds of Displacement."""
    names = [name for name in bounds.STUDIES if found[name]]
    if not names:
        return ""
    first = {"low": "low"} | {bounds.bounded(x): f"{x:g}" for x in bounds.BOUNDS}
    second = {"middle": "middle", "rate": "until half the rate"}
    second |= {bounds.released(1 / 6): "1/6", bounds.bounded(BOUND): "1/3", bounds.released(1): "1"}
    scores = [[o.score for o in seeds.values()] for n in names for seeds in found[n].values()]
    widest = max(abs(score - statistics.fmean(same)) for same in scores for score in same)
    return report.render(
        "results/bounds",
        bounds=_cells(names, found, first | {"high": "high"}),
        releases=_cells(names, found, second),
        default=f"{BOUND:g}",
        seeds=max(map(len, scores)),
        widest=f"{widest:.1f}",
    )


def _cells(names: Sequence[str], found: Mapping[str, Found], heads: Mapping[str, str]) -> str:
    """Return a table with a row for each study; the cells are mean accuracies and MB."""
    rows = []
    for name in names:
        row = {"settings": bounds.STUDIES[name].title}
        for method, head in heads.items():
            seeds = found[name].get(method, {}).values()
            score = statistics.fmean(o.score for o in seeds) if seeds else 0.0
            sent = statistics.fmean(o.megabytes for o in seeds) if seeds else 0.0
            row[head] = f"{score:.1f} @ {sent:.1f}" if seeds else "-"
        rows.append(row)
    return as_markdown(pd.DataFrame(rows), left=(0,))


def _real(found: Mapping[str, Found]) -> str:
    """Return the section of trainings on real ranks."""
    parts = [_real_study(name, found[name]) for name in real.STUDIES if found[name]]
    return report.render("results/real", sections=report.join(parts)) if parts else ""


def _real_study(name: str, found: Found) -> str:
    """Return the table of a study on real ranks."""
    columns = {
        "method": "{method}", "test accuracy in %": "{score}", "MB": "{megabytes}",
        "low in": "{low}", "changes": "{changes}", "seeds": "{seeds}",
    }  # fmt: skip
    rows = [_row(real.METHODS[method][0], method, found, False) for method in found]
    table = as_markdown(format_table(columns, rows), left=(0,))
    return f"### {real.STUDIES[name].title}\n\n{table}"
