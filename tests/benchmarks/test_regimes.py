"""Tests of the trainings of Accordion and its competitors: bytes, batches, and the page."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from accordion_hvd import Displacement, Fixed, StepSchedule, parse
from accordion_hvd.policies.displacement import BOUND, RELEASE
from accordion_hvd.resolve import as_policy
from benchmarks.regimes import bounds, command, page, table
from benchmarks.regimes.methods import METHODS, Plan, RandomLayers
from benchmarks.regimes.studies import STUDIES, Study
from benchmarks.regimes.training import RANKS, Outcome, Training, changes, low_share

STEPS = 4


class Drawn:
    """Random vectors, labelled with the sign of the sum of their elements."""

    steps = STEPS

    def __init__(self, seed: int, ranks: int, batch: int, device: Any) -> None:
        self.seed, self.ranks, self.batch = seed, ranks, batch
        self.drawn: list[int] = []

    def batches(self, step: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        self.drawn.append(step)
        found = []
        for rank in range(self.ranks):
            generator = np.random.default_rng([self.seed, step, rank])
            x = torch.from_numpy(generator.standard_normal((self.batch, 24)).astype("f"))
            found.append((x, (x.sum(1) > 0).long()))
        return found

    def score(self, model: nn.Module) -> float:
        x, y = Drawn(99, 1, 500, None).batches(0)[0]
        return 100 * float((model(x).argmax(1) == y).float().mean())


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(24, 128), nn.ReLU(), nn.Linear(128, 128), nn.Linear(128, 2))


TINY = Study(
    title="Tiny", about="A network.", network=network, source=Drawn, epochs=12, batch=4, grows=True
)


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(STUDIES, "tiny", TINY)


def train(method: str, share: float = 0.0, seed: int = 1) -> Outcome:
    return Training("tiny", method, seed, share=share).run()


def test_competitors_send_the_bytes_of_accordion() -> None:
    low, high, accordion = train("low"), train("high"), train("accordion")
    outcomes = {table.key(outcome): outcome for outcome in (low, high, accordion)}
    job = command.Job("tiny", "accordion-first", 1, TINY.epochs)
    share = job.share(outcomes)
    assert 0 < share < 1 and high.megabytes < accordion.megabytes < low.megabytes
    first = train("accordion-first", share)
    step = (low.megabytes - high.megabytes) / (STEPS * TINY.epochs)
    assert abs(first.megabytes - accordion.megabytes) <= step
    assert first.score != accordion.score or first.changes != accordion.changes
    assert train("accordion-first", 0.0).megabytes == high.megabytes
    assert train("rate").low == 0.5  # the rate falls first after half of the training
    assert train("middle").megabytes < low.megabytes


def test_random_layers_have_low_compression_as_often_as_wanted() -> None:
    policy = RandomLayers(*Plan(TINY, STEPS).levels, share=0.3, seed=5, window=2)
    drawn = [policy._drawn(window, name) for window in range(500) for name in ("a", "b")]
    assert abs(np.mean([level == 0 for level in drawn]) - 0.3) < 0.05
    assert drawn == [policy._drawn(w, name) for w in range(500) for name in ("a", "b")]
    first, second = (Training("tiny", "accordion-random", seed, share=0.5) for seed in (1, 2))
    assert first.run().changes and second.run().changes and first.levels != second.levels


def test_large_batches_use_each_small_batch_once_and_more_of_the_rate() -> None:
    training = Training("tiny", "large", 1)
    found = training.run()
    source: Any = training.source
    assert source.drawn == list(range(STEPS * TINY.epochs))
    assert found.steps == STEPS * TINY.epochs / 4
    assert training.optimizer.param_groups[0]["lr"] == pytest.approx(4 * TINY.lr_at(11.5))
    grows = train("grows")
    assert found.steps < grows.steps < STEPS * TINY.epochs


def test_the_rate_rises_and_falls_twice() -> None:
    rates = [TINY.lr_at(epoch) for epoch in (0.0, 0.5, 1, 5.9, 6, 9.9, 10, 11.9)]
    assert rates == pytest.approx([0.01, 0.06, 0.1, 0.1, 0.01, 0.01, 0.001, 0.001])


def test_levels_are_counted() -> None:
    levels = [{"a": 0, "b": 0}, {"a": 1, "b": 0}, {"a": 0, "b": 1}]
    assert low_share(levels) == 4 / 6 and changes(levels) == 3 and np.isnan(low_share([]))


@pytest.mark.parametrize("name", STUDIES)
def test_every_study_has_policies(name: str) -> None:
    study = STUDIES[name]
    for method in METHODS.values():
        if study.middle or "middle" not in method.label:
            method.policy(Plan(study, 10, 0.5)).complete()
    if not (study.gpu or name == "characters"):  # large, or with data
        assert study.network().state_dict()


def options(folder: Path, *more: str) -> list[str]:
    files = ["--table", str(folder / "x.csv"), "--output", str(folder / "x.md")]
    return ["--studies", "tiny", "--seeds", "1", *files, *more]


def test_trainings_are_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trained = []

    class Pool:
        """Stand-in for a process pool, which trains in this process, where the study is known."""

        def __init__(self, *_: Any) -> None: ...

        def __enter__(self) -> Pool:
            return self

        def __exit__(self, *_: Any) -> None: ...

        def submit(self, function: Any, job: command.Job, *more: Any) -> Any:
            trained.append(job.method)
            done: Any = command.Future()
            done.set_result(function(job, *more))
            return done

    monkeypatch.setattr(command, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(command, "_fetch", lambda jobs: None)
    with pytest.raises(SystemExit):
        command.main(options(tmp_path, "--methods", "accordion-first", "low"))
    assert "--methods must contain low, high and accordion, too" in capsys.readouterr().err
    chosen = ["--methods", "low", "high", "accordion", "accordion-first"]
    command.main(options(tmp_path, *chosen))
    assert sorted(trained) == ["accordion", "accordion-first", "high", "low"]
    command.main(options(tmp_path, *chosen))
    assert len(trained) == 4
    text = (tmp_path / "x.md").read_text()
    assert "| Tiny | Accordion | low first, bytes of Accordion |" in text
    assert "| low | " in text and "## Tiny" in text
    command.main(options(tmp_path))
    text = (tmp_path / "x.md").read_text()
    assert "| Tiny | large batches |" in text and "## Real ranks" not in text


def test_the_table_keeps_results(tmp_path: Path) -> None:
    outcome = Outcome("tiny", "low", 1, 12, 98.25, 1.5, 20.0, float("nan"), 0, 72, 1.25)
    other = dataclasses.replace(outcome, method="high", low=0.5)
    table.write(tmp_path / "x.csv", [outcome, other])
    found = table.read(tmp_path / "x.csv")
    assert list(found) == [("tiny", "high", 1, 12), ("tiny", "low", 1, 12)]
    assert found["tiny", "high", 1, 12] == other
    assert np.isnan(found["tiny", "low", 1, 12].low)
    assert table.read(tmp_path / "y.csv") == {}


def test_differences_are_those_within_seeds() -> None:
    outcome = Outcome("tiny", "accordion", 1, 12, 90.0, 1.0, 20.0, 0.5, 3, 72, 1.0)
    scores = {"accordion": [90.0, 80.0], "rate": [89.0, 81.5]}
    found = {
        method: {
            seed: dataclasses.replace(outcome, method=method, seed=seed, score=score)
            for seed, score in enumerate(values)
        }
        for method, values in scores.items()
    }
    (row,) = page.rivals(TINY, found)
    assert row["better"] == "-0.2 (-1.5 to +1.0)"
    (row,) = page.rivals(dataclasses.replace(TINY, losses=True), found)
    assert row["better"] == "+0.250 (-1.000 to +1.500)"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--studies", "vggg"], "--studies is 'vggg'"),
        (["--methods", "best"], "--methods is 'best'"),
        (["--processes", "0"], "--processes is 0"),
    ],
)
def test_bad_options(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(words)
    assert ended.value.code == 2 and told in capsys.readouterr().err


@pytest.mark.parametrize("name", bounds.STUDIES)
def test_studies_of_bounds_change_what_they_say(name: str) -> None:
    study = bounds.STUDIES[name]
    settings = study.settings(48)
    chosen = {x: as_policy(bounds.policy(study, x, settings)) for x in bounds.METHODS}
    assert all(isinstance(chosen[x], Fixed) for x in bounds.FIXED)
    found = {x: policy for x, policy in chosen.items() if isinstance(policy, Displacement)}
    assert [found[bounds.bounded(x)].bound for x in bounds.BOUNDS] == list(bounds.BOUNDS)
    assert all(found[bounds.released(x)].bound == BOUND for x in bounds.RELEASES)
    assert {policy.release for policy in found.values()} == {RELEASE, *bounds.RELEASES}
    assert all(policy.low == parse(study.levels[0]) for policy in found.values())
    constant = settings.schedule == "constant"
    assert isinstance(chosen["rate"], Fixed if constant else StepSchedule)
    rates = [settings.lr_at(epoch) for epoch in range(48)]
    assert constant or rates[0] / rates[-1] > 9


def test_a_study_of_bounds_is_trained_and_shown(tmp_path: Path) -> None:
    outcome = bounds.train("bounds-plain", bounds.bounded(0.2), 1, 4)
    assert outcome.steps == 48 and 10 < outcome.score < 90
    low = dataclasses.replace(outcome, method="low", score=80.04)
    page.write(tmp_path / "x.md", [outcome, low, dataclasses.replace(low, seed=2, score=82.0)])
    text = (tmp_path / "x.md").read_text()
    last = f"{outcome.score:.1f} @ {outcome.megabytes:.1f}"
    assert (
        f"| momentum 0, rate 1 | 81.0 @ {low.megabytes:.1f} | - | - | - | - | {last} | - |" in text
    )
    assert "by up to 1.0 points" in " ".join(text.split())


def test_ranks_see_different_batches() -> None:
    batches = Drawn(0, RANKS, 4, None).batches(0)
    assert not torch.equal(batches[0][0], batches[1][0])
