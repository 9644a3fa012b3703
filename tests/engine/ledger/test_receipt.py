"""Tests of receipts: answers agree with the records, and the page needs no other files."""

from __future__ import annotations

import copy
import re
from html.parser import HTMLParser
from typing import Any

import pytest
from click.testing import CliRunner

from accordion_hvd.engine.ledger import files
from accordion_hvd.engine.ledger.ledger import SHARED
from accordion_hvd.engine.ledger.page import page
from accordion_hvd.engine.ledger.samples import PARTS
from accordion_hvd.engine.ledger.summary import (
    advice,
    critical,
    duration,
    mbit,
    ms,
    size,
    summarize,
    timeline,
)
from accordion_hvd.tools.command import main

STEPS = 400


def shared(**numbers: float) -> list[float]:
    return [STEPS * numbers.get(k, 0.0) if k in PARTS else numbers.get(k, 0.0) for k in SHARED]


def records(**changes: Any) -> dict[str, Any]:
    """Return 400 steps of 100 ms on 3 ranks: 60 compute, 5 encode, 30 wait, 4 decode, 1 decide."""
    per_step = {
        "compute": 0.06, "encode": 0.005, "wait": 0.03, "decode": 0.004, "decide": 0.001,
        "graph": 0.0, "seconds": 0.1, "sent": 1e6, "dense": 20e6, "flight": 0.054, "skipped": 0.0,
    }  # fmt: skip
    windows = 100
    series = {"steps": [STEPS / windows] * windows}
    series |= {key: [value * STEPS / windows] * windows for key, value in per_step.items()}
    layers = {name: facts(dense) for name, dense in (("conv", 4000), ("dense", 90000))}
    link = {"steps": STEPS, "wire": 4.2e8, "rate": 2.5e7, "rtt": 0.002, "peer": 0x0A4D0003}
    tables = [
        shared(compute=0.06, encode=0.005, wait=0.03, decode=0.004, **link),
        shared(compute=0.05, encode=0.005, wait=0.04, decode=0.004, **link),
        shared(compute=0.09, encode=0.005, wait=0.00, decode=0.004, **link | {"rate": 1e7}),
    ]
    found = {
        "format": 1,
        "job": {
            "version": "1", "host": "alpha", "began": 0.0, "until": 40.0, "ranks": 3,
            "engine": "Horovod", "cores": 2, "price": 3.6, "buckets": layers,
            "policy": "Accordion(low=PowerSGD(rank=4), high=PowerSGD(rank=1))",
        },
        "steps": series,
        "groups": {
            "dense and 1 more": {
                "steps": 400, "sent": 4e8, "encode": 2.0, "decode": 1.6, "flight": 20.0,
                "rounds": 800,
            },
        },
        "events": [
            event(100, "conv", "PowerSGD(rank=1)"), event(100, "dense", "PowerSGD(rank=1)"),
            event(300, "dense", "PowerSGD(rank=4)"), {"kind": "skipped", "step": 7},
            {"kind": "ranks", "step": 9, "ranks": 3},
        ],
        "decisions": [
            decision(100, "conv", 1), decision(100, "dense", 1),
            decision(300, "conv", 1), decision(300, "dense", 0),
        ],
        "ranks": {"columns": list(SHARED), "tables": [[100, tables], [400, tables]]},
        "errors": {
            "columns": ["step", "norm", "residual", "error"],
            "buckets": {"dense": [[1, 2.0, 1.0, 0.5], [2, 2.0, 1.2, 0.6]]},
            "shadows": {"FP16()": {"norm": 4.0, "error": 4e-8, "sent": 10.0, "dense": 20.0}},
        },
        "gate": "",
        "link": {"bandwidth": 2.5e7, "latency": 0.001},
    }  # fmt: skip
    return copy.deepcopy(found | changes)


def facts(dense: int) -> dict[str, Any]:
    first = "PowerSGD(rank=4)"
    return {"shape": [dense], "tensors": 1, "dense": 4 * dense, "compress": True, "first": first,
            "compressor": first}  # fmt: skip


def event(step: int, bucket: str, compressor: str) -> dict[str, Any]:
    return {"kind": "level", "step": step, "bucket": bucket, "compressor": compressor}


def decision(step: int, name: str, level: int) -> dict[str, Any]:
    return {"name": name, "level": level, "step": step, "window": 1, "compressor": "",
            "reason": "change", "norm": 2.0 + step, "previous": 1.0, "change": 0.3,
            "lr": 0.1, "previous_lr": 0.1, "ratio": None}  # fmt: skip


# ------------------------------------------------------------------------------------ the answers
def test_answers():
    summary = summarize(records())
    assert summary.seconds == pytest.approx(0.1) and summary.share == pytest.approx(0.4)
    assert summary.ratio == pytest.approx(20)
    assert summary.overlap == pytest.approx(0.054 - 0.03 - 0.004)
    # 1 MB at 25 MB/s is 0.04 s, and two rounds are 0.002 s; 0.02 s overlap
    assert summary.explained == pytest.approx(0.022)
    # 20 MB are 0.8 s; 0.001 s latency; 0.06 s compute; 0.008 s of waiting for other ranks
    assert summary.without(32) == pytest.approx(0.06 + 0.8 + 0.001 - 0.02 + 0.008)
    assert summary.without(16) == pytest.approx(0.06 + 0.4 + 0.001 - 0.02 + 0.008)
    assert summary.bought == pytest.approx((0.849 - 0.1) * 400)
    assert summary.slowest.number == 2 and summary.delay == pytest.approx(0.03)
    assert summary.thinnest.number == 2 and summary.thinnest.peer == "10.77.0.3"


def test_without_measurements_nothing_is_claimed():
    found = records(link=None)
    found["ranks"]["tables"] = []
    summary = summarize(found)
    assert summary.without(32) is None and summary.bought is None
    assert summary.slowest is None and summary.thinnest is None
    assert "not measured" in advice(summary)[1] and "not compared" in advice(summary)[2]
    assert "saved" not in page(found) and "Ranks</h2>" not in page(found)


def test_timeline_and_critical_regimes():
    spans = timeline(records())
    four, one = "PowerSGD(rank=4)", "PowerSGD(rank=1)"
    assert spans["conv"] == [(0, 100, four), (100, 400, one)]
    assert spans["dense"] == [(0, 100, four), (100, 300, one), (300, 400, four)]
    assert critical(records()) == [(0, 100, 2), (100, 300, 0), (300, 400, 1)]
    found = records()
    found["job"]["policy"] = "Fixed(PowerSGD(rank=4))"
    assert critical(found) == []


def seconds(found: dict[str, Any], **parts: float) -> dict[str, Any]:
    """Change the parts of each step, in seconds per step."""
    steps = found["steps"]
    for part in PARTS:
        per_window = parts.get(part, 0.0) * STEPS / len(steps["steps"])
        steps[part] = [per_window] * len(steps["steps"])
    steps["seconds"] = [sum(column) for column in zip(*(steps[p] for p in PARTS), strict=True)]
    return found


@pytest.mark.parametrize(
    ("parts", "sentence"),
    [
        ({"compute": 0.1, "wait": 0.001}, "would save hardly anything"),
        (
            {"compute": 0.05, "wait": 0.05},
            "in 50 ms of a step of 100 ms.*bytes need 40 ms, its 2 r.* 2 ms",
        ),
        ({"compute": 0.05, "encode": 0.04, "wait": 0.01}, "cheaper compressor could be faster"),
        ({"compute": 0.05, "graph": 0.05}, "graphs do not show"),
    ],
)
def test_advice_names_the_largest_part(parts, sentence):
    assert re.search(sentence, advice(summarize(seconds(records(), **parts)))[0])


@pytest.mark.parametrize(
    ("bandwidth", "sentence"),
    [
        (2.5e7, "compression pays"),
        (4e8, "16 bits would do"),
        (1e9, "compression does not pay"),
    ],
)
def test_advice_about_16_bits(bandwidth, sentence):
    found = records(link={"bandwidth": bandwidth, "latency": 0.0})
    assert sentence in advice(summarize(found))[1]


def test_advice_about_ranks():
    assert "Rank 2 works 30 ms longer" in advice(summarize(records()))[2]
    found = records()
    for table in found["ranks"]["tables"][-1][1]:
        table[SHARED.index("compute")] = 0.06 * STEPS
    text = advice(summarize(found))[2]
    assert "Ranks are even" in text and "of rank 2 to 10.77.0.3, attains 80 Mbit/s" in text


def test_units():
    assert ms(0.0123) == "12.3 ms" and ms(2.5) == "2,500 ms"
    assert mbit(2.5e7) == "200 Mbit/s" and mbit(1.25e8) == "1 Gbit/s"
    assert [size(x) for x in (12, 1234, 5.6e7, 3e9)] == ["12 B", "1.23 kB", "56 MB", "3 GB"]
    assert duration(90) == "90 s" and duration(600) == "10 min" and duration(9000) == "2.5 h"


# --------------------------------------------------------------------------------------- the page
class Structure(HTMLParser):
    VOID = {"meta", "line", "rect", "circle", "polyline"}

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.text: list[str] = []
        self.tips = 0

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.links += [v for k, v in attrs if k in ("href", "src", "xlink:href")]
        self.tips += any(k == "data-tip" for k, _ in attrs)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.tips += any(k == "data-tip" for k, _ in attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def parsed(text: str) -> Structure:
    structure = Structure()
    structure.feed(text)
    assert not structure.open
    return structure


def test_the_page_stands_alone_and_answers():
    structure = parsed(page(records()))
    assert not structure.links and structure.tips > 100
    text = " ".join(structure.text)
    for answer in (
        "40.0 %", "20 x", "all 2 layers", "rank 2", "with 16 bits", "80 Mbit/s", "4.99 min saved",
        "0.2996 saved", "not finite", "the number of ranks became 3", "60 %", "0.01 %",
    ):  # fmt: skip
        assert answer in text, answer


def test_names_cannot_add_markup():
    found = records()
    evil = '<script>alert("x")</script>'
    found["job"]["buckets"] = {evil: facts(10), **found["job"]["buckets"]}
    found["job"]["policy"] = found["job"]["host"] = evil
    found["decisions"].append(decision(320, evil, 1))
    found["errors"]["buckets"][evil] = [[1, 1.0, None, None]]
    found["groups"][evil] = found["groups"]["dense and 1 more"]
    text = page(found)
    assert text.count("<script>") == 1 and "alert(" in text
    parsed(text)


def test_short_and_empty_jobs_have_a_page():
    found = records(groups={}, events=[], decisions=[])
    found["steps"] = {key: [values[0] / 4] for key, values in found["steps"].items()}
    found["errors"] = {"columns": [], "buckets": {}, "shadows": {}}
    parsed(page(found))


def test_command_writes_the_receipt(tmp_path):
    files.save(tmp_path, 0, records())
    result = CliRunner().invoke(main, ["receipt", str(tmp_path)])
    assert result.exit_code == 0 and result.output.strip() == str(tmp_path / "receipt.html")
    parsed((tmp_path / "receipt.html").read_text())


@pytest.mark.parametrize(
    ("text", "sentence"),
    [(None, "has no ledger.json; pass ledger="), ("{}", "is not the ledger of a job")],
)
def test_command_refuses_in_a_sentence(tmp_path, text, sentence):
    if text is not None:
        (tmp_path / "ledger.json").write_text(text)
    result = CliRunner().invoke(main, ["receipt", str(tmp_path)])
    assert result.exit_code == 1 and sentence in result.output and "Traceback" not in result.output


@pytest.mark.parametrize("command", ["doctor", "build-horovod"])
def test_forwarded_commands_parse_their_own_options(command, capfd):
    result = CliRunner().invoke(main, [command, "--help"])
    assert result.exit_code == 0 and "usage:" in result.output + capfd.readouterr().out
