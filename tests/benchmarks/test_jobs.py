"""Tests of the script that simulates jobs: its models, its table, and the values it refuses."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

pytest.importorskip("jsonargparse")

from accordion_hvd.simulation import simulate_job  # noqa: E402
from benchmarks.jobs.command import Settings, main  # noqa: E402
from benchmarks.jobs.models import gpt2, model_of, resnet50  # noqa: E402

PAGE = Path(__file__).resolve().parents[2] / "docs" / "simulation.md"


def test_models_have_the_published_sizes() -> None:
    assert sum(map(math.prod, resnet50().values())) == 25_557_032  # torchvision's resnet50
    assert sum(map(math.prod, gpt2().values())) == 124_439_808  # Hugging Face's gpt2


def table(capsys: pytest.CaptureFixture[str], *words: str) -> list[list[str]]:
    main(words)
    lines = capsys.readouterr().out.strip().splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_a_row_per_compression(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.json"
    path.write_text(json.dumps({"w": [64, 64], "b": [64]}))
    words = ["--model", str(path), "--ranks", "16", "--steps", "5", "--sigma", "0"]
    head, _, dense, topk = table(capsys, *words, "--compression", "[dense, topk:0.1]")
    assert (dense[0], topk[0]) == ("`dense`", "`topk:0.1`") and head[3] == "compute"
    settings = Settings(ranks=16, steps=5, sigma=0.0, model=str(path))
    run = simulate_job({"w": (64, 64), "b": (64,)}, "dense", 16, 5, **settings.options())
    assert dense[1:3] == [f"{run.median:.3f}", f"{run.p99:.3f}"]
    assert dense[7] == f"{run.sent_by_rank / 1e6:.1f}" and dense[9] == "100.0%"


def test_slow_hosts_and_failures(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--ranks", "32", "--steps", "20", "--compression", "[dense]"]
    seconds = {}
    for name, more in (
        ("as it is", []),
        ("slow host", ["--slow_hosts", "1", "--slow_compute", "0.5"]),
        ("slow link", ["--slow_hosts", "1", "--slow_link", "0.1"]),
        (
            "failures",
            "--failures 0.0005 --detection 0 --restart 1 --commit_every 2 --seed 1".split(),
        ),
    ):
        *_, row = table(capsys, *words, *more)
        seconds[name] = float(row[1]), float(row[9].rstrip("%"))
    assert seconds["slow host"][0] > seconds["as it is"][0] + 0.03
    assert seconds["slow link"][0] > 3 * seconds["as it is"][0]
    assert seconds["failures"][1] < 60 < seconds["as it is"][1] == 100


@pytest.mark.parametrize(
    "words, message",
    [
        (["--ranks", "0"], "ranks is 0"),
        (["--slow_hosts", "9", "--ranks", "8"], "slow_hosts is 9"),
        (["--model", "nothing.json"], "model is 'nothing.json'"),
        (["--compression", "[bad]"], "'bad' is not known"),
        (["--bandwidth", "0"], "bandwidth is 0"),
    ],
)
def test_refusals(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(words)
    assert message in capsys.readouterr().err


def test_a_row_of_the_page_is_reproduced(capsys: pytest.CaptureFixture[str]) -> None:
    """The page has the row that is printed now; if this fails, run the page's command again."""
    *_, row = table(capsys, "--compression", "[dense]")
    assert "| " + " | ".join(row) + " |" in PAGE.read_text()


def test_shapes_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    path.write_text('{"w": [3, 4]}')
    assert model_of(str(path)) == {"w": (3, 4)}
