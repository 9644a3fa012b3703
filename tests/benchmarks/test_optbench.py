"""Tests of the optimizers' benchmark: its problems, ratios, tables, and page."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("sklearn")

import torch

from accordion_hvd import optimizers
from benchmarks.netbench import contestants
from benchmarks.optbench import command, methods, page, tasks, training
from benchmarks.optbench.methods import METHODS

STEPS = [0, 10, 20, 30]


def made(names: tuple[str, ...] = tuple(METHODS)) -> dict[str, Any]:
    """Return results of two tasks and seeds: method i ends with (1 + i / 100) times Adam's loss.

    Compression begins at step 10, with a loss of 1. Adam's loss then falls to 0.2 with seed 1, and
    to 0.4 with seed 2.
    """
    runs = [
        {
            "task": task, "method": name, "seed": seed, "lr": 0.01, "settings": "",
            "begins": 10 if METHODS[name].beside else None,
            "steps": STEPS, "loss": [2.0, 1.0, 0.5, 0.2 * seed * (1 + i / 100)],
            "dense": [0.0, 1e6, 2e6, 3e6], "sent": [0.0, 1e6, 1e6 + 1e6 / 20, 1e6 + 2e6 / 20],
            "accuracy": 0.9 if task == "one" else None, "state": 8000, "parameters": 1000,
            "seconds": 1.0, "equal": True,
        }
        for task in ("one", "two") for seed in (1, 2) for i, name in enumerate(names)
    ]  # fmt: skip
    given = {"what": "It is.", "loss": "training loss", "steps": 30, "batch": 8, "warmup": 0.1}
    given |= {"parameters": 1000, "tensors": 2}
    return {
        "format": 1, "benchmark": "optimizers", "action": "run", "ranks": 4, "simulated": False,
        "machine": {"cores": 2, "cpu": "x", "kernel": "6", "python": "3",
                    "versions": {"torch": "2"}, "date": "2025-01-01"},
        "tasks": {"one": {**given, "title": "one", "least": 0.1},
                  "two": {**given, "title": "two", "least": None}},
        "runs": runs,
    }  # fmt: skip


# ---------------------------------------------------------------------------------------- numbers
def test_shares_and_excess_are_taken_within_a_seed() -> None:
    found = made()
    more = 1 + list(METHODS).index("OnebitAdam") / 100
    pairs = page.twins(found, "one", "OnebitAdam")
    shares = [(1 - 0.2 * s * more) / (1 - 0.2 * s) for s in (1, 2)]
    assert [page.kept(*pair) for pair in pairs] == pytest.approx(shares)
    above = [(0.2 * s * more - 0.1) / (0.2 * s - 0.1) for s in (1, 2)]
    assert [page.excess(*pair, 0.1) for pair in pairs] == pytest.approx(above)


def test_the_reduction_begins_at_the_evaluation_before_compression() -> None:
    found = made()
    run, dense = page.twins(found, "one", "Birder")[0]
    for begins, loss in ((0, 2.0), (9, 2.0), (10, 1.0), (29, 0.5)):
        share = (loss - page.final(run)) / (loss - page.final(dense))
        assert page.kept({**run, "begins": begins}, dense) == pytest.approx(share)
    assert page.begin(dense) == 0


def test_bytes_of_the_whole_training_and_later_ones() -> None:
    run = made(("Adam", "Birder"))["runs"][1]
    assert page.saved(run) == pytest.approx(3e6 / 1.1e6)
    assert page.saved_later(run) == pytest.approx(20)
    assert page.saved_later({**run, "begins": 0}) == pytest.approx(3e6 / 1.1e6)
    assert page.saved_later({**run, "begins": 11}) == pytest.approx(20)


def test_diverged_trainings_are_named() -> None:
    found = made(("Adam", "Birder"))
    for run, last in zip(found["runs"], (0.2, None, 0.2, 2.1), strict=False):
        run["loss"][-1] = last
    assert [page.final(run) for run in page.runs(found, "one", "Birder")] == [math.inf] * 2
    assert page.verdict(found, "one", "Birder") == "missed: diverged"
    row = page.table(found, "one").iloc[1].tolist()
    assert row[3] == "diverged" and row[6:8] == ["diverged"] * 2 and row[-1] == "missed"
    assert page.told([1.0, math.inf, 2.0], str) == "2.0 (1.0 to diverged)"


def test_the_goal_is_a_share() -> None:
    found = made()
    verdicts = {row[0].strip("`"): row[1] for row in page.overview(found).to_numpy()}
    assert set(verdicts) == {name for name, method in METHODS.items() if method.beside}
    assert verdicts["OnebitAdam"] == "met: 98.6 %, 2.7 x"
    assert verdicts["CDAdam"].startswith("missed: ")


# --------------------------------------------------------------------------------------- the page
def test_the_page_needs_the_results_alone(tmp_path: Path) -> None:
    found = json.loads(json.dumps(made()))
    text, picture = page.write([found], tmp_path)
    written = text.read_text()
    assert picture.stat().st_size > 10_000
    assert "4 ranks on 2 cores" in written
    assert "all ranks ended with bitwise equal weights" in written
    assert written.count("| `OnebitAdam` |") >= 3  # goal, state, settings
    assert "On limited links" not in written
    found["runs"][0]["equal"] = False
    assert "1 trainings ranks ended" in page.write([found], tmp_path)[0].read_text()
    written = page.write([{**found, "simulated": True}], tmp_path)[0].read_text()
    assert "4 simulated ranks on 2 cores" in written and "ranks ended" not in written


def test_a_broken_off_run_makes_a_page(tmp_path: Path) -> None:
    found = made(("Adam", "Birder"))
    found["runs"] = found["runs"][:3]
    found["tasks"].pop("two")
    assert "`Birder`" in page.write([found], tmp_path)[0].read_text()
    found["runs"] = found["runs"][:1]
    assert "| Adam | 0.01 | 1 |" in page.write([found], tmp_path)[0].read_text()
    with pytest.raises(ValueError, match="no file has results of `run`"):
        page.write([{**found, "action": "tune"}], tmp_path)


def test_grids_and_times_join_the_page(tmp_path: Path) -> None:
    turn = {"rate": "50mbit", "repetition": 0, "steps": 2, "cpu_ms": [1.0], "loss": [1.0],
            "received": [1e5], "sent": [1e5], "foreign": 0.0}  # fmt: skip
    methods = {"compute only": 5.0, "optimizer Adam": 40.0, "optimizer Birder": 10.0}
    timing = {
        "settings": {"rates": ["50mbit"], "model": "vgg", "batch": 16, "hosts": 4},
        "model": {"parameters": 10, "tensors": 2}, "bandwidth": {"50mbit": 6e6},
        "equal": dict.fromkeys(methods, True),
        "turns": [{**turn, "method": method, "ms": [ms]} for method, ms in methods.items()],
    }  # fmt: skip
    tuning = {**made(), "action": "tune"}
    written = page.write([timing, tuning, made()], tmp_path)[0].read_text()
    assert "| Birder | 0.100 | 10 | 4.00 |" in written
    assert "Final loss by learning rate" in written and "compute only" not in written


def test_a_better_rate_of_the_grid_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    tuning = {**made(("Adam",)), "action": "tune"}
    tuning["runs"] += [{**run, "lr": 0.02, "loss": [1.0, 0.01]} for run in tuning["runs"]]
    assert page.tried(tuning, "one", "Adam").to_dict() == pytest.approx({0.01: 0.3, 0.02: 0.01})
    told = "two: Adam is best at lr 0.02 (loss 0.01000)"
    assert command.advice(tuning)[1:] == [told] and command.advice(made()) == []
    monkeypatch.setitem(METHODS["Adam"].lr, "two", 0.02)
    assert told not in command.advice(tuning)


# ----------------------------------------------------------------------------- tasks and methods
def test_the_optimum_is_one() -> None:
    draw = np.random.default_rng(0)
    inputs, labels = draw.standard_normal((40, 6)), draw.integers(0, 3, 40)
    least = tasks.least_loss(inputs, labels)
    x, true = np.concatenate([inputs, np.ones((40, 1))], 1), np.eye(3)[labels]
    weights = np.zeros((7, 3))
    for _ in range(3000):
        shares = np.exp(x @ weights)
        shares /= shares.sum(1, keepdims=True)
        weights -= x.T @ (shares - true) / 40 + tasks.DECAY * weights
    loss = -np.mean(np.log((shares * true).sum(1))) + tasks.DECAY / 2 * (weights**2).sum()
    assert least == pytest.approx(loss, abs=1e-7)


def test_no_letter_sees_what_comes_after_it() -> None:
    torch.manual_seed(0)
    net = tasks.Characters(10)
    letters = torch.randint(0, 10, (2, tasks.LENGTH))
    changed = letters.clone()
    changed[:, 40:] = (changed[:, 40:] + 1) % 10
    before, after = net(letters), net(changed)
    assert torch.allclose(before[:, :, :40], after[:, :, :40], atol=1e-5)
    assert not torch.allclose(before[:, :, 40:], after[:, :, 40:], atol=1e-2)


@pytest.mark.parametrize("name", list(METHODS))
def test_settings_are_understood(name: str) -> None:
    method = METHODS[name]
    assert set(method.lr) <= set(tasks.TASKS)
    assert method.beside in ("", "Adam", "AMSGrad", "Lamb")
    for task in method.lr:
        assert method.lr[task] in method.grid
        rule = method.rule(task, 400)
        assert isinstance(rule, getattr(optimizers, method.optimizer))
        assert not method.beside or task in METHODS[method.beside].lr
    assert not set(methods.SEEDS) & set(methods.TUNING)
    assert method.optimizer in page.STATE and method.optimizer in page.COLOURS


def test_methods_as_published_have_the_defaults() -> None:
    published = [name for name, method in METHODS.items() if name == method.optimizer]
    for name in published:
        rule, default = METHODS[name].rule("digits", 1200), getattr(optimizers, name)()
        changed = {key for key, x in vars(default).items() if getattr(rule, key) != x}
        assert changed == ({"warmup_steps"} if name in ("OnebitAdam", "OnebitLamb") else set())
    assert page.style("Birder")[0] == page.style("Birder, ours")[0]
    assert [page.style(name)[1] for name in ("Birder", "Birder, ours", "Adam")] == ["--", "-", "-"]


def test_links_know_the_optimizers() -> None:
    chosen = contestants.choose("torch", ["optimizer .*"])
    assert chosen == ["compute only", *(f"optimizer {name}" for name in contestants.RULES)]
    assert all(contestants.group(method) == contestants.HOROVOD for method in chosen[1:])
    assert not set(chosen[1:]) & set(contestants.choose("torch", []))
    with pytest.raises(ValueError, match="matches none"):
        contestants.choose("keras", ["optimizer Adam"])


def test_exact_steps_come_first_where_they_are_wanted() -> None:
    begins = methods.Method("CDAdam", "AMSGrad", {}, (), {"preconditioned": True}, warm=0.1)
    policy = begins.policy("digits", 50)
    assert policy is not None and list(policy.schedule) == [0, 5]
    assert begins.describe("digits", 50) == "preconditioned=True, exact stage for 5 steps"
    own = methods.Method("OnebitAdam", "Adam", {}, (), warm=0.1)
    assert own.policy("digits", 50) is None and own.describe("digits", 50) == "warmup_steps=5"


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> str:
    """Add a task of a few steps, and methods with settings for it; return its name."""
    task = tasks.StepTask(
        title="t", what="", loss="", problem=tasks.digits, steps=12, batch=16, every=6, warmup=0.2
    )
    monkeypatch.setitem(tasks.TASKS, "short", task)
    local = {"var_freeze_step": 4, "local_step_scaler": 4, "local_step_clipper": 2}
    for name, settings in (
        ("Birder", {}),
        ("OnebitLamb", {"warmup_steps": 7}),
        ("ZeroOneAdam", local),
    ):
        method = methods.Method(name, "Adam", {"short": 1e-3}, (), settings)
        monkeypatch.setitem(METHODS, name, method)
    return "short"


def test_simulated_training_learns_and_counts(short: str) -> None:
    row = training.train(training.Simulated(short, "Birder", 1e-3, 1), short, 1e-3)
    assert row["steps"] == [0, 6, 12] and row["loss"][-1] < row["loss"][0]
    assert row["dense"][-1] == pytest.approx(12 * 6 * row["parameters"])
    assert row["begins"] == 0 and 20 < page.saved(row) < 32
    assert row["state"] == pytest.approx(8 * row["parameters"], rel=0.05)
    assert 0 <= row["accuracy"] <= 1


def test_simulated_ranks_have_their_weights(short: str) -> None:
    row = training.train(training.Simulated(short, "OnebitLamb", 1e-2, 1), short, 1e-2)
    assert row["begins"] == 7 and row["loss"][-1] < row["loss"][0]
    ranks = training.Simulated(short, "ZeroOneAdam", 1e-3, 1)
    equal = []
    for _ in range(12):
        ranks.step(1e-3)
        equal.append(len({training.digest(net) for net in ranks._nets}) == 1)
    assert equal == [True] * 8 + [False, True] * 2  # local steps begin after 4 + 4 steps


def test_steps_with_infinite_gradients_are_skipped(short: str) -> None:
    ranks = training.Simulated(short, "Birder", 1e-3, 1)
    with torch.no_grad():
        next(ranks.net.parameters()).fill_(math.inf)
    before = training.digest(ranks.net)
    ranks.step(1e-3)
    assert training.digest(ranks.net) == before


def test_nothing_is_trained_twice(tmp_path: Path) -> None:
    options = command.Run(
        tasks=["digits"], output=tmp_path / "x.json", tuning=tmp_path / "tuning.json"
    )
    jobs = list(command.wanted(options))
    tuned = {**jobs[0], "lr": 0.5, "loss": [0.1]}
    options.tuning.write_text(json.dumps({"runs": [tuned, {**tuned, "lr": 1, "loss": [9]}]}))
    assert next(command.wanted(options)) == {**jobs[0], "lr": 0.5}
    wanted = [name for name in methods.ON_ONE_HOST if "digits" in METHODS[name].lr]
    assert len(jobs) == len(wanted) * len(methods.SEEDS)
    rest = command.Run(tasks=["characters"], methods=["ZeroOneAdam"])
    assert not list(command.wanted(rest))
    found = command.read(options.output, "run", 4)
    found["runs"].append(jobs[0])
    assert [command.has(found, job) for job in jobs[:2]] == [True, False]
    assert not command.has(found, {**jobs[0], "lr": 1.0})
    command.add(found, {**jobs[0], "lr": 1.0})
    assert found["runs"] == [{**jobs[0], "lr": 1.0}]
    command.add(found, jobs[0])
    options.output.write_text(json.dumps(found))
    assert command.read(options.output, "run", 4)["runs"] == [jobs[0]]
    with pytest.raises(command.Refusal, match="ranks 4, not 2"):
        command.read(options.output, "run", 2)
    with pytest.raises(command.Refusal, match="hosts 1, not 2"):
        command.read(options.output, "run", 4, 2)
