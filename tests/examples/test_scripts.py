"""Tests of the training scripts: settings, refusals, results, resumption, table and picture."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import os
import runpy
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from forked import environment
from launch import PATIENT, forked_command

pytest.importorskip("jsonargparse")

from accordion_hvd.policies import Accordion, Fixed, StepSchedule  # noqa: E402
from examples import config, report, results, simulated_training, start  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts"
OTHERS = ("gcn_", "datalens_")  # configs of other scripts, tested with those
CONFIGS = [x for x in sorted((ROOT / "configs").glob("*.yaml")) if not x.name.startswith(OTHERS)]


def settings(*words: str) -> config.Settings:
    return config.parse_settings("Train.", words)


# --------------------------------------------------------------------------------------- settings
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_configs_are_understood(path: Path) -> None:
    found = settings("--config", str(path))
    assert found.name == path.stem and found.policy() is not None


def test_the_command_line_overrides(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("epochs: 7\nlr: 0.5\ncompression: {low: 'powersgd:4', high: 'powersgd:1'}\n")
    found = settings("--config", str(path), "--epochs", "3")
    assert (found.epochs, found.lr) == (3, 0.5)
    assert isinstance(found.policy(), Accordion)
    found = settings("--config", str(path), "--compression", "topk:0.01")
    assert repr(found.policy()) == "Fixed(TopK(ratio=0.01))"
    found = settings("--config", str(path), "--compression.interval", "2")
    assert found.policy().interval == 2  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("word", "wanted"),
    [
        ("none", "Fixed(Dense())"),
        ("powersgd:4", "Fixed(PowerSGD(rank=4))"),
        ("Accordion(low=PowerSGD(4), high=PowerSGD(1))", "Accordion(low=PowerSGD(rank=4), high="),
    ],
)
def test_words(word: str, wanted: str) -> None:
    assert repr(settings("--compression", word).policy()).startswith(wanted)


def test_nothing_said_is_left_to_the_wrapper() -> None:
    assert settings().policy() is None
    assert isinstance(settings("--compression", "none").policy(), Fixed)


def test_each_run_has_a_policy_of_its_own() -> None:
    found = settings("--compression.low", "powersgd:4", "--compression.high", "powersgd:1")
    assert found.policy() is not found.policy()


def test_schedules() -> None:
    drops = config.Settings(lr=0.4, schedule="drops", drops=[2, 4], drop=0.5)
    assert [drops.lr_at(e) for e in range(6)] == [0.4, 0.4, 0.2, 0.2, 0.1, 0.1]
    cosine = config.Settings(lr=0.4, schedule="cosine", epochs=4)
    assert [round(cosine.lr_at(e), 3) for e in range(4)] == [0.4, 0.341, 0.2, 0.059]
    assert config.Settings(lr=0.4).lr_at(99) == 0.4


REFUSED = [
    ("--epocs 3", ["--epocs 3", "not known", "epochs"]),
    ("--epochs 1.5", ["epochs", "'1.5'", "an integer"]),
    ("--epochs 0", ["epochs", "0", "at least 1"]),
    ("--epochs", ["epochs", "no value"]),
    ("--lr fast", ["lr", "'fast'", "a number"]),
    ("--lr 0", ["lr", "0", "above 0"]),
    ("--lr inf", ["lr", "inf", "a number"]),
    ("--momentum 1", ["momentum", "1", "[0, 1)"]),
    ("--data imagenet", ["data", "'imagenet'", "'digits', 'mnist', 'cifar10'"]),
    ("--model vgg", ["model", "'vgg'", "'mlp', 'convnet'"]),
    ("--drops 3", ["drops", "'3'", "a list of integers"]),
    ("--drops [3]", ["schedule", "'constant'", "'drops'"]),
    ("--schedule drops", ["drops", "[]", "a list of epochs"]),
    ("--drop 2", ["drop", "2", "(0, 1]"]),
    ("--limit -1", ["limit", "-1", "at least 1"]),
    ("--checkpoint maybe", ["checkpoint", "'maybe'", "true or false"]),
    ("--name ../x", ["name", "'../x'", "letters, digits"]),
    ("--compression topk:2", ["compression", "'topk:2'", "(0, 1]"]),
    ("--compression zip", ["compression", "'zip'", "allowed are accordion"]),
    ("--compression.low dense", ["compression", "'low': 'dense'", "high is missing"]),
    ("--compression.lov dense", ["compression", "'lov'", "'low', 'high'"]),
    ("--config /nonexistent.yaml", ["--config", "/nonexistent.yaml", "YAML"]),
]


@pytest.mark.parametrize(("words", "told"), REFUSED, ids=[words for words, _ in REFUSED])
def test_refused(words: str, told: list[str]) -> None:
    with pytest.raises(ValueError) as refusal:
        settings(*words.split())
    sentence = str(refusal.value)
    assert all(part in sentence for part in told), sentence
    assert "\n" not in sentence and sentence.endswith(".")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("epochs: many\n", ["epochs", "'many'", "an integer"]),
        ("epocs: 3\n", ["'epocs'", "not known", "epochs"]),
        ("epochs: [3\n", ["--config", "YAML"]),
        ("- epochs\n", ["--config", "YAML"]),
        ("compression: &a {low: *a}\n", ["--config", "a value contains itself"]),
        ("unknown: &a {low: *a}\n", ["--config", "a value contains itself"]),
        ("name: null\n", ["name", "null", "a text"]),
        ("drops: null\n", ["drops", "null", "a list of integers"]),
        ("data: null\n", ["data", "null", "'digits', 'mnist', 'cifar10'"]),
        ("compression: [3]\n", ["compression", "[3]", "topk:0.01"]),
        (
            "compression: {low: powersgd:0, high: dense}\n",
            ["compression", "powersgd:0", "at least 1"],
        ),
    ],
)
def test_refused_in_yaml(text: str, told: list[str], tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(text)
    with pytest.raises(ValueError) as refusal:
        settings("--config", str(path))
    sentence = str(refusal.value)
    assert all(part in sentence for part in told) and "\n" not in sentence, sentence


def test_the_environment_variable_is_checked_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCORDION_HVD_COMPRESSION", "topk:7")
    with pytest.raises(ValueError, match="ACCORDION_HVD_COMPRESSION is 'topk:7'.*ratio is 7"):
        settings()
    assert settings("--compression", "fp16").compression == "fp16"


# --------------------------------------------------------------------------------------- the demo
def compared(*words: str) -> dict[str, config.Settings]:
    """Return the settings of the runs that the demo compares."""
    shown = settings("--config", str(ROOT / "configs" / "demo.yaml"), *words)
    return runpy.run_path(str(SCRIPTS / "demo.py"))["configurations"](shown)


def test_the_demo_compares_seven_configurations() -> None:
    found = compared()
    assert list(found) == list(report.COLOURS) == list(report.STYLES)
    policies = {name: repr(run.policy()) for name, run in found.items()}
    assert policies.pop("schedule").startswith("StepSchedule(")
    for name in report.POLICIES:
        start = f"{name.capitalize()}(low=PowerSGD(rank=4), high=PowerSGD("
        assert policies.pop(name).startswith(start)
    assert policies == {
        "uncompressed": "Fixed(Dense())",
        "low": "Fixed(PowerSGD(rank=4))",
        "middle": "Fixed(PowerSGD(rank=2))",
        "high": "Fixed(PowerSGD(rank=1))",
    }


def test_runs_of_the_demo_differ_in_compression_only() -> None:
    runs = [dataclasses.replace(run, name="a", compression=None) for run in compared().values()]
    assert runs == [runs[0]] * 7


@pytest.mark.parametrize("drops", [[], [5], [30, 7]])
def test_the_schedule_of_the_demo_switches_where_the_rate_first_falls(drops: list[int]) -> None:
    found = compared(*([f"--drops={drops}"] if drops else []))
    run, levels = found["schedule"], found["accordion"].policy()
    falls = [e for e in range(1, run.epochs) if run.lr_at(e) < run.lr_at(e - 1)]
    policy = run.policy()
    assert isinstance(policy, StepSchedule) and isinstance(levels, Accordion)
    assert list(policy.schedule) == [0, falls[0]]
    assert repr(policy.levels("")) == repr(levels.levels(""))


def test_the_demo_needs_an_epoch_where_the_rate_falls(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        compared("--schedule", "cosine", "--drops", "[]")
    assert "schedule is 'cosine', but must be 'drops'" in capsys.readouterr().err


@pytest.fixture
def demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return the demo where Horovod is missing, and in a folder of its own."""
    spec = importlib.util.spec_from_file_location("demo", SCRIPTS / "demo.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "demo", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    module.HERE = tmp_path / "demo.py"
    return module


def test_the_demo_says_why_horovod_was_not_built(
    demo: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "setup_env.py").write_text("import sys; print(sys.argv[1]); sys.exit('no g++')")
    with demo.horovod(tmp_path / "runs") as is_built, pytest.raises(SystemExit):
        is_built()
    found = capsys.readouterr()
    assert "see " + str(tmp_path / "runs" / "build_horovod.txt") in found.out
    assert "horovod\n" in found.err and "no g++" in found.err and "Keras cannot" in found.err


def test_a_demo_that_ends_early_stops_building_horovod(demo: ModuleType, tmp_path: Path) -> None:
    program = "import subprocess, time; subprocess.Popen(['sleep', '60']); print('x', flush=True)"
    (tmp_path / "setup_env.py").write_text(f"{program}; time.sleep(60)")
    began = time.monotonic()
    with pytest.raises(KeyError), demo.horovod(tmp_path) as is_built:
        while not (tmp_path / "build_horovod.txt").read_text():
            time.sleep(0.05)
        raise KeyError
    with pytest.raises(SystemExit):
        is_built()  # which has been ended, and does not sleep for a minute
    assert time.monotonic() - began < 30


# ---------------------------------------------------------------------------------- the processes
def run(script: str, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **env}
    return subprocess.run(
        [sys.executable, str(SCRIPTS / script), *words],
        capture_output=True,
        text=True,
        env=variables,
        timeout=120,
    )


def launched(framework: str, program: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a program that trains with a framework on two ranks over Gloo."""
    pytest.importorskip("horovod")
    pytest.importorskip("sklearn")
    imported = ROOT / "examples" / f"{framework}_training.py"
    return subprocess.run(
        forked_command("gloo", 2, [str(program), *words], imported),
        capture_output=True, text=True, env={**environment(), **PATIENT}, timeout=200,
    )  # fmt: skip


@pytest.mark.parametrize("script", ["train_torch.py", "train_keras.py"])
def test_scripts_refuse_with_status_2_and_one_sentence(script: str) -> None:
    done = run(script, "--epochs", "many", PYTHONPROFILEIMPORTTIME="1")
    told = [line for line in done.stderr.splitlines() if not line.startswith("import time:")]
    assert done.returncode == 2
    assert told == ["settings: epochs is 'many', but must be an integer."]
    loaded = {
        line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()
    }
    assert "accordion_hvd" in loaded and not loaded & {"horovod", "torch", "tensorflow"}


def test_only_one_rank_of_a_machine_says_so() -> None:
    done = run("train_torch.py", "--epochs", "0", HOROVOD_LOCAL_RANK="1")
    assert (done.returncode, done.stderr) == (2, "")


def test_missing_data_is_said_before_horovod_starts(tmp_path: Path) -> None:
    done = run("train_torch.py", "--data", "mnist", ACCORDION_DATA=str(tmp_path / "none"))
    assert done.returncode == 2
    assert done.stderr.startswith("data: ACCORDION_DATA is ") and done.stderr.count("\n") == 1


@pytest.mark.nightly
@pytest.mark.launch
@pytest.mark.parametrize("framework", ["torch", "keras"])
@pytest.mark.parametrize(
    "method",
    ["WAGMA(2)", "Accordion(low=Dense(), high=WAGMA(2), interval=1, threshold=9)"],
    ids=["WAGMA", "Accordion"],
)
def test_two_ranks_average_models(framework: str, method: str, tmp_path: Path) -> None:
    """Steps and bytes of averaged models are counted; each epoch's test costs one more average."""
    pytest.importorskip({"torch": "torch", "keras": "tensorflow"}[framework])
    words = ["--compression", method, "--limit", "640", "--epochs", "3", "--output", str(tmp_path)]
    done = launched(framework, SCRIPTS / f"train_{framework}.py", *words)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found = results.read_json(tmp_path / "run" / "result.json")
    assert found["compression"].startswith(method[:5]) and found["stats"]["steps"] == 30
    assert 1 < found["stats"]["sent"] / found["stats"]["dense_sent"] <= 33 / 30 + 1e-6
    assert found["epochs"][-1]["accuracy"] > 0.5


@pytest.mark.nightly
@pytest.mark.launch
@pytest.mark.parametrize("framework", ["torch", "keras"])
def test_two_ranks_resume_averaged_models(framework: str, tmp_path: Path) -> None:
    """Steps and bytes before the resumption count once.

    Losses differ a little, since the checkpoint has the momentum of rank 0 only.
    """
    pytest.importorskip({"torch": "torch", "keras": "tensorflow"}[framework])
    whole, parts = resumed(framework, "WAGMA(2)", tmp_path)
    assert [row["sent"] for row in whole["epochs"]] == [row["sent"] for row in parts["epochs"]]
    for key in ("steps", "sent", "dense_sent"):
        assert whole["stats"][key] == parts["stats"][key] > 0


@pytest.mark.nightly
@pytest.mark.launch
@pytest.mark.parametrize("framework", ["torch", "keras"])
def test_two_ranks_train_and_resume(framework: str, tmp_path: Path) -> None:
    """A training that resumes after one of three epochs repeats a whole one.

    Losses agree up to rounding, bytes and levels exactly. With PyTorch, the simulated training
    agrees, too.
    """
    pytest.importorskip({"torch": "torch", "keras": "tensorflow"}[framework])
    levels = {"low": "powersgd:4", "high": "powersgd:1", "interval": 1, "threshold": 9.0}
    whole, parts = resumed(framework, levels, tmp_path)
    for result in (whole, parts):
        check_result(result, framework)
    same_epochs(whole, parts)
    if framework == "torch":
        settings = config.Settings(**whole["settings"] | {"name": "simulated"})
        same_epochs(whole, simulated_training.train(settings, start.load_for(settings), 2))


def resumed(framework: str, compression: Any, folder: Path) -> list[dict[str, Any]]:
    """Return the results of a whole training, and of one that was resumed after an epoch."""
    program = folder / "program.py"
    program.write_text(PROGRAM)
    done = launched(framework, program, framework, str(folder), json.dumps(compression))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return [results.read_json(folder / name / "result.json") for name in ("whole", "parts")]


def same_epochs(result: dict[str, Any], other: dict[str, Any]) -> None:
    """Check that two trainings are equal up to rounding."""
    for mine, theirs in zip(result["epochs"], other["epochs"], strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-3)
        assert (mine["sent"], mine["levels"]) == (theirs["sent"], theirs["levels"])


PROGRAM = """
import json, sys
from examples.config import Settings
from examples.start import run
framework, folder, compression = sys.argv[1:]
more = dict(limit=200, depth=2, width=48, schedule="drops", drops=[2], output=folder)
more |= dict(compression=json.loads(compression), progress=False)
run(framework, Settings(name="whole", epochs=3, **more))
run(framework, Settings(name="parts", epochs=1, checkpoint=True, **more))
run(framework, Settings(name="parts", epochs=3, resume=True, **more))
"""


def check_result(result: dict[str, Any], framework: str) -> None:
    assert (result["framework"], result["ranks"], len(result["epochs"])) == (framework, 2, 3)
    assert [row["epoch"] for row in result["epochs"]] == [0, 1, 2]
    sent = [row["sent"] for row in result["epochs"]]
    assert 0 < sent[0] < sent[1] < sent[2] == result["stats"]["sent"]
    stats = result["stats"]
    assert (
        stats["ratio"] == pytest.approx(stats["dense_sent"] / stats["sent"]) and stats["ratio"] > 1
    )
    assert {row["reason"] for row in result["history"]} >= {"first window", "learning rate fell"}


# ---------------------------------------------------------------------------- results and pictures
def made(framework: str, method: str, compression: Any, seed: int) -> dict[str, Any]:
    levels = {f"{i}.weight": i % 2 for i in (9, 11)} if method in report.POLICIES else {}
    rows = [
        {"epoch": e, "lr": 0.1 if e < 2 else 0.01, "accuracy": 0.5 + e / 10 + seed / 50,
         "sent": 1e6 * (e + seed), "levels": levels}
        for e in range(4)
    ]  # fmt: skip
    return {
        "framework": framework,
        "ranks": 4,
        "seconds": 1.25,
        "stats": {"sent": 1e6 * (3 + seed), "ratio": 2.5},
        "settings": {
            "name": method,
            "data": "digits",
            "compression": compression,
            "schedule": "drops",
            "seed": seed,
        },
        "epochs": rows,
    }


@pytest.fixture
def runs() -> dict[tuple[str, str], list[dict[str, Any]]]:
    levels = {"low": "powersgd:4", "high": "powersgd:1"}
    schedule = "StepSchedule({0: PowerSGD(4), 2: PowerSGD(1)})"
    methods = {"uncompressed": "none", "low": "powersgd:4", "middle": "powersgd:2"}
    methods |= {"high": "powersgd:1", "schedule": schedule, "accordion": levels}
    methods |= {"displacement": "Displacement(PowerSGD(4), PowerSGD(1))"}
    return {
        (framework, method): [made(framework, method, c, seed) for seed in range(1, seeds + 1)]
        for framework, seeds in (("torch", 3), ("keras", 1))
        for method, c in methods.items()
    }


def test_table(runs: Any) -> None:
    table = report.table(runs)
    assert table.shape == (14, 7)
    assert table["compression"][:7].tolist() == [
        "uncompressed",
        "always low: PowerSGD(4)",
        "always middle: PowerSGD(2)",
        "always high: PowerSGD(1)",
        "schedule: low for 2 epochs, then high",
        "Accordion: low or high for each layer",
        "Displacement: low or high for each layer",
    ]
    name = "always low: PowerSGD(4)"
    rows = table.to_numpy().tolist()
    assert rows[1] == ["PyTorch", name, "84.0%", "82.0-86.0%", "5.00", "2.5", "1.2"]
    assert rows[8] == ["Keras", name, "82.0%", "1 seed", "4.00", "2.5", "1.2"]


def test_picture(runs: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report.picture(runs, tmp_path / "sub" / "a.png")
    assert (tmp_path / "sub" / "a.png").read_bytes()[:4] == b"\x89PNG"


def test_results_are_plain_json(tmp_path: Path) -> None:
    record = results.Record(config.Settings(output=str(tmp_path)), "torch", 0, 1)
    record.epoch(0.1, math.nan, 0.5, None)
    found = results.read_json(tmp_path / "run" / "result.json")
    assert found["epochs"][0]["loss"] is None and found["stats"]["sent"] == 0
    assert not list((tmp_path / "run").glob("*.part"))


def test_only_rank_0_writes(tmp_path: Path) -> None:
    record = results.Record(config.Settings(output=str(tmp_path)), "torch", 1, 2)
    record.epoch(0.1, 0.5, 0.5, None)
    assert not list(tmp_path.iterdir())
