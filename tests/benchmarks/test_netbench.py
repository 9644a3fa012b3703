"""Tests of netbench: limited links on one host, their traffic, the tables, and the cleanup."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rigs import marked, rig, start

from benchmarks.netbench import command, contestants, group, links, page, picture, sandbox, tables
from benchmarks.netbench.contestants import (
    ACCORDION,
    COMPILED,
    COMPUTE,
    GROUPED,
    METHODS,
    OURS,
    SILENT,
)
from benchmarks.netbench.network import read_counters
from benchmarks.report import END, read_tables

ROOT = Path(__file__).resolve().parents[2]


# ----------------------------------------------------------------------------------- without a rig
def test_rates() -> None:
    found = [links.parse_rate(word) for word in ("50mbit", "1gbit", "2.5Gbit", "64kbit", "none")]
    assert found == [50e6, 1e9, 2.5e9, 64e3, None]
    for word in ("50", "mbit", "50mb", "0mbit", "-1mbit", "fast"):
        with pytest.raises(ValueError, match=re.escape(repr(word))):
            links.parse_rate(word)


def test_counters() -> None:
    head = "Inter-| Receive | Transmit\n face |bytes packets ...\n"
    lo, eth0 = ("lo: 9 1 0 0 0 0 0 0 9 1 0", "eth0: 123 4 0 0 0 0 0 0 567 8 0 0 0 0 0 0")
    assert read_counters(f"{head}  {lo}\n  {eth0}\n") == (123, 567)
    with pytest.raises(ValueError, match="eth0"):
        read_counters(f"{head}  {lo}\n")


def test_ways_are_chosen_by_name_pattern_or_word() -> None:
    choose = contestants.choose
    assert choose("torch", []) == list(METHODS["torch"])
    assert choose("torch", ["Horovod"]) == [COMPUTE, "Horovod"]
    assert choose("torch", ["DDP powersgd:.*", "DDP power.*:1"]) == [
        COMPUTE, *(f"DDP powersgd:{rank}" for rank in (1, 2, 4)), f"DDP {contestants.HALVES}",
    ]  # fmt: skip
    assert choose("keras", ["ours randomk:0.1"]) == [COMPUTE, "ours randomk:0.1"]
    for wrong, told in (
        ("zip", "matches none"),
        ("ours zip", "'zip'"),
        ("(", "regular expression"),
    ):
        with pytest.raises(ValueError, match=re.escape(told)):
            choose("torch", [wrong])


def test_every_way_is_understood() -> None:
    for methods in METHODS.values():
        for method in methods:
            assert contestants.group(method) in (contestants.HOROVOD, contestants.PLAIN)
            if contestants.is_ours(method):
                assert contestants.compression(method) is not None
    assert contestants.adapts(OURS + ACCORDION) and not contestants.adapts(f"{OURS}powersgd:1")


def made(framework: str, methods: tuple[str, ...]) -> dict[str, Any]:
    """Return results in which method i takes 10 (i + 1) ms at the first rate, then twice that.

    Repetition r takes r ms more.
    """
    turns = [
        {
            "method": method, "rate": rate, "repetition": repetition, "steps": 3, "foreign": 0.1,
            "ms": [10.0 * (i + 1) * (1 + place) + repetition, 5.0], "cpu_ms": [4.0, 6.0],
            "sent": [1e6 * i, 0.0], "received": [0.0, 1e6 * i], "loss": [2.0, 2.0],
        }
        for repetition in range(3)
        for place, rate in enumerate(("50mbit", "1gbit"))
        for i, method in enumerate(methods)
    ]  # fmt: skip
    return {
        "format": 1,
        "settings": {
            "framework": framework, "model": "vgg", "batch": 16, "rates": ["50mbit", "1gbit"],
            "hosts": 2, "per_host": 1, "backend": "gloo", "repetitions": 3,
        },
        "machine": {
            "cores": 2, "cpu": "x", "kernel": "6", "python": "3", "versions": {"torch": "2"},
            "date": "2025-01-01",
        },
        "model": {"parameters": 100, "tensors": 2},
        "bandwidth": {"50mbit": 6e6, "1gbit": 120e6},
        "equal": {method: method not in (COMPUTE, SILENT) for method in methods},
        "turns": turns,
    }  # fmt: skip


def test_engines_are_told_from_names() -> None:
    over, hook = "ours over torch.distributed topk:0.01", "DDP + our hook topk:0.01"
    assert [contestants.group(name) for name in (over, hook, "ours topk:0.01")] == [
        contestants.PLAIN, contestants.PLAIN, contestants.HOROVOD,
    ]  # fmt: skip
    kinds = {repr(contestants.compression(name)) for name in (over, hook, "ours topk:0.01")}
    assert len(kinds) == 1
    assert contestants.choose("torch", ["DDP . our hook topk:0.01", "DDP + our hook topk:0.3"]) == [
        COMPUTE, hook, "DDP + our hook topk:0.3",
    ]  # fmt: skip
    assert not contestants.is_ours("DDP powersgd:1") and not contestants.is_ours("HSDP")
    assert contestants.choose("torch", ["HSDP.*"]) == [COMPUTE, *contestants.REPLICAS]
    assert {contestants.group(name) for name in contestants.REPLICAS} == {contestants.PLAIN}
    assert page.pairs("torch", ["HSDP", "HSDP within hosts", "HSDP + ours powersgd:4"]) == [
        ("HSDP + ours powersgd:4", "HSDP"),
    ]  # fmt: skip


def test_answers_come_in_rank_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Answers come in the order of ranks, whatever the order in which workers connect.

    Facts are those of rank 0, which alone knows the times of a gate's trials.
    """
    ranks, pipes = (2, 0, 1), [Pipe() for _ in range(3)]
    for rank, (_, worker) in zip(ranks, pipes, strict=True):
        worker.send({"rank": rank, "pid": 100 + rank, "tensors": rank})
    job = SimpleNamespace(status=lambda: None)
    monkeypatch.setattr(group, "Job", lambda *words, **settings: job)
    monkeypatch.setattr(group.Group, "_accept", lambda *words: [one for one, _ in pipes])
    workers = group.Group("ours", SimpleNamespace(names=["a", "b", "c"]), tmp_path, {}, "gloo", 1)
    for rank, (_, worker) in zip(ranks, pipes, strict=True):
        worker.send({"value": rank})
    assert workers.ask("digest", "ours fp16") == [0, 1, 2]
    assert workers.facts == {"tensors": 0}


def test_excesses_are_over_computing_alone() -> None:
    over = "ours over torch.distributed powersgd:4"
    found = made("torch", (COMPUTE, over, "DDP powersgd:4"))
    # 10 ms more than computing alone against 20 ms more, in each repetition
    excesses = tables.excesses(found, over, "DDP powersgd:4", "50mbit")
    assert excesses.tolist() == pytest.approx([0.5] * 3)
    rows = tables.excess(found, tables.excess_pairs(list(found["equal"])))
    assert rows.iloc[0, :3].tolist() == [over, "DDP powersgd:4", "0.50 (0.50-0.50)"]
    assert tables.excess_pairs([f"{OURS}fp16", "DDP + our hook powersgd:4,alternate"]) == [
        (f"{OURS}fp16", "DDP fp16"), ("DDP + our hook powersgd:4,alternate", "DDP powersgd:4"),
    ]  # fmt: skip
    (table,) = page.excesses(found).values()
    assert list(table["compared with"]) == ["DDP powersgd:4"]
    assert page.overview(found)["powersgd:4"].isna().all()  # DDP itself is not measured
    found = made("torch", (COMPUTE, "DDP", over))
    assert page.overview(found)["powersgd:4"][0] == "0.68"


def test_summary() -> None:
    found = made("torch", (COMPUTE, "Horovod", "ours fp16"))
    rows = tables.summary(found, "50mbit")
    alone, sent = (11 + 21) / 2, 1e6  # ms in the median of all turns; bytes of the busier host
    row = rows.loc["Horovod"]
    assert (row["ms"], row["least"], row["most"], row["cpu_ms"]) == (21, 20, 22, 5)
    assert row["sent"] == row["received"] == sent
    assert row["wire"] == pytest.approx(1000 * sent / 6e6)
    assert row["limit"] == pytest.approx(row["wire"])
    assert row["one_by_one"] == pytest.approx(alone + row["wire"])
    assert row["times"] == pytest.approx(21 / row["wire"])
    assert rows["limit"][COMPUTE] == alone
    assert tables.summary(found, "1gbit")["limit"]["Horovod"] == alone  # the link is faster


def test_ratios_are_formed_within_a_repetition() -> None:
    found = made("torch", (COMPUTE, "Horovod", "ours fp16"))
    ratios = tables.ratios(found, "ours fp16", "Horovod", "50mbit")
    assert ratios.tolist() == pytest.approx([20 / 30, 21 / 31, 22 / 32])
    assert tables.ratios(found, "ours fp16", "DDP", "50mbit").empty
    rows = tables.comparison(found, page.pairs("torch", list(found["equal"])))
    assert list(rows.columns) == ["method", "compared with", "50mbit", "1gbit"]
    (row,) = rows.to_numpy().tolist()
    assert row[:3] == ["ours fp16", "Horovod", "0.68 (0.67-0.69)"]


def test_pairs() -> None:
    pairs = page.pairs("torch", METHODS["torch"])
    assert ("ours powersgd:2", "DDP powersgd:2") in pairs and ("ours topk:0.01", "Horovod") in pairs
    first = [(COMPILED, COMPUTE), ("ours dense", GROUPED)]
    assert page.pairs("keras", METHODS["keras"])[:2] == first
    assert {contestants.group(name) for name in first[0]} == {contestants.PLAIN}


def test_report_needs_only_the_results(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    files = []
    for framework, methods in METHODS.items():
        files.append(str(tmp_path / f"{framework}.json"))
        Path(files[-1]).write_text(json.dumps(made(framework, methods)))
    written = tmp_path / "docs" / "performance.md"
    written.parent.mkdir()
    written.write_text(f"old\n\n{END}\n\nWhat somebody noted.\n")
    with pytest.raises(SystemExit) as ended:
        command.main(["report", *files, "--output", str(written.parent)])
    assert not ended.value.code
    text = written.read_text()
    assert not text.startswith("old") and text.endswith(f"\n\n{END}\n\nWhat somebody noted.\n")
    for words in ("**PyTorch", "**Keras", "| 50 Mbit/s |", "averages nothing", "2 cores of x"):
        assert words in text
    rows = read_tables(written.parent / "data" / "performance_steps.csv").values()
    listed = {row["method"] for table in rows for row in table}
    assert listed == {method for methods in METHODS.values() for method in methods}
    assert (tmp_path / "docs" / "performance.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize("name", picture.PICTURES)
def test_pictures_are_those_of_the_pages(name: str) -> None:
    """`netbench.py pictures` draws pictures whose description is the digest of what they show."""
    image = pytest.importorskip("PIL.Image")
    page, panels, _ = picture.PICTURES[name]
    rows = panels(ROOT / "docs" / page)
    assert image.open(ROOT / "docs" / name).text["Description"] == picture.digest(rows)
    shown = [panel for row in rows for panel in row]
    assert all(len(panel.bars) == 5 for panel in shown)
    assert all(bar.least <= bar.value <= bar.most for panel in shown for bar in panel.bars)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("run --rate fast -- true", "rate 'fast'"),
        ("run --hosts 0 -- true", "--hosts is 0"),
        ("run --per-host 0 -- true", "--per-host is 0"),
        ("bench --hosts 1", "--hosts is 1"),
        ("bench --rates 1gb", "rate '1gb'"),
        ("bench --model bert", "--model is 'bert'; torch has vgg, resnet, gpt"),
        ("bench --framework keras --model resnet", "--model is 'resnet'; keras has vgg"),
        ("bench --turn 0", "--turn is 0"),
        ("bench --methods zip", "--methods 'zip' matches none"),
        ("report nothing.json", "results cannot be read"),
    ],
)
def test_refused(words: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(words.split())
    said = capsys.readouterr().err
    assert ended.value.code == 2 and told in said and said.count("\n") == 1


def test_without_root_or_tools_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr("shutil.which", lambda name: None if name in ("ip", "tc") else name)
    assert (sandbox.obstacle() or "").startswith("ip and tc not found")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "root" in (sandbox.obstacle() or "")


def test_leftovers_of_killed_rigs_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    ended = subprocess.Popen(["true"])
    ended.wait()
    names = (f"netbench-{ended.pid}-ab", f"netbench-{os.getpid()}-ab", "netbench-mine-ab")
    for name in names:
        (tmp_path / name / "sub").mkdir(parents=True)
    sandbox.remove_leftovers()
    gone = [name for name in names if not (tmp_path / name).exists()]
    assert gone == ([names[0]] if os.geteuid() == 0 else [])


# -------------------------------------------------------------------------------------- with a rig
ALLREDUCE = """
import sys, time
sys.path.insert(0, {root!r})
import torch, horovod.torch as hvd
hvd.init()
tensor = torch.full((1_000_000,), float(hvd.rank()))
hvd.allreduce(torch.zeros(1), name="start")
began = time.perf_counter()
for _ in range(3):
    total = hvd.allreduce(tensor, name="tensor", op=hvd.Sum)
assert total[0] == 1
if hvd.rank() == 0:
    print(hvd.size(), hvd.local_size(), hvd.cross_size(), time.perf_counter() - began)
"""


@pytest.mark.launch
@pytest.mark.parametrize("backend", ["gloo", "mpi"])
def test_horovod_on_limited_links(backend: str, token: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("horovod")
    program = tmp_path / "program.py"
    program.write_text(ALLREDUCE.format(root=str(ROOT)))
    words = ["run", "--hosts", "2", "--rate", "100mbit", "--backend", backend, "--"]
    status, out, err = rig(token, *words, "python", str(program))
    assert status == 0, out + err
    size, local, cross, seconds = out.split()
    assert (size, local, cross) == ("2", "1", "2")
    assert 12e6 * 8 / 100e6 < float(seconds) < 5 * 12e6 * 8 / 100e6
    counted = re.findall(r"rig\d+-\d sent ([\d,]+) B and received ([\d,]+) B", err)
    assert len(counted) == 2
    for number in (int(text.replace(",", "")) for pair in counted for text in pair):
        assert 12e6 <= number < 14e6


HALVES = """
import sys
sys.path.insert(0, {root!r})
import torch
import accordion_hvd.torch as hvd
hvd.init()
weight = torch.nn.Parameter(torch.zeros(300, 100))
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD([weight], lr=1.0), [("w", weight)], compression="fp16"
)
parts = [torch.randn(300, 100, generator=torch.Generator().manual_seed(r)) for r in range(2)]
weight.grad = parts[hvd.rank()].clone()
optimizer.step()
apart = (weight + sum(parts) / 2).abs().max().item()
print(hvd.rank(), optimizer.exchange.communicator.native_fp16_allreduce, apart < 2e-3)
"""


@pytest.mark.launch
@pytest.mark.parametrize(("rate", "engine"), [("40mbit", True), ("none", False)])
def test_halves_are_added_by_the_engine_on_slow_links(
    rate: str, engine: bool, token: str, tmp_path: Path
) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("horovod")
    program = tmp_path / "program.py"
    program.write_text(HALVES.format(root=str(ROOT)))
    words = ["run", "--hosts", "2", "--rate", rate, "--", "python", str(program)]
    status, out, err = rig(token, *words)
    assert status == 0, out + err
    assert out.splitlines() == [f"0 {engine} True"], err


COUNTED = """
import os, sys
sys.path.insert(0, {root!r})
os.environ["HOROVOD_CYCLE_TIME"] = "20"  # ms; a rank that waits sends a message per cycle
from pathlib import Path
import torch
import accordion_hvd.torch as hvd
from benchmarks.netbench.network import read_counters
hvd.init()

def sent():
    return read_counters(Path("/proc/self/net/dev").read_text())[1], exchange.stats()["sent"]

def total(values, name):
    return hvd.allreduce(torch.tensor(values, dtype=torch.float64), op=hvd.Sum, name=name)

for word in sys.argv[1:]:
    matrix = torch.nn.Parameter(torch.zeros(1000, 400))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([matrix], lr=0.0), [("w", matrix)], compression=word
    )
    chance = torch.Generator().manual_seed(hvd.rank())
    for step in range(7):
        if step == 3:  # all is agreed on, and phases are over
            exchange = optimizer.exchange
            total([0.0], word + ".start")
            before = sent()
        matrix.grad = torch.randn(1000, 400, generator=chance)
        optimizer.step()
    wire, said = total([now - then for now, then in zip(sent(), before)], word + ".end").tolist()
    if hvd.rank() == 0:
        print(word, wire, said, sep=";")
"""
WORDS = ("dense", "fp16", "topk:0.05", "scalecom:0.05", "powersgd:8", "sketchedsgd:0.005", "qsgd:4",
         "terngrad", "signsgd", "efsignsgd", "lgc:0.05,dense=1,training=1")  # fmt: skip


@pytest.mark.launch
def test_bytes_on_the_wire_are_those_of_stats(token: str, tmp_path: Path) -> None:
    """Network interfaces count the bytes of `stats`, plus headers and control messages.

    Both numbers are sums over three hosts.
    """
    pytest.importorskip("torch")
    pytest.importorskip("horovod")
    program = tmp_path / "program.py"
    program.write_text(COUNTED.format(root=str(ROOT)))
    words = ["run", "--hosts", "3", "--", "python", str(program), *WORDS]
    status, out, err = rig(token, *words, limit=250)
    assert status == 0, out + err
    rows = {word: (float(wire), float(said)) for word, wire, said in map(split, out.splitlines())}
    assert list(rows) == list(WORDS)
    for word, (wire, said) in rows.items():
        control = 350_000  # Horovod's own messages in 4 steps of 3 ranks, on slow machines
        assert said < wire < 1.05 * said + control, (word, wire, said)


def split(line: str) -> list[str]:
    return line.split(";")


@pytest.mark.launch
def test_links_carry_what_they_are_told(token: str) -> None:
    """A link with a rate of 40 Mbit/s carries at least 85 % of it, and not more than the rate."""
    program = (
        "import os, sys\nfrom benchmarks.netbench import goodput\n"
        "if os.environ['RANK'] == '0':\n    print(goodput.receive('10.77.0.1'))\n"
        "else:\n    goodput.send('10.77.0.1', 1.0)\n"
    )
    words = ["run", "--hosts", "2", "--rate", "40mbit", "--backend", "torch", "--"]
    status, out, err = rig(token, *words, "python", "-c", program)
    assert status == 0, err
    assert 0.85 * 40e6 < 8 * float(out) < 40e6


@pytest.mark.launch
def test_a_crash_ends_the_others_and_its_status_is_passed_on(token: str) -> None:
    program = '[ "$HOROVOD_RANK" = 1 ] && { echo no luck; exit 7; }; exec sleep 1000'
    status, _, err = rig(token, "run", "--hosts", "2", "--per-host", "2", "--", "sh", "-c", program)
    assert status == 7 and "--- rank 1:\nno luck" in err


@pytest.mark.launch
def test_whoever_hangs_is_ended(token: str) -> None:
    ignoring = "trap '' TERM; while true; do sleep 1; done"
    words = ["run", "--hosts", "2", "--timeout", "1", "--", "sh", "-c", ignoring]
    status, _, err = rig(token, *words)
    assert status == 124 and "took too long" in err


@pytest.mark.launch
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_signals_end_everything(number: signal.Signals, token: str) -> None:
    process = start(token, "run", "--hosts", "2", "--", "sh", "-c", "echo up; exec sleep 1000")
    try:
        assert process.stdout is not None and process.stdout.readline() == "up\n"
        assert len(marked(token)) > 4
        process.send_signal(number)
        process.communicate(timeout=20)
    finally:
        process.kill()
    killed = number is signal.SIGKILL
    assert process.returncode == (-number if killed else 128 + number)
    until = time.monotonic() + 8
    while killed and marked(token) and time.monotonic() < until:  # they end by themselves
        time.sleep(0.05)
    sandbox.remove_leftovers()


@pytest.mark.launch
def test_bench_measures_and_reports(token: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("horovod")
    pytest.importorskip("matplotlib")
    file, trace = tmp_path / "a.json", tmp_path / "trace.csv"
    trace.write_text("seconds,rate\n0,200mbit\n0.5,20mbit\n")
    words = ["bench", "--quick", "--hosts", "2", "--model", "resnet", "--output", str(file)]
    words += ["--rates", "200mbit", str(trace), "--rtt", "2ms"]
    status, out, err = rig(
        token, *words, "--methods", "DDP powersgd:1", "ours accordion", limit=200
    )
    assert status == 0, out + err
    found = json.loads(file.read_text())
    methods = {turn["method"]: turn for turn in found["turns"] if turn["rate"] == "200mbit"}
    assert found["equal"] == {COMPUTE: False, "DDP powersgd:1": True, "ours accordion": True}
    assert 0.8 * 25e6 < found["bandwidth"]["200mbit"] < 25e6
    assert 2.5e6 < found["bandwidth"][str(trace)] < 0.8 * 25e6
    assert found["settings"]["rtt"] == "2ms" and " / 200 Mbit/s, RTT 2 ms" in page.steps(found)
    for method in ("DDP powersgd:1", "ours accordion"):
        assert 1e4 < max(methods[method]["sent"]) < 4e5 and min(methods[method]["cpu_ms"]) > 1
    assert max(methods[COMPUTE]["sent"]) < 1e3
    assert "ours accordion" in out
