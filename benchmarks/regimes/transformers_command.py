"""Command line of `scripts/transformers.py` (`make bench-transformers`), and its page."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, field, fields
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats
from tqdm import tqdm

from accordion_hvd import check
from benchmarks import report
from benchmarks.regimes import transformers
from benchmarks.regimes.transformers import METHODS, STUDIES, Outcome
from examples.command_line import read_options, stop
from examples.data import DataError
from examples.tables import as_markdown, format_table

OWNER = "transformers.py"
TUNING = 0
"""Seed of the trainings that choose a method's rate; they are not reported."""

SEEDS = (1, 2, 3)
"""Seeds of the trainings that are reported; they have the best rate."""

RATES = (2.0**-14, 2.0**-3)
"""Learning rates beyond which tuning does not go."""

FRONT = (
    "Dense", "QSGD(4) in parts", "QSGD(3) in parts", "PowerSGD(16), fp16 factors",
    "PowerSGD(8), fp16 factors", "PowerSGD(4), fp16 factors", "PowerSGD(16)", "PowerSGD(4)",
    "Accordion(16, 4)", "Accordion(16, 4), fp16 factors", "Displacement(16, 4), fp16 factors",
    "DiLoCo(30), QSGD(2)",
)  # fmt: skip
"""Methods of the studies with longer trainings and with a larger network."""

SHORT = ("Dense", "QSGD(4) in parts", "PowerSGD(16), fp16 factors", "PowerSGD(4)")
LINES = {
    "Accordion(16, 4)": ("PowerSGD(16)", "PowerSGD(8)", "PowerSGD(4)"),
    "Accordion(16, 4), fp16 factors": tuple(f"PowerSGD({r}), fp16 factors" for r in (16, 8, 4)),
    "Displacement(16, 4), fp16 factors": tuple(f"PowerSGD({r}), fp16 factors" for r in (16, 8, 4)),
}
"""Policy -> the fixed methods that it is compared with, from low to high compression."""

GOALS = (10, 20, 200)
"""How many times fewer bytes the page names the least loss for."""


@dataclass(kw_only=True)
class Options:
    """Train Transformers with AdamW and many kinds of compression; write docs/transformers.md.

    Each method is tuned on a grid of learning rates, a factor of 2 apart, until the best rate is
    within the grid. Trainings whose results are in the table are not repeated.

    Args:
        studies: names of studies; by default all.
        methods: names of methods; by default all (those of the front in longer studies).
        short: four methods and 100 steps (about 20 minutes), with results in runs/transformers.
        processes: number of simultaneous trainings.
        table: file of the results.
        output: page to write.
    """

    studies: list[str] = field(default_factory=list)
    methods: list[str] = field(default_factory=list)
    short: bool = False
    processes: int = 2
    table: Path = Path("docs/data/transformers.csv")
    output: Path = Path("docs/transformers.md")

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            ValueError: if an option is not allowed.
        """
        for name in self.studies:
            check.one_of(OWNER, "--studies", name, tuple(STUDIES))
        for name in self.methods:
            check.one_of(OWNER, "--methods", name, tuple(METHODS))
        check.integer(OWNER, "--processes", self.processes, least=1)
        if self.short:
            folder = Path("runs/transformers")
            self.table, self.output = folder / "short.csv", folder / "short.md"
            self.studies, self.methods = self.studies or ["small"], self.methods or list(SHORT)

    def steps(self, study: str) -> int:
        """Return the number of steps of a study's trainings."""
        return 100 if self.short else STUDIES[study].steps

    def pairs(self) -> Iterator[tuple[str, str]]:
        """Yield the chosen studies and methods, those of the front first."""
        for study in self.studies or STUDIES:
            others = [method for method in METHODS if method not in FRONT]
            for method in (*FRONT, *(others if study == "small" else ())):
                if method in (self.methods or [method]):
                    yield study, method


# --- which training is next -------------------------------------------------------------


def best_rate(tried: Mapping[float, float]) -> float:
    """Return the learning rate with the least loss."""
    return min(tried, key=lambda lr: (tried[lr], lr))


def upcoming(tried: Mapping[float, float], first: float) -> float | None:
    """Return the learning rate to try next; None if the best one has neighbours on both sides."""
    if not tried:
        return first
    best = best_rate(tried)
    inside = [lr for lr in (2 * best, best / 2) if RATES[0] <= lr <= RATES[1]]
    return next((lr for lr in inside if lr not in tried), None)


def todo(study: str, method: str, rows: Sequence[Outcome]) -> list[tuple[float, int]]:
    """Return (learning rate, seed) of the trainings that can begin."""
    mine = [row for row in rows if (row.study, row.method) == (study, method)]
    tried = _tuned(study, method, rows)
    # Longer and larger trainings begin where the small one has ended.
    small = _tuned("small", method, rows)
    lr = upcoming(tried, best_rate(small) if small else METHODS[method].rate)
    if lr is not None:
        return [(lr, TUNING)]
    best = best_rate(tried)
    return [(best, seed) for seed in SEEDS if (best, seed) not in {(r.lr, r.seed) for r in mine}]


def _tuned(study: str, method: str, rows: Sequence[Outcome]) -> dict[float, float]:
    """Return the losses of the trainings that choose a method's rate."""
    mine = [row for row in rows if (row.study, row.method, row.seed) == (study, method, TUNING)]
    return {row.lr: row.held_out for row in mine}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the trainings that have no result yet, and write the page."""
    options: Options = read_options(
        Options, list(sys.argv[1:] if arguments is None else arguments), owner=OWNER
    )
    rows = read(options.table)
    try:
        transformers.corpora()
    except DataError as error:
        stop(f"{OWNER}: {error}")
    with tqdm(unit="training", disable=None) as bar:
        for found in _results(rows, options):
            rows += found
            write(options.table, rows)
            bar.update()
    report.write_page(options.output, text(rows))
    print(f"page: {options.output}   table: {options.table}")


def _results(rows: Sequence[Outcome], options: Options) -> Iterator[list[Outcome]]:
    """Yield results as they come; `rows` must contain those that were yielded before."""
    running: dict[Future[list[Outcome]], tuple[Any, ...]] = {}
    with ProcessPoolExecutor(options.processes, get_context("spawn")) as pool:
        while True:
            ready = [(*pair, *next_) for pair in options.pairs() for next_ in todo(*pair, rows)]
            ready = [job for job in ready if job not in running.values()]
            for job in ready[: options.processes - len(running)]:
                running[pool.submit(transformers.train, *job, options.steps(job[0]))] = job
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                yield future.result()
                del running[future]


# --- the table --------------------------------------------------------------------------


def read(path: Path) -> list[Outcome]:
    """Return the results in a file; none if there is no file."""
    if not path.exists():
        return []
    table = pd.read_csv(path, converters={"lr": float})
    return [Outcome(**row) for row in table.to_dict("records")]  # type: ignore[misc]


def write(path: Path, rows: Sequence[Outcome]) -> None:
    """Write results, sorted, such that readers find the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    names = [name.name for name in fields(Outcome)]
    table = pd.DataFrame(map(asdict, rows), columns=names)
    digits = {"held_out": 4, "fewer_4": 4, "fewer_64": 4}
    table = table.sort_values(["study", "method", "seed", "lr"]).round(digits)
    part = path.with_name(path.name + ".part")
    table.to_csv(part, index=False, lineterminator="\n")
    part.replace(path)


# --- the page ---------------------------------------------------------------------------

Results = Mapping[str, Sequence[Outcome]]
"""Method -> its reported results, one per seed."""


def reported(study: str, rows: Sequence[Outcome], then: str = "") -> Results:
    """Return the results of a study at each method's best rate, if there is one for each seed.

    With `then`, such as ", then plays", they are those of the models' training on a second text.
    """
    found: dict[str, Sequence[Outcome]] = {}
    for method in METHODS:
        if not (tuned := _tuned(study, method, rows)):
            continue
        lr = best_rate(tuned)
        place = (study + then, method, lr)
        mine = [r for r in rows if (r.study, r.method, r.lr) == place and r.seed != TUNING]
        if len(mine) == len(SEEDS):
            found[method] = sorted(mine, key=lambda row: row.seed)
    return found


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean and the ends of its 95 % confidence interval (Student's t)."""
    mean, error = float(np.mean(values)), float(np.std(values, ddof=1)) / math.sqrt(len(values))
    reach = float(stats.t.ppf(0.975, len(values) - 1)) * error
    return mean, mean - reach, mean + reach


def excess(found: Results, method: str) -> tuple[float, float, float]:
    """Return by how many percent a method's loss exceeds Dense's, compared seed by seed."""
    pairs = zip(found[method], found["Dense"], strict=True)
    return interval([100 * (mine.held_out / dense.held_out - 1) for mine, dense in pairs])


def beside_line(found: Results, policy: str) -> tuple[float, float, float] | None:
    """Return by how many percent a policy's loss exceeds the line between fixed methods.

    The line is linear in the logarithm of the bytes, between the two methods beside the policy.
    None stands for a method without results, or for a policy outside the line.
    """
    fixed = LINES[policy]
    if not {policy, *fixed} <= found.keys():
        return None
    values = []
    for number, mine in enumerate(found[policy]):
        places = [math.log(found[name][number].fewer_4) for name in fixed]
        losses = [found[name][number].held_out for name in fixed]
        place = math.log(mine.fewer_4)
        if not places[0] <= place <= places[-1]:
            return None
        values.append(100 * (mine.held_out / float(np.interp(place, places, losses)) - 1))
    return interval(values)


def text(rows: Sequence[Outcome]) -> str:
    """Return the text of the page."""
    found = {study: reported(study, rows) for study in STUDIES}
    sections = [_section(study, found[study], rows) for study in STUDIES if "Dense" in found[study]]
    return report.render("transformers", studies=report.join(sections), ranks=transformers.RANKS)


def _percent(values: tuple[float, float, float] | None) -> str:
    return "" if values is None else f"{values[0]:+.1f} % ({values[1]:+.1f} to {values[2]:+.1f})"


def _section(study: str, found: Results, rows: Sequence[Outcome]) -> str:
    size = STUDIES[study]
    count = sum(x.numel() for x in size.network().parameters())
    after = reported(study, rows, ", then plays")
    columns = {
        "method": "{method}", "fewer, 4 ranks": "{four}", "64 ranks": "{many}", "best rate": "{lr}",
        "loss": "{loss}", "over Dense": "{over}", "after plays": "{after}",
    }  # fmt: skip
    lines = []
    for method, mine in sorted(found.items(), key=lambda item: item[1][0].fewer_4):
        then = _percent(excess(after, method)) if {method, "Dense"} <= after.keys() else ""
        lines.append({
            "method": method, "four": report.significant(mine[0].fewer_4),
            "many": report.significant(mine[0].fewer_64), "lr": f"{1000 * mine[0].lr:g}e-3",
            "loss": f"{np.mean([row.held_out for row in mine]):.3f}",
            "over": "" if method == "Dense" else _percent(excess(found, method)),
            "after": "" if method == "Dense" else then,
        })  # fmt: skip
    table = as_markdown(format_table(columns, lines), left=(0,))
    title = f"## {study.capitalize()}\n\nWidth {size.width}, {size.depth} layers, {count:,}"
    title += f" parameters, {size.steps} steps."
    return report.join([title, table, _goals(found), _policies(found)])


def _goals(found: Results) -> str:
    """Return sentences about the methods with the fewest bytes and the least loss."""
    others = [method for method in found if method != "Dense"]
    near = [method for method in others if excess(found, method)[2] < 1]
    lines = []
    if near:
        method = max(near, key=lambda name: found[name][0].fewer_4)
        lines.append(
            f"- Fewest bytes with a loss at most 1 % over Dense's (end of the interval): {method},"
            f" {report.significant(found[method][0].fewer_4)} times fewer on 4 ranks."
        )
    for goal in GOALS:
        if able := [name for name in others if found[name][0].fewer_4 >= goal]:
            method = min(able, key=lambda name: np.mean([row.held_out for row in found[name]]))
            lines.append(
                f"- Least loss at {goal} times fewer bytes or more: {method},"
                f" {_percent(excess(found, method))}."
            )
    return "\n".join(lines)


def _policies(found: Results) -> str:
    """Return a table of policies and the line between their levels."""
    lines = [
        {"policy": policy, "over": _percent(over)}
        for policy in LINES
        if (over := beside_line(found, policy)) is not None
    ]
    columns = {"policy": "{policy}", "loss over the line at equal bytes": "{over}"}
    return as_markdown(format_table(columns, lines), left=(0,)) if lines else ""


if __name__ == "__main__":
    main()
