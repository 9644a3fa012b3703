"""Measurements of all cells, which go on after an interruption."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.netbench import bench, contestants
from benchmarks.netbench.group import Group
from benchmarks.netbench.links import parse_rtt
from benchmarks.netbench.network import Network
from benchmarks.plan.cells import METHODS, Cell
from examples import results

WARM_UP = 3
"""Steps of each method on unlimited links, in which low-rank factors and residuals get ready."""

BATCH = 16


def launches(cells: Sequence[Cell], path: Path) -> list[list[Cell]]:
    """Return the cells that a file of results does not have yet, launch by launch."""
    known = results.read_json(path)["cells"] if path.exists() else {}
    missing = [cell for cell in cells if cell.name not in known]
    return [list(x) for _, x in itertools.groupby(missing, lambda cell: (cell.model, cell.hosts))]


def measure(cells: Sequence[Cell], path: Path, folder: Path, tag: str, turn: float) -> int:
    """Measure the cells of a launch, and write the file after each; return 0.

    Args:
        cells: cells that differ only in their links.
        path: file of the results.
        folder: folder of the rig.
        tag: tag of the rig.
        turn: seconds of a measurement; it has at least two steps.
    """
    found: results.Row = {"machine": bench.machine(), "turn": turn, "compute": {}, "cells": {}}
    if path.exists():
        found = results.read_json(path)
    names = {cell.name for cell in cells}
    for name, rows in _launch(cells, folder, tag, turn):
        found["cells" if name in names else "compute"][name] = rows
        results.write_json(path, found)
    return 0


def _launch(
    cells: Sequence[Cell], folder: Path, tag: str, turn: float
) -> Iterator[tuple[str, list[results.Row]]]:
    """Yield pairs of a cell's name and a row for each method; the cells differ only in links.

    The first pair is the launch's name and a row for computation without an exchange.
    """
    network = Network(cells[0].hosts, tag, folder)
    network.widen_windows()
    groups = _start(cells[0], network, folder)
    compute = groups.pop(contestants.COMPUTE)
    try:
        alone = _row(network, {contestants.COMPUTE: compute}, contestants.COMPUTE, 2.0)
        yield f"{cells[0].model}-{cells[0].hosts}", [alone]
        for cell in cells:
            if parse_rtt(cell.rtt) != network.rtt:
                network.delay(parse_rtt(cell.rtt))
            network.limit(cell.rate)
            rows = [_row(network, groups, method, turn) for method in groups]
            slowest = max(rows, key=lambda row: row["ms"])
            bench.say(f"{cell.name}: {len(rows)} methods, at most {slowest['ms']:.0f} ms")
            yield cell.name, rows
    finally:
        for group in set(groups.values()):
            group.close()
        network.close()


def _start(cell: Cell, network: Network, folder: Path) -> dict[str, Group]:
    """Start both launches; return the stopped launch of each method."""
    groups: dict[str, Group] = {}
    for name, backend in ((contestants.HOROVOD, "gloo"), (contestants.PLAIN, "torch")):
        every = (contestants.COMPUTE, *METHODS)
        held = [method for method in every if contestants.group(method) == name]
        settings = {"framework": "torch", "methods": held, "model": cell.model, "batch": BATCH}
        group = Group(name, network, folder, settings, backend, 1)
        groups |= dict.fromkeys(held, group)
        for method in held:
            group.ask("warm", method, WARM_UP)
        group.pause()
    return groups


def _row(network: Network, groups: dict[str, Group], method: str, turn: float) -> results.Row:
    """Measure a method; return the means over its ranks."""
    if contestants.reduces_fp16(method):
        bench.ask(groups[method], "judge", method, 0)
    row = bench.measure_steps(network, groups[method], method, turn)
    means = {key: sum(row[key]) / len(row[key]) for key in ("ms", "cpu_ms", "sent", "received")}
    return {"method": method, "steps": row["steps"], "foreign": row["foreign"], **means}
