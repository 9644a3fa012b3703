"""Tests of the console command: help, exit statuses, completion, and scripts of a checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import click
import pytest
from click.testing import CliRunner

import accordion_hvd
from accordion_hvd.simulation import prediction
from accordion_hvd.tools.command import main
from accordion_hvd.tools.plan.command import ENGINE_NAMES

ROOT = Path(__file__).resolve().parents[2]
ENTRY = "from accordion_hvd.tools.command import main; main(prog_name='accordion-hvd')"


def commands(group: click.Group, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    found = [path]
    for name, command in group.commands.items():
        inner = isinstance(command, click.Group)
        found += commands(command, (*path, name)) if inner else [(*path, name)]
    return found


FORWARDED = {"doctor", "build-horovod", "demo", "bench", "netbench"}
OWN = [path for path in commands(main) if not FORWARDED & set(path)]


@pytest.mark.parametrize("path", OWN, ids=" ".join)
def test_help_fits_a_screen(path: tuple[str, ...]) -> None:
    for option in ("-h", "--help"):
        done = CliRunner().invoke(main, [*path, option], terminal_width=80)
        lines = done.output.splitlines()
        assert done.exit_code == 0 and len(lines) <= 24 and max(map(len, lines)) <= 80
        assert not any(line.endswith("...") for line in lines[1:]), "a text is cut off"


def run(code: str, **environment: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
    ).stdout  # fmt: skip


def test_start_up_imports_no_framework_and_no_array() -> None:
    heavy = ("numpy", "torch", "tensorflow", "keras", "horovod", "accordion_hvd.engine")
    loaded = run(f"import sys, accordion_hvd.tools.command\nprint(set({heavy}) & set(sys.modules))")
    assert loaded.strip() == "set()"


def test_engines_are_those_of_predictions() -> None:
    assert set(ENGINE_NAMES) == set(prediction.COSTS)


@pytest.mark.parametrize(
    "words",
    [["no-such"], ["plan", "--hosts", "0"], ["completion", "tcsh"], ["inspect", "/no"]],
)
def test_wrong_usage_ends_with_2(words: Sequence[str]) -> None:
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 2 and "Error: " in done.output and "Traceback" not in done.output


# ------------------------------------------------------------------------------------- completion
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(shell: str) -> None:
    done = CliRunner().invoke(main, ["completion", shell])
    assert done.exit_code == 0 and f"_ACCORDION_HVD_COMPLETE={shell}_complete" in done.output
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=done.output, text=True, check=True)


@pytest.mark.parametrize(
    ("words", "number", "found"),
    [("accordion-hvd ins", "1", "inspect"), ("accordion-hvd plan --engine h", "3", "horovod")],
)
def test_words_are_completed(words: str, number: str, found: str) -> None:
    given = {"COMP_WORDS": words, "COMP_CWORD": number}
    assert run(ENTRY, _ACCORDION_HVD_COMPLETE="bash_complete", **given) == f"plain,{found}\n"


# ------------------------------------------------------------------------- scripts of a checkout
class Replaced(Exception):
    """Stand-in for the end of a process that another program replaces."""


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    found: list[list[str]] = []

    def replace(program: str, arguments: list[str]) -> NoReturn:
        found.append(arguments)
        raise Replaced

    monkeypatch.setattr(os, "execv", replace)
    return found


def made(folder: Path) -> Path:
    """Make a folder that looks like a checkout."""
    for name in ("accordion_hvd/__init__.py", "scripts/demo.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    return folder


@pytest.mark.parametrize("name", ["demo", "bench", "netbench"])
def test_scripts_get_all_arguments(name: str, started: list[Any]) -> None:
    done = CliRunner().invoke(main, [name, "--help", "--rates", "a", "--", "-x"])
    assert isinstance(done.exception, Replaced)
    script = str(ROOT / "scripts" / f"{name}.py")
    assert started == [[sys.executable, script, "--help", "--rates", "a", "--", "-x"]]
    assert Path(script).is_file()


def test_the_current_directory_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: list[Any]
) -> None:
    monkeypatch.chdir(made(tmp_path))
    CliRunner().invoke(main, ["demo"])
    assert started == [[sys.executable, str(tmp_path / "scripts" / "demo.py")]]


def test_without_a_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: list[Any]
) -> None:
    """A scripts folder that is not beside the package is not run, and one sentence says so."""
    (made(tmp_path) / "accordion_hvd" / "__init__.py").unlink()
    monkeypatch.chdir(tmp_path)
    installed = tmp_path / "site-packages"
    monkeypatch.setattr(accordion_hvd, "__file__", str(installed / "accordion_hvd/__init__.py"))
    done = CliRunner().invoke(main, ["demo", "--seed", "4"])
    assert done.exit_code == 2 and not started
    assert done.output.count("\n") == 1 and str(installed) in done.output


def test_a_script_runs() -> None:
    words = ["accordion-hvd", "netbench", "run", "--hosts", "0", "--", "true", "--flag"]
    code = f"import sys; sys.argv = {words}; {ENTRY}"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 2 and done.stderr.startswith("netbench: --hosts is 0")
