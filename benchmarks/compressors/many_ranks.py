"""Time of the messages of gathered codecs and of averages in parts, on 8 to 1,024 ranks.

The messages are those of real exchanges, recorded on one rank, and their time is virtual: that of
`simulation.Link`. `scripts/bytes_sent.py` writes the table, and a section of docs/compressors.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from accordion_hvd.compressors import (
    FP16,
    QSGD,
    Dense,
    DoubleSqueeze,
    EFSignSGD,
    PowerSGD,
    TopK,
)
from accordion_hvd.core.base import Compressor, consecutive
from accordion_hvd.core.codec import Codec
from accordion_hvd.engine.layout import TensorInfo
from accordion_hvd.policies import Fixed
from accordion_hvd.simulation import Link, Throughput
from accordion_hvd.simulation.clocks import Clocks
from accordion_hvd.simulation.links import HostLinks
from accordion_hvd.simulation.programs import GradientPrograms, Gradients, Program, falling_norms
from benchmarks.jobs.models import Model, resnet50
from benchmarks.report import render, significant
from examples.tables import as_markdown

TABLE = Path(__file__).resolve().parents[2] / "docs" / "data" / "many_ranks.csv"

CODECS: tuple[Codec, ...] = (QSGD(4), EFSignSGD(), TopK(0.01))
FORMS: tuple[Compressor, ...] = (
    Dense(), FP16(), PowerSGD(4), PowerSGD(4, wire="float16"),
    *(form for codec in CODECS for form in (codec, DoubleSqueeze(codec))),
)  # fmt: skip
RANKS = (8, 16, 32, 64, 128, 256, 512, 1024)


@dataclass(frozen=True)
class Place:
    """The links of hosts with one rank each.

    Attributes:
        gbit: Gbit/s of a host's link.
        rtt: round-trip time of two hosts in ms.
    """

    gbit: float
    rtt: float

    def __str__(self) -> str:
        return f"{self.gbit:g} Gbit/s, {self.rtt:g} ms"

    def seconds(self, program: Program, ranks: int) -> float:
        """Return the seconds of a step that computes, encodes and decodes in no time."""
        link = Link(self.rtt / 2 / 1000, self.gbit / 8 * 1e9)
        clocks = Clocks(HostLinks(link, ranks), np.ones(ranks), backward=0, overlap=False)
        return clocks.advance(program, np.zeros(ranks)).seconds


PLACES = tuple(Place(gbit, rtt) for gbit in (1, 10, 100) for rtt in (0.05, 1))


def recorded(form: Compressor, ranks: int, model: Model) -> Program:
    """Return a step that averages the gradients of a model."""
    tensors = [TensorInfo(name, shape, "float32") for name, shape in reversed(model.items())]
    gradients = Gradients(tuple(tensors), (1.0,) * len(tensors))
    hosts, free = consecutive(ranks, 1), Throughput()
    norms, policy = falling_norms(1), Fixed(form)
    programs = GradientPrograms(policy, gradients, ranks, hosts, free, norms, lambda step: 0.1)
    return next(iter(programs))


def rows(
    forms: Sequence[Compressor] = FORMS, ranks: Sequence[int] = RANKS
) -> Iterator[dict[str, object]]:
    """Yield one row for each form, number of ranks and place."""
    model = resnet50()
    for count in ranks:
        for form in forms:
            program = recorded(form, count, model)
            for place in PLACES:
                milliseconds = 1000 * place.seconds(program, count)
                yield {
                    "form": repr(form), "ranks": count, "gbit": place.gbit, "rtt_ms": place.rtt,
                    "sent_mb": round(program.traffic.sent / 1e6, 3), "ms": round(milliseconds, 3),
                }  # fmt: skip


def write() -> None:
    """Compute the table and write it."""
    TABLE.parent.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(rows()).to_csv(TABLE, index=False)


def section(found: pd.DataFrame | None = None) -> str:
    """Return the section of the page, given the table, by default the one that was written."""
    found = pd.read_csv(TABLE) if found is None else found
    near = found[(found.gbit == 10) & (found.rtt_ms == 0.05)]
    milliseconds = near.pivot(index="form", columns="ranks", values="ms")
    milliseconds = milliseconds.loc[list(dict.fromkeys(found.form))].map(significant)
    fastest = found.loc[found.groupby(["ranks", "gbit", "rtt_ms"]).ms.idxmin()]
    cells = fastest.assign(cell=_name(fastest.form) + " " + fastest.ms.map(significant))
    first = cells.pivot(index="ranks", columns=["gbit", "rtt_ms"], values="cell")
    return render(
        "many_ranks",
        parts=as_markdown(_parts(found), left=[0]),
        first=as_markdown(_flat(first, "n"), left=[0]),
        milliseconds=as_markdown(
            milliseconds.set_axis(_name(pd.Series(milliseconds.index)))
            .rename(columns=lambda count: f"n = {count}")
            .reset_index(names="compressor"),
            left=[0],
        ),
    )


def _name(forms: pd.Series) -> pd.Series:
    return "`" + forms + "`"


def _flat(cells: pd.DataFrame, name: str) -> pd.DataFrame:
    columns = [str(Place(*key)) for key in cells.columns]
    return cells.set_axis(columns, axis=1).reset_index(names=name)


def _parts(found: pd.DataFrame) -> pd.DataFrame:
    """Return, for each codec and place, the least number of ranks on which parts are faster."""
    times = found.pivot(index=["gbit", "rtt_ms", "ranks"], columns="form", values="ms")
    table = []
    for codec in CODECS:
        faster = times[repr(DoubleSqueeze(codec))] < times[repr(codec)]
        cells: list[str] = [f"`{codec!r}`"]
        for place in PLACES:
            here = faster.loc[(place.gbit, place.rtt)]
            cells.append(str(here.idxmax()) if here.any() else "-")
        table.append(cells)
    return pd.DataFrame(table, columns=["codec", *map(str, PLACES)])
