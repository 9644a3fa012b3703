"""Tests of command lines of scripts: dataclasses define the options, and others are refused."""

from __future__ import annotations

import dataclasses
import importlib
import subprocess
import sys
import typing
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

pytest.importorskip("jsonargparse")

from accordion_hvd import check  # noqa: E402
from examples import command_line  # noqa: E402
from examples.command_line import as_settings, option, parse_options, read_options  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]


@dataclass(kw_only=True)
class Base:
    """Options that others share.

    Args:
        per_host: ranks of a host.
        factor: a factor, such as 50%.
    """

    per_host: int = 1
    factor: float = 0.5


@dataclass(kw_only=True)
class Options(Base):
    """Do something with words.

    A second paragraph, which the help omits.

    Args:
        files: what to read.
        kind: kind of the work.
        rates: several texts.
        seeds: several numbers.
        colours: several of a few.
        output: where to write.
        ranks: number of ranks.
        quick: less of all.
        work: not for users.
    """

    files: list[Path]
    kind: Literal["torch", "keras"] = "torch"
    rates: list[str] = field(default_factory=lambda: ["1gbit"])
    seeds: list[int] | None = None
    colours: list[Literal["red", "blue"]] = field(default_factory=list)
    output: Path | None = None
    ranks: int = option(2, "-np")
    quick: bool = False
    work: bool = option(False, hidden=True)

    def __post_init__(self) -> None:
        check.integer("program", "--per-host", self.per_host, least=1)


@dataclass(kw_only=True)
class Words:
    """Take some words.

    Args:
        parts: the words.
    """

    parts: list[Literal["a", "b"]] = command_line.words("a")


def parsed(*given: str, kind: Any = Options) -> Any:
    return parse_options(kind, given)


def test_without_options_the_defaults_count() -> None:
    assert parsed("x") == Options(files=[Path("x")])
    assert parsed(kind=Words) == Words() and parsed("b", "a", kind=Words).parts == ["b", "a"]


def test_every_kind_of_option() -> None:
    given = "a b --per-host 3 --factor 1e-3 --kind keras --rates 50mbit none 3 true --seeds 1 2"
    given += " --colours red blue --output o.json -np 4 --quick --work"
    assert parsed(*given.split()) == Options(
        files=[Path("a"), Path("b")], per_host=3, factor=1e-3, kind="keras", seeds=[1, 2],
        rates=["50mbit", "none", "3", "true"], colours=["red", "blue"], output=Path("o.json"),
        ranks=4, quick=True, work=True,
    )  # fmt: skip


def test_words_after_a_double_dash_are_no_options() -> None:
    found = parsed(
        "run", "--per-host", "2", "--", "x", "--quick", "--", "-v", kind={"run": Options}
    )
    assert found.files == [Path(x) for x in ("x", "--quick", "--", "-v")] and not found.quick


def test_actions() -> None:
    kinds = {"one": Options, "two": Words}
    assert parsed("two", "b", kind=kinds) == Words(parts=["b"])
    assert parsed("one", "two", kind=kinds) == Options(files=[Path("two")])


REFUSED = [
    ("x --kind mxnet", "--kind is 'mxnet', but must be one of 'torch', 'keras'"),
    ("x --colours red green", "--colours is 'green', but must be one of 'red', 'blue'"),
    ("x --per-host two", "--per-host is 'two', but must be an integer"),
    ("x --per-host 1.5", "--per-host is '1.5', but must be an integer"),
    ("x --per-host 0", "--per-host is 0, but must be an integer of at least 1"),
    ("x --factor much", "--factor is 'much', but must be a number"),
    ("x --seeds 1 b", "--seeds is 'b', but must be an integer"),
    ("x -np many", "-np is 'many', but must be an integer"),
    ("x --rates", "--rates has no value, but must be a text"),
    ("x --per-host", "--per-host has no value, but must be an integer"),
    ("x --per_host 2", "'--per_host 2' is not known; allowed are --per-host, --factor, files"),
    ("", "files is missing"),
]


@pytest.mark.parametrize(("given", "told"), REFUSED)
@pytest.mark.parametrize("action", ["", "run"])
def test_refused(given: str, told: str, action: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong command line ends with status 2 and one sentence, which names the program."""
    kind: Any = {"run": Options, "other": Words} if action else Options
    with pytest.raises(SystemExit) as ended:
        read_options(kind, [action, *given.split()] if action else given.split(), owner="program")
    said = capsys.readouterr().err
    assert ended.value.code == 2 and said.count("\n") == 1 and said.endswith(".\n")
    assert said.startswith("program: ") and said.count("program: ") == 1 and told in said


@pytest.mark.parametrize("given", [[], ["three"], ["--quick"]])
def test_an_action_is_needed(given: Sequence[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        read_options({"one": Options, "two": Words}, given, owner="program")
    assert "allowed are one, two." in capsys.readouterr().err


def test_one_rank_of_a_host_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOROVOD_LOCAL_RANK", "1")
    with pytest.raises(SystemExit, match="2"):
        read_options(Options, [], owner="program")
    assert capsys.readouterr().err == ""


def test_the_help_is_the_docstring(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        parsed("--help")
    said = " ".join(capsys.readouterr().out.split())
    for text in (
        "Do something with words.",
        "ranks of a host",
        "such as 50%",
        "default: ['1gbit']",
    ):
        assert text in said
    assert "--work" not in said and "second paragraph" not in said and "SUPPRESS" not in said


def test_settings_are_for_json() -> None:
    found = as_settings(parsed("x", "--output", "y"))
    assert found["output"] == "y" and found["seeds"] is None and found["rates"] == ["1gbit"]


def test_without_jsonargparse_a_sentence_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jsonargparse", None)
    with pytest.raises(ValueError, match="need jsonargparse, which is not installed"):
        parsed("x")


# ------------------------------------------------------------------------- the project's programs
PROGRAMS = {
    "benchmarks.averaging.command": ["Options"],
    "benchmarks.averaging.logistic": ["Options"],
    "benchmarks.averaging.scale": ["Options"],
    "benchmarks.compressors.bytes_sent": ["Options"],
    "benchmarks.compressors.kernels": ["Options"],
    "benchmarks.compressors.training": ["Options"],
    "benchmarks.faults.command": ["Options"],
    "benchmarks.netbench.command": ["Run", "Report"],
    "benchmarks.netbench.bench": ["Options"],
    "benchmarks.netbench.accuracy": ["Options"],
    "benchmarks.optbench.command": ["Run", "Tune", "Report"],
    "benchmarks.plan.command": ["Measure", "Fit", "Report"],
    "benchmarks.reliability": ["Report"],
    "benchmarks.storm.command": ["Options"],
}


@pytest.mark.parametrize("module", PROGRAMS)
def test_every_option_has_a_text(module: str) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("horovod.torch")
    for name in PROGRAMS[module]:
        kind = getattr(importlib.import_module(module), name)
        summary, texts = command_line._documentation(kind)
        assert summary and {item.name for item in dataclasses.fields(kind)} <= texts.keys()
        command_line._options_parser(kind)


@pytest.mark.parametrize(
    ("module", "tasks"),
    [
        ("benchmarks.compressors.training", "benchmarks.compressors.training"),
        ("benchmarks.netbench.accuracy", "benchmarks.netbench.accuracy_tasks"),
        ("benchmarks.optbench.command", "benchmarks.optbench.tasks"),
        ("benchmarks.averaging.command", "benchmarks.averaging.averaged"),
    ],
)
def test_allowed_tasks_are_those_there_are(module: str, tasks: str) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("horovod.torch")
    found = importlib.import_module(module)
    kind = getattr(found, "Options", None) or found.Run
    (choices,) = typing.get_args(typing.get_type_hints(kind)["tasks"])
    assert set(typing.get_args(choices)) == set(importlib.import_module(tasks).TASKS)


@pytest.mark.parametrize("script", ["bench", "graph", "netbench", "reliability"])
def test_scripts_have_help(script: str) -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / f"{script}.py", "--help"],
        capture_output=True, text=True, check=True, timeout=100,
    )  # fmt: skip
    assert done.stdout.startswith(f"usage: {script}.py")


def test_only_exceptions_use_argparse() -> None:
    """Only a script that runs where jsonargparse is not installed uses argparse."""
    found = {
        str(path.relative_to(ROOT))
        for folder in ("benchmarks", "examples", "scripts")
        for path in (ROOT / folder).rglob("*.py")
        if "import argparse" in path.read_text()
    }
    assert found == {"benchmarks/gpu/command.py"}
