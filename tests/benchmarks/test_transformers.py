"""Tests of the trainings, the tuning and the page of Transformers with AdamW."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
import torch  # noqa: E402

from benchmarks.optbench.tasks import Characters  # noqa: E402
from benchmarks.regimes import transformers, transformers_command  # noqa: E402
from benchmarks.regimes.transformers import METHODS, RANKS, Corpus, Outcome  # noqa: E402
from benchmarks.regimes.transformers_command import FRONT, LINES, SEEDS, SHORT, TUNING  # noqa: E402

TEXT = Corpus.of(np.random.default_rng(0).integers(0, 9, 200_000).cumsum().astype(np.uint8))


def trained(method: str, steps: int) -> Any:
    """Return the ranks after some steps of a training of a small network."""
    torch.manual_seed(0)
    chosen = METHODS[method]
    averages = "LocalSGD" in method or "DiLoCo" in method
    kind = transformers.Models if averages else transformers.Gradients
    team = kind(chosen, steps, Characters(256, 32, 1))
    before = TEXT.loss(team.model)
    for step in range(steps):
        team.step([TEXT.draw(0, step, rank) for rank in range(RANKS)], 2e-3)
    assert TEXT.loss(team.model) < before
    return team


@pytest.mark.parametrize(
    "method", ["PowerSGD(4), fp16 factors", "QSGD(4) in parts", "TopK(0.01)", "OnebitAdam", "FP16"]
)
def test_bytes_on_four_ranks_are_those_of_the_exchange(method: str) -> None:
    team = trained(method, 3)
    sent = team.world.exchanges[0].stats()["sent"]
    assert team.bytes.on(4) == pytest.approx(sent, rel=0.01)


def test_models_are_equal_after_an_average_and_bytes_are_counted() -> None:
    team = trained("LocalSGD(2)", 4)
    first, *others = ([x.detach() for x in model.parameters()] for model in team.models)
    assert all(torch.equal(x, y) for other in others for x, y in zip(first, other, strict=True))
    size = 4 * sum(x.numel() for x in team.model.parameters())
    assert team.bytes.on(4) == pytest.approx(2 * 3 / 4 * size * 2)  # two averages in four steps


def test_held_out_text_is_not_trained_on() -> None:
    corpus = Corpus.of(np.arange(100_000) // 8192 % 256)
    assert set(corpus.held.tolist()) == {9}
    assert set(corpus.train.tolist()) == set(range(13)) - {9}


@pytest.mark.parametrize("best", [-9.0, -6.0, -3.0])
def test_tuning_ends_with_the_best_rate_within_the_grid(best: float) -> None:
    tried: dict[float, float] = {}
    while (lr := transformers_command.upcoming(tried, 2.0**-7)) is not None:
        tried[lr] = abs(math.log2(lr) - best) if lr < 0.1 else math.inf
    found = transformers_command.best_rate(tried)
    assert found == 2.0 ** max(-14.0, min(-4.0, best))
    assert {found / 2, found * 2} <= tried.keys()


def outcome(method: str, seed: int, loss: float, fewer: float = 1.0, **more: Any) -> Outcome:
    row = {"study": "small", "optimizer": "AdamW", "method": method, "lr": 0.008, "seed": seed,
           "steps": 600, "held_out": loss, "fewer_4": fewer, "fewer_64": fewer}  # fmt: skip
    return Outcome(**row | more)


def results(method: str, loss: float, fewer: float) -> list[Outcome]:
    """Return the results of a training whose loss is higher at other rates."""
    found = [outcome(method, seed, loss + seed, fewer) for seed in (TUNING, *SEEDS)]
    found += [outcome(method, TUNING, loss + 1, fewer, lr=lr) for lr in (0.004, 0.016)]
    return found + [outcome(method, 1, loss, fewer, lr=0.016)]


def test_seeds_follow_the_best_rate() -> None:
    rows = results("Dense", 1.0, 1.0)
    assert transformers_command.todo("small", "Dense", rows) == []
    left = [row for row in rows if row.seed != 2]
    assert transformers_command.todo("small", "Dense", left) == [(0.008, 2)]
    assert transformers_command.todo("small", "Dense", []) == [(0.008, TUNING)]
    found = transformers_command.reported("small", rows)
    assert [row.held_out for row in found["Dense"]] == [2.0, 3.0, 4.0]
    assert not transformers_command.reported("small", left)
    tuned = [outcome("Dense", TUNING, abs(lr - 0.004), lr=lr) for lr in (0.002, 0.004, 0.008)]
    assert transformers_command.todo("larger", "Dense", tuned) == [(0.004, TUNING)]


def test_results_on_the_second_text_are_at_the_best_rate_on_the_first() -> None:
    rows = results("Dense", 1.0, 1.0)
    then = [replace(row, study="small, then plays", held_out=9 - row.held_out) for row in rows]
    found = transformers_command.reported("small", [*rows, *then], ", then plays")
    assert [row.held_out for row in found["Dense"]] == [7.0, 6.0, 5.0]


def test_a_policy_is_compared_with_the_line_between_fixed_methods() -> None:
    low, middle, high = LINES["Accordion(16, 4)"]
    rows = [*results("Dense", 1.0, 1.0), *results(low, 1.0, 4.0), *results(middle, 1.2, 8.0)]
    rows += [*results(high, 1.6, 16.0), *results("Accordion(16, 4)", 1.4, math.sqrt(128))]
    found = transformers_command.reported("small", rows)
    assert transformers_command.beside_line(found, "Accordion(16, 4)") == pytest.approx((0, 0, 0))
    mean, least, most = transformers_command.excess(found, low)
    assert mean == least == most == 0
    page = transformers_command.text(rows)
    assert "| Accordion(16, 4) |" in page and "+0.0 % (+0.0 to +0.0)" in page
    assert f"Least loss at 10 times fewer bytes or more: {'Accordion(16, 4)'}" in page


def test_the_interval_is_students() -> None:
    mean, least, most = transformers_command.interval([1.0, 2.0, 3.0])
    assert mean == 2 and most - mean == pytest.approx(4.3027 / math.sqrt(3), rel=1e-4)
    assert mean - least == pytest.approx(most - mean)


def test_the_table_keeps_results(tmp_path: Path) -> None:
    rows = results("Dense", 1.23456789, 1.0)
    path = tmp_path / "table.csv"
    transformers_command.write(path, rows)
    read = transformers_command.read(path)
    assert {(r.seed, r.lr) for r in read} == {(r.seed, r.lr) for r in rows}
    assert {round(r.held_out, 4) for r in rows} == {r.held_out for r in read}
    transformers_command.write(path, read)
    assert transformers_command.read(path) == read


def test_methods_of_the_front_exist() -> None:
    assert {*FRONT, *SHORT, *LINES, *(x for xs in LINES.values() for x in xs)} <= METHODS.keys()
