"""Tests of docs/compressor-accuracy.md: the trainings of all compressors, and the page."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from accordion_hvd import compressors
from accordion_hvd.policies.base import Policy

pytest.importorskip("torch")
pytest.importorskip("tqdm")

from benchmarks.compressors import training  # noqa: E402
from benchmarks.compressors.training import METHODS, PLAIN, Outcome  # noqa: E402
from examples.data import load  # noqa: E402

PAGE = Path(__file__).resolve().parents[2] / "docs" / "compressor-accuracy.md"


def test_every_measured_compressor_is_trained_with() -> None:
    assert all(isinstance(method.policy(10, 100), Policy) for method in METHODS)
    words = " ".join(method.word for method in METHODS)
    for name in (*compressors.__all__, "Accordion", "AdaQS", "StepSchedule"):
        assert f"{name}(" in words, name


def test_short_spec_strings_mean_the_same_methods() -> None:
    assert training._method("dense") is PLAIN and training._method(PLAIN.word) is PLAIN
    assert training._method("signsgd").word == "SignSGD()"
    assert training._method("topk:0.3").word == "topk:0.3"
    assert [training._method(method.word) for method in METHODS] == list(METHODS)


def test_a_training(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Compressed trainings send fewer bytes, learn, and have a row; saved results are kept."""
    pytest.importorskip("sklearn")
    task = dataclasses.replace(training.TASKS["digits"], images=400, epochs=3)
    monkeypatch.setitem(training.TASKS, "digits", task)
    before = load("digits").train.images.copy()
    files = ["--results", str(tmp_path / "a.json"), "--output", str(tmp_path / "a.md")]
    words = [PLAIN.word, "TopK(0.05)", "DGC(0.05, warmup=$tenth)"]
    training.main(["--tasks", "digits", "--seeds", "7", "--methods", *words, *files])
    kept = training._saved(tmp_path / "a.json")
    plain, *others = (kept["digits", word, 7] for word in words)
    assert plain.ratio == pytest.approx(1, rel=0.01) and plain.accuracy > 0.5
    for outcome in others:
        assert outcome.last_ratio > 4 and outcome.accuracy > 0.3 and outcome.ranks == 4
    text = (tmp_path / "a.md").read_text()
    assert all(f"| `{word}` | 1 |" in text for word in words) and "| `FP16()`" not in text
    trained = [training._saved(tmp_path / "a.json")]
    training.main(["--tasks", "digits", "--seeds", "7", "--methods", *words, *files])  # all there
    trained.append(training._saved(tmp_path / "a.json"))
    training.main(["--tasks", "digits", "--seeds", "7", "--methods", words[1], "--anew", *files])
    trained.append(training._saved(tmp_path / "a.json"))
    first, second, third = ({key[1]: o.seconds for key, o in kept.items()} for kept in trained)
    assert first == second and third[words[1]] != first[words[1]]
    assert {word: third[word] for word in words if word != words[1]}.items() <= first.items()
    assert (before == load("digits").train.images).all()


def test_the_page_compares_with_the_first_row() -> None:
    rows = [
        Outcome("digits", word, seed, 4, 60, accuracy, 10.0, 20.0, 1.0)
        for seed in (1, 2)
        for word, accuracy in ((PLAIN.word, 0.9 + seed / 100), ("TopK(0.01)", 0.9))
    ]
    text = training.page(rows)
    assert "| `TopK(0.01)` | 1 | 90.0% | +1.5 (+1.0 to +2.0) | 10.0 | 20.0 |" in text
    assert "end within 1.0 points" in text and "CIFAR" not in text


@pytest.mark.parametrize(
    "words", ["--methods zip", "--methods topk:2", "--ranks 1", "--tasks mnist"]
)
def test_refused(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        training.main(words.split())
    wrong = words.split()[1].partition(":")[0]
    assert ended.value.code == 2 and wrong in capsys.readouterr().err.lower()


def test_the_page_is_there() -> None:
    text = PAGE.read_text()
    assert "## CIFAR-10" in text and "`TopK(0.01)`" in text
