"""The optimizers' benchmark: its problems, ratios, tables, and the page from results alone."""

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
    """Two tasks and seeds: method i ends with (1 + i / 100) times Adam's loss of 0.2."""
    runs = [
        {
            "task": task, "method": name, "seed": seed, "lr": 0.01, "settings": "", "warm": 10,
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
        "format": 1, "benchmark": "optimizers", "action": "run", "ranks": 4,
        "machine": {"cores": 2, "cpu": "x", "kernel": "6", "python": "3",
                    "versions": {"torch": "2"}, "date": "2025-01-01"},
        "tasks": {"one": {**given, "title": "one", "least": 0.1},
                  "two": {**given, "title": "two", "least": None}},
        "runs": runs,
    }  # fmt: skip


# ---------------------------------------------------------------------------------------- numbers
def test_ratios_are_taken_within_a_seed() -> None:
    found = made()
    place = list(METHODS).index("OnebitAdam")
    assert page.pairs(found, "one", "OnebitAdam") == pytest.approx([1 + place / 100] * 2)
    above = [(0.2 * s * (1 + place / 100) - 0.1) / (0.2 * s - 0.1) for s in (1, 2)]
    assert page.pairs(found, "one", "OnebitAdam", 0.1) == pytest.approx(above)


def test_bytes_are_compared_after_the_warm_up() -> None:
    run = made()["runs"][0]
    assert page.saved(run) == pytest.approx(20)
    assert page.saved({**run, "warm": 0}) == pytest.approx(3e6 / 1.1e6)
    assert page.saved({**run, "warm": 11}) == pytest.approx(20)


def test_a_loss_is_reached_at_the_first_evaluation_at_it() -> None:
    run = made()["runs"][0]
    assert page.until(run, 0.5) == (20, 1.05e6)
    assert page.until(run, 0.1) is None
    lost = {**run, "loss": [2.0, None, None, None]}
    assert page.until(lost, 1.0) is None and page.final(lost) == math.inf
    assert page.reached([run, lost], 0.5) is None  # half of them is not most
    assert page.reached([run, run, lost], 0.5) == [(20, 1.05e6)] * 2


def test_the_goal_needs_both() -> None:
    found = made()
    verdicts = {row[0].strip("`"): row[-1] for row in page.overview(found)[1:]}
    assert set(verdicts) == {name for name, method in METHODS.items() if method.beside}
    assert verdicts["OnebitAdam"] == "met" and verdicts["CDAdam"] == "loss missed"
    for run in found["runs"]:
        run["sent"] = [2 * sent for sent in run["sent"]]
    told = {row[0].strip("`"): row[-1] for row in page.overview(found)[1:]}
    assert told["OnebitAdam"] == "bytes missed"
    assert told["CDAdam"] == "loss missed, bytes missed"


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


def test_a_broken_off_run_makes_a_page(tmp_path: Path) -> None:
    found = made(("Adam", "Birder"))
    found["runs"] = found["runs"][:3]
    found["tasks"].pop("two")
    assert "`Birder`" in page.write([found], tmp_path)[0].read_text()
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
    assert page.tried(tuning, "one", "Adam") == pytest.approx({0.01: 0.3, 0.02: 0.01})
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
    assert set(method.lr) == set(tasks.TASKS)
    assert method.beside in ("", "Adam", "AMSGrad")
    for task in tasks.TASKS:
        assert method.lr[task] in method.grid
        rule = method.rule(task, 400)
        assert isinstance(rule, getattr(optimizers, method.optimizer))
    assert not set(methods.SEEDS) & set(methods.TUNING)
    assert name in contestants.RULES and name in page.STATE and name in page.COLOURS


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
    assert (
        policy is not None and list(policy.schedule) == [0, 5] and begins.exact("digits", 50) == 5
    )
    assert begins.describe("digits", 50) == "preconditioned=True, exact stage for 5 steps"
    own = methods.Method("OnebitAdam", "Adam", {}, (), warm=0.1)
    assert own.policy("digits", 50) is None and own.describe("digits", 50) == "warmup_steps=5"


def test_simulated_training_learns_and_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    short = tasks.StepTask(
        title="t", what="", loss="", problem=tasks.digits, steps=12, batch=16, every=6, warmup=0.2
    )
    monkeypatch.setitem(tasks.TASKS, "short", short)
    monkeypatch.setitem(METHODS, "Birder", methods.Method("Birder", "Adam", {"short": 1e-3}, ()))
    row = training.train(training.Simulated("short", "Birder", 1e-3, 1), "short", 1e-3)
    assert row["steps"] == [0, 6, 12] and row["loss"][-1] < row["loss"][0]
    assert row["dense"][-1] == pytest.approx(12 * 6 * row["parameters"])
    assert 20 < page.saved({**row, "warm": 0}) < 32
    assert row["state"] == pytest.approx(8 * row["parameters"], rel=0.05)
    assert 0 <= row["accuracy"] <= 1


def test_nothing_is_trained_twice(tmp_path: Path) -> None:
    options = command.parse(["run", "--tasks", "digits", "--output", str(tmp_path / "x.json")])
    options.tuning = str(tmp_path / "tuning.json")
    jobs = list(command.wanted(options))
    tuned = {**jobs[0], "lr": 0.5, "loss": [0.1]}
    Path(options.tuning).write_text(json.dumps({"runs": [tuned, {**tuned, "lr": 1, "loss": [9]}]}))
    assert next(command.wanted(options)) == {**jobs[0], "lr": 0.5}
    assert len(jobs) == len(METHODS) * len(methods.SEEDS)
    found = command.read(Path(options.output), "run", 4)
    found["runs"].append(jobs[0])
    assert [command.has(found, job) for job in jobs[:2]] == [True, False]
    assert not command.has(found, {**jobs[0], "lr": 1.0})
    command.add(found, {**jobs[0], "lr": 1.0})
    assert found["runs"] == [{**jobs[0], "lr": 1.0}]
    command.add(found, jobs[0])
    Path(options.output).write_text(json.dumps(found))
    assert command.read(Path(options.output), "run", 4)["runs"] == [jobs[0]]
    with pytest.raises(command.Refusal, match="ranks 4, not 2"):
        command.read(Path(options.output), "run", 2)
