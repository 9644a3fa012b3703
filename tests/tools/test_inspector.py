"""Tests of `accordion-hvd inspect`: decisions are shown, and written as `Replay` repeats them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from trainings import KINDS, save_gradients, save_models

from accordion_hvd import Accordion, PowerSGD, Replay, StepSchedule, TopK, parse, simulate
from accordion_hvd.engine import checkpoint
from accordion_hvd.engine import checkpoint_files as files
from accordion_hvd.engine.ledger import files as ledger_files
from accordion_hvd.engine.ledger import summary
from accordion_hvd.policies.base import plain
from accordion_hvd.simulation.one_process import World
from accordion_hvd.tools.command import main

SHAPES = {"w": (64, 48), "v": (48, 64), "bias": (5,)}


def accordion() -> Accordion:
    return Accordion(low=PowerSGD(4), high=TopK(0.1), window=2, interval=1)


def schedule() -> StepSchedule:
    return StepSchedule({0: TopK(0.5), 1: PowerSGD(2), 2: TopK(0.1)}, window=2)


def gradients(steps: int = 8, ranks: int = 2) -> list[list[dict[str, np.ndarray]]]:
    """Return gradients that make Accordion switch, since those of v grow."""
    rng = np.random.default_rng(0)
    return [
        [
            {
                name: rng.standard_normal(shape).astype("f4") * (3**step if name == "v" else 1)
                for name, shape in SHAPES.items()
            }
            for _ in range(ranks)
        ]
        for step in range(steps)
    ]


def train(policy: Any) -> tuple[World, list[dict[str, str]]]:
    """Return ranks that have trained, and the compressors of each step."""
    world, levels = simulate(policy, 2), []
    for step in gradients():
        world.step(step, lr=0.1)
        levels.append(world.exchanges[1].levels())
    return world, levels


def inspect(*words: object) -> Result:
    return CliRunner().invoke(main, ["inspect", *map(str, words)])


def decisions(*words: object) -> Result:
    return inspect("--decisions", *words)


def saved(world: World, directory: Path) -> Path:
    folder = files.new_folder(directory)
    rows = [checkpoint._write(folder, [exchange]) for exchange in world.exchanges]
    checkpoint._complete(folder, world.exchanges[:1], rows, 0, "a job")
    return directory


def ledger(world: World, folder: Path) -> Path:
    world.exchanges[0].ledger.write(folder)
    return folder


def result(world: World, folder: Path) -> Path:
    policy = world.exchanges[0].policy
    content = {"history": plain(policy.history), "compression": repr(policy)}
    (folder / "result.json").write_text(json.dumps(content))
    return folder / "result.json"


@pytest.mark.parametrize("make", [saved, ledger, result])
@pytest.mark.parametrize("policy", [accordion, schedule])
def test_another_run_repeats_them(policy: Any, make: Any, tmp_path: Path) -> None:
    """A run with `Replay` has the same compressors in each step, from the first step on."""
    world, levels = train(policy())
    assert len({json.dumps(each) for each in levels}) > 1
    path = tmp_path / "decisions.json"
    done = decisions(make(world, tmp_path), "--output", path)
    assert done.exit_code == 0, done.output
    for again in (Replay(path), parse(f"Replay({str(path)!r})")):
        assert train(again)[1] == levels
    assert decisions(path).exit_code == 0, "what it writes, it reads"


def rows(done: Result) -> list[list[str]]:
    """Return the first three cells of each row of the table of decisions."""
    (lines,) = [x.splitlines() for x in done.output.split("\n\n") if x.startswith("step  window")]
    assert lines[0].split()[:3] == ["step", "window", "layer"]
    return [line.split()[:3] for line in lines[1:]]


def test_the_table(tmp_path: Path) -> None:
    world, levels = train(accordion())
    history = world.exchanges[0].policy.history
    done = decisions(saved(world, tmp_path))
    assert rows(done) == [[str(d.step), str(d.window), d.name] for d in history]
    assert repr(world.exchanges[0].policy) in done.output
    changed = [
        [str(step), name]
        for step in range(1, len(levels))
        for name in SHAPES.keys() & levels[step].keys()
        if levels[step][name] != levels[step - 1][name]
    ]
    assert changed and f"{len(changed)} change" in done.output
    switched = rows(decisions(tmp_path, "--switches"))
    assert sorted([step, name] for step, _, name in switched) == sorted(changed)
    assert {row[2] for row in rows(decisions(tmp_path, "--layer", "[v]"))} == {"v"}
    done = decisions(tmp_path, "--layer", "x*")
    assert done.exit_code == 2 and "fits none of w, v" in done.output


def test_decisions_of_checkpoints_are_shown_if_asked_for(tmp_path: Path) -> None:
    directory = saved(train(accordion())[0], tmp_path)
    assert "step  window" not in inspect(directory).output
    assert "decisions (--decisions shows them)" in inspect(directory).output
    for option in (["--decisions"], ["--layer", "v"], ["--output", tmp_path / "rows.json"]):
        done = inspect(directory, *option)
        assert done.output.startswith("state-00001  step 8") and rows(done)


def test_a_folder_may_have_both(tmp_path: Path) -> None:
    world, _ = train(accordion())
    done = inspect(ledger(world, saved(world, tmp_path)))
    assert "state-00001  step 8" in done.output and f"{tmp_path}/ledger.json" in done.output


@pytest.mark.parametrize("policy", [accordion, lambda: TopK(0.1)])
def test_the_advice_of_a_ledger(policy: Any, tmp_path: Path) -> None:
    path = ledger(train(policy())[0], tmp_path) / "ledger.json"
    done = inspect(path)
    sentences = summary.advice(summary.summarize(ledger_files.load(path)))
    assert done.exit_code == 0 and "\n".join(sentences) in done.output


def test_the_first_change_of_a_schedule_is_one(tmp_path: Path) -> None:
    world, _ = train(schedule())
    done = decisions(saved(world, tmp_path), "--switches", "--layer", "w")
    assert [row[0] for row in rows(done)] == ["2", "4"]


def test_decisions_about_the_model_are_left_out(tmp_path: Path) -> None:
    save_gradients(KINDS["accordion_batches"], tmp_path)
    done = decisions(tmp_path, "--output", tmp_path / "rows.json")
    assert done.exit_code == 0 and "(batch size)" in done.output
    assert "1 decision about the entire model cannot be repeated" in done.output
    Replay(tmp_path / "rows.json")


def nothing(folder: Path) -> Path:
    return folder


def text(folder: Path) -> Path:
    (folder / "README.md").write_text("# A text")
    return folder / "README.md"


def without_decisions(folder: Path) -> Path:
    save_gradients(KINDS["topk"], folder)
    return folder


def of_models(folder: Path) -> Path:
    save_models("cold", folder)
    return folder


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (without_decisions, "has no decisions of Fixed(TopK(ratio=0.1))"),
        (of_models, "models are averaged without a policy"),
        (nothing, "has nothing to inspect: neither a ledger.json, nor manifest.json"),
        (text, "has no decisions of a policy"),
    ],
)
def test_refused(make: Callable[[Path], Path], told: str, tmp_path: Path) -> None:
    done = decisions(make(tmp_path))
    assert done.exit_code == 1 and told in done.output and "Traceback" not in done.output


@pytest.mark.parametrize(
    "content",
    [
        "", "{", "3", "{}", "[1]", '[{"step": 1}]', '{"history": 1}', '{"exchanges": [{}]}', "[]",
        "[" * 100_000,
    ],
)  # fmt: skip
def test_other_json_is_refused(content: str, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(content)
    done = decisions(path)
    assert done.exit_code == 1 and f"{path} has no decisions" in done.output
    with pytest.raises(ValueError, match=r"^Replay: "):
        Replay(path)


def test_a_ledger_of_another_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ledger.json"
    path.write_text('{"format": 99, "decisions": []}')
    done = decisions(path)
    assert done.exit_code == 1 and f"{path} has format 99" in done.output


def test_quick_is_refused_where_no_checkpoint_is(tmp_path: Path) -> None:
    done = decisions(ledger(train(accordion())[0], tmp_path), "--quick")
    assert done.exit_code == 2 and "--quick is for checkpoints, of which" in done.output


def test_what_cannot_be_repeated_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    for name in ("onebit_adam", "accordion"):
        save_gradients(KINDS[name], tmp_path / name)
    done = decisions(tmp_path / "onebit_adam", "--output", path)
    assert done.exit_code == 1 and "cannot be repeated" in done.output and not path.exists()
    assert decisions(tmp_path / "accordion", "--output", tmp_path / "no" / "x.json").exit_code == 1


def test_optimizers_are_numbered(tmp_path: Path) -> None:
    world, _ = train(accordion())
    world.exchanges[0].ledger.write(tmp_path)
    (tmp_path / "ledger-1.json").write_bytes((tmp_path / "ledger.json").read_bytes())
    assert "ledger-1.json, optimizer 2 of 2" in decisions(tmp_path, "--optimizer", "2").output
    done = decisions(tmp_path, "--optimizer", "3")
    assert done.exit_code == 2 and "has 2 of them" in done.output


def test_files_that_replay_cannot_read() -> None:
    with pytest.raises(ValueError, match="history is '/no/file', but must be a list of rows"):
        Replay("/no/file")
