"""Tests of the comparison of samplers: its table, docs/graph.md, and the samplers' speed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.graph import moments, page, speed
from examples.graph import report
from examples.graph.config import GraphSettings


def made_result(data: str, name: str) -> dict[str, Any]:
    settings = GraphSettings(name=name, data=data, seeds=2).as_dict()  # type: ignore[arg-type]
    runs = []
    for seed in (1, 2):
        for method, rows, accuracy in (
            ({"skew": 1.0}, 40.0, 0.81),
            ({"skew": 4.0}, 20.0, 0.80),
            ({"budget": 2.0}, 10.0, 0.808),
            ({"budget": 4.0}, 0.0, 0.70),
        ):
            epochs = [{"seconds": 0.1 * rows + e, "epoch": e} for e in range(3)]
            runs.append(
                {**method, "seed": seed, "accuracy": accuracy + seed / 100, "remote": rows,
                 "received": rows * 100, "seconds": 0.5, "epochs": epochs}
            )  # fmt: skip
    return {"settings": settings, "ranks": 4, "nodes": 100, "edges": 200, "features": 5,
            "cut_share": 0.1, "runs": runs}  # fmt: skip


def test_table_and_page(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = report.table(made_result("cora", "cora")).to_numpy().tolist()
    assert rows[0][:2] == ["s = 1 (base)", "82.50 %"] and rows[0][4] == ""
    assert rows[2] == ["D = 2", "82.30 %", "-0.20 ± 0.00", "10.0", "4.0", "0.001", "500.0"]
    assert rows[3][4] == "-"
    for name in ("cora", "links"):
        folder = tmp_path / "in" / name
        folder.mkdir(parents=True)
        (folder / "result.json").write_text(json.dumps(made_result("cora", name)))
    sampling = {"nodes": 9, "edges": 8, "parts": "4 parts", "samplers": []}
    (tmp_path / "in" / "sampling.json").write_text(json.dumps(sampling))
    errors = {"variance": 0.25, "moment": 1.0, "ratio": 1.5}
    keys = ("constant_1", "relu_1", "constant_2", "relu_2")
    sampler = {"mode": "fixed", "budget": 1.0, "remote": 3.0, **dict.fromkeys(keys, errors)}
    skewed = sampler | {"budget": 2.0, "relu_2": errors | {"variance": 0.75}}
    samplers = [sampler, skewed]
    about = {"nodes": 9, "edges": 8, "parts": "4 parts", "targets": 2, "fanout": 4, "draws": 5}
    (tmp_path / "in" / "moments.json").write_text(json.dumps(about | {"samplers": samplers}))
    text = page.write(tmp_path / "in", tmp_path / "out").read_text()
    assert "at most half a point of accuracy less in the mean: D = 2." in text
    assert "Epochs at 200 Mbit/s" in text and "What sampling costs" in text
    assert "| fixed | 1 | 3 | 1.50 | 1.50 | 1.000 | 0.2500 |" in text and "mode fixed" in text
    assert "1.0 times that of the base sampler over one hop and 3.0 times over two hops" in text
    assert (tmp_path / "out" / "graph.png").read_bytes()[:4] == b"\x89PNG"


def test_moments_are_measured() -> None:
    """With equal features, fixed samples without skew have no error, and D bounds every ratio."""
    pytest.importorskip("pymetis")
    found = moments.measure(500, 20)
    rows = {(row["mode"], row["budget"]): row for row in found["samplers"]}
    assert rows["fixed", 1.0]["constant_2"]["variance"] < 1e-10
    assert rows["fixed", 2.0]["constant_1"]["variance"] > 0.001
    assert rows["bernoulli", 1.0]["constant_1"]["variance"] > 0.001
    for (_, budget), row in rows.items():
        assert row["constant_1"]["ratio"] < 1.1 * budget


def test_speed_is_measured() -> None:
    pytest.importorskip("pymetis")
    found = speed.measure(2000, 0.02)
    assert len(found["samplers"]) == 10 and all(row["rate"] > 1000 for row in found["samplers"])
