"""Tests of receipts: answers agree with the records, and the page needs no other files."""

from __future__ import annotations

import copy
import re
from html.parser import HTMLParser
from typing import Any
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from accordion_hvd.engine.ledger import files
from accordion_hvd.engine.ledger import page as charts
from accordion_hvd.engine.ledger.ledger import SHARED
from accordion_hvd.engine.ledger.page import LEVELS, LINES, TEMPLATE, page
from accordion_hvd.engine.ledger.samples import PARTS
from accordion_hvd.engine.ledger.summary import (
    DENSE,
    HALF,
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
        "graph": 0.0, "measure": 0.0, "seconds": 0.1, "sent": 1e6, "dense": 20e6,
        "flight": 0.054, "skipped": 0.0,
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
        "links": [{"bandwidth": 2.5e7, "latency": 0.001}],
        "rehearsals": [
            rehearsal(own=[0.05, 0.052, 0.051], **{DENSE: [0.85, 0.9, 0.8], HALF: [0.4, 0.4, 0.4]}),
        ],
    }  # fmt: skip
    return copy.deepcopy(found | changes)


def rehearsal(pause: float = 0.02, **seconds: list[float]) -> dict[str, Any]:
    return {"step": 10, "pause": pause, "seconds": seconds}


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
    assert summary.ratio == pytest.approx(20) and summary.total == pytest.approx(40)
    assert summary.exchange == pytest.approx(0.039) and summary.alone == pytest.approx(0.031)
    assert summary.slowest.number == 2 and summary.delay == pytest.approx(0.03)
    assert summary.thinnest.number == 2 and summary.thinnest.peer == "10.77.0.3"


def test_an_estimate_is_the_step_and_what_the_exchange_takes_more():
    dense, half = summarize(records()).estimates.values()
    assert dense.more == pytest.approx(0.8) and half.more == pytest.approx(0.349)
    assert (dense.low, dense.high) == (pytest.approx(0.749), pytest.approx(0.848))
    assert dense.slower and half.slower
    low, high = summarize(records()).bought
    assert (low, high) == (pytest.approx(400 * dense.low), pytest.approx(400 * dense.high))


def uncompressed(**changes: Any) -> dict[str, Any]:
    found = records(**changes)
    found["steps"]["sent"] = found["steps"]["dense"]
    return found


def test_a_job_without_compression_neither_saves_nor_loses():
    """It is its own estimate, whatever packing and unpacking take."""
    found = uncompressed(rehearsals=[rehearsal(own=[0.05, 0.09], **{HALF: [0.04, 0.1]})])
    summary, text = summarize(found), page(found)
    assert summary.bought is None and set(summary.estimates) == {HALF}
    assert "saved</b>" not in text and "lost</b>" not in text and "lost?" not in text
    assert "without compression" not in advice(summary)[1]


@given(
    st.lists(st.tuples(*[st.floats(0, 1)] * 3), min_size=1, max_size=9),
    st.sampled_from([0.0, 0.01, 0.1]),
)
def test_what_takes_longer_is_never_estimated_faster(turns, pause):
    """That includes what sends more bytes on one link."""
    own, faster, more = (list(x) for x in zip(*turns, strict=True))
    slower = [a + b for a, b in zip(faster, more, strict=True)]
    row = rehearsal(pause, own=own, faster=faster, slower=slower, same=own)
    found = summarize(records(rehearsals=[row])).estimates
    for bound in ("more", "low", "high"):
        assert getattr(found["faster"], bound) <= getattr(found["slower"], bound)
    assert found["same"].more == found["same"].low == found["same"].high == 0
    assert found["same"].slower is None


def test_a_range_that_spans_both_answers_is_none():
    found = records(rehearsals=[rehearsal(own=[0.05, 0.05], **{DENSE: [0.04, 0.06]})])
    assert summarize(found).estimates[DENSE].slower is None
    assert "cannot tell whether compression pays" in advice(summarize(found))[1]
    assert "saved or lost?" in page(found)


def test_ranges_contain_how_much_the_job_changes():
    """Each eighth of the job has another mean step; single long pauses do not count."""
    calm, restless, paused = records(), records(), records()
    for window in range(100):
        restless["steps"]["compute"][window] *= 1 + 0.5 * (window // 25 % 2)
    paused["steps"]["compute"][50] *= 100
    for found in (restless, paused):
        steps = found["steps"]
        steps["seconds"] = [sum(x) for x in zip(*(steps[p] for p in PARTS), strict=True)]
    ranges = [summarize(x).estimates[DENSE] for x in (calm, restless, paused)]
    widths = [estimate.high - estimate.low for estimate in ranges]
    assert widths[1] == pytest.approx(widths[0] + 0.03, rel=0.1)
    assert widths[2] == pytest.approx(widths[0])


def test_first_steps_and_rehearsals_are_no_part_of_a_step():
    found = records()
    steps = found["steps"]
    steps["compute"][:2] = [40.0, 40.0]  # 8 steps, in which graphs are traced
    steps["compute"][2] += 40.0  # steps 9 to 12
    steps["measure"][50] = 2.0
    steps["seconds"] = [sum(x) for x in zip(*(steps[p] for p in PARTS), strict=True)]
    summary = summarize(found)
    assert summary.seconds == pytest.approx(0.1) and summary.total == pytest.approx(161.52)


def test_without_measurements_nothing_is_claimed():
    found = records(links=[], rehearsals=[])
    found["ranks"]["tables"] = []
    summary = summarize(found)
    assert summary.estimates == {} and summary.bought is None
    assert summary.slowest is None and summary.thinnest is None
    assert "not rehearsed" in advice(summary)[1] and "not compared" in advice(summary)[2]
    assert "saved" not in page(found) and "Ranks</h2>" not in page(found)


def test_timeline_and_critical_regimes():
    spans = timeline(records())
    four, one = "PowerSGD(rank=4)", "PowerSGD(rank=1)"
    assert spans["conv"] == [(0, 100, four), (100, 400, one)]
    assert spans["dense"] == [(0, 100, four), (100, 300, one), (300, 400, four)]
    assert critical(records()) == [(0, 100, 2), (100, 300, 0), (300, 400, 1)]
    found = records(decisions=[decision(100, "conv", 1)])  # none about the other layer yet
    assert critical(found) == [(0, 100, 2), (100, 400, 1)]
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
            "in 50 ms of a step of 100 ms.*takes 31 ms where all ranks",
        ),
        ({"compute": 0.05, "encode": 0.04, "wait": 0.01}, "cheaper compressor could be faster"),
        ({"compute": 0.05, "graph": 0.05}, "graphs do not show"),
    ],
)
def test_advice_names_the_largest_part(parts, sentence):
    assert re.search(sentence, advice(summarize(seconds(records(), **parts)))[0])


@pytest.mark.parametrize(
    ("dense", "half", "sentence"),
    [
        (0.9, 0.4, "949 ms without compression and 449 ms with 16 bits, instead of 100 ms: compr"),
        (0.9, 0.04, "16 bits would be faster"),
        (0.9, 0.051, "pays, but the measurements cannot tell whether 16 bits"),
        (0.051, 0.04, "cannot tell whether compression pays"),
        (0.04, 0.04, "compression does not pay"),
    ],
)
def test_advice_about_16_bits(dense, half, sentence):
    found = records(rehearsals=[rehearsal(own=[0.051], **{DENSE: [dense], HALF: [half]})])
    assert sentence in advice(summarize(found))[1]


@pytest.mark.parametrize(
    ("half", "sentence"),
    [
        ([0.02, 0.02], "steps with 16 bits are faster"),
        ([0.02, 0.06], "cannot tell whether steps with 16 bits are faster"),
        ([0.06, 0.06], "compression would not pay"),
    ],
)
def test_advice_without_compression(half, sentence):
    found = uncompressed(rehearsals=[rehearsal(own=[0.05, 0.05], **{HALF: half})])
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
        "40.0 %", "20 x", "all 2 layers", "rank 2", "with 16 bits", "80 Mbit/s",
        "4.99 min to 5.65 min saved", "0.2996 to 0.3392 saved", "not finite",
        "the number of ranks became 3", "60 %", "0.01 %",
    ):  # fmt: skip
        assert answer in text, answer


def test_charts_need_neither_color_nor_a_wide_screen():
    """Colors have hatches or dashes, and texts of 11 units are 10 px on a screen of 400 px."""
    text, template = page(records()), TEMPLATE.read_text()
    assert set(re.findall(r'<svg viewBox="0 0 (\d+)', text)) == {"22", str(charts.WIDTH)}
    assert charts.WIDTH <= 400 and "font-size: 11px" in template and "min-width" not in template
    assert len(set(charts.HATCHES)) == len(charts.HATCHES) == 8
    lines = [re.findall(rf"[.]line[.]{c} {{ ([^}}]*)}}", template) for c in LEVELS[:LINES]]
    assert len({re.sub(r"stroke: [^;]*;", "", *found) for found in lines}) == LINES


def marks(svg: str, tag: str, *names: str) -> list[list[float]]:
    """Return attributes of the elements with this tag."""
    found = ElementTree.fromstring(svg).iter(tag)
    return [[float(element.attrib[name]) for name in names] for element in found]


def test_marks_stand_where_the_axes_say():
    left, right, middle = charts.LEFT, charts.LEFT + charts.INNER, charts.LEFT + charts.INNER / 2
    points = [(0, 1.0, False, ""), (50, 10.0, True, ""), (100, 1000.0, False, "")]
    svg = charts.lines({"a": points}, ["c0"], 100)
    (x0, y0), (x1, y1), (x2, y2) = marks(svg, "circle", "cx", "cy")
    assert (x0, x1, x2) == (left, middle, right)
    heights = [y for (y,) in marks(svg, "line", "y1")]  # at 1, 10, 100 and 1000
    assert [y0, y1, y2] == [heights[i] for i in (0, 1, 3)] and y0 > y1 > y2
    assert [x for x, _ in marks(svg, "text", "x", "y")][-5:][::2] == [left, middle, right]

    svg = charts.lanes({"a": [(0, 50, "low"), (50, 100, "high")]}, {"low": "c0", "high": "c1"}, 100)
    (x0, w0), (x1, w1) = marks(svg, "rect", "x", "width")
    assert (x0, x0 + w0 + 1, x1, x1 + w1 + 1) == (left, middle, middle, right)

    rows = [("a", 3.0, {"low": 1.0, "high": 3.0}), ("b", 3.0, {"low": 2.0, "high": 0.0})]
    svg = charts.stacked(rows, {"low": "c0", "high": "c1"}, "ms")
    boxes = marks(svg, "rect", "x", "width", "y", "height")
    (x0, w0, y0, h0), (_, _, y1, h1), (x2, w2, y2, h2) = boxes
    assert (x0, x0 + w0 + 0.5, x2, x2 + w2 + 0.5) == (left, middle, middle, right)
    assert y0 + h0 == y2 + h2 == max(y for (y,) in marks(svg, "line", "y1")) and y1 + h1 == y0
    assert h0 == pytest.approx(h1 / 3, abs=0.1) and h0 == pytest.approx(h2 / 2, abs=0.1)

    svg = charts.bars(
        [(title, parts) for title, _, parts in rows], {"low": "c0", "high": "c1"}, "s"
    )
    (x0, w0, y0), (x1, w1, y1), (x2, w2, y2) = marks(svg, "rect", "x", "width", "y")
    assert x0 == x2 == left and x1 == x0 + w0 and x1 + w1 <= right and y0 == y1 < y2
    assert w0 == pytest.approx(w1 / 3, abs=0.1) and w0 == pytest.approx(w2 / 2, abs=0.1)


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
