"""The console command `accordion-hvd`."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from accordion_hvd import PowerSGD, Replay
from accordion_hvd.tools.command import main

ROOT = Path(__file__).resolve().parents[2]
SAVED = ROOT / "tests" / "engine" / "saved"
COMMANDS = sorted(main.commands)
FORWARDED = ("bench", "build-horovod", "demo", "doctor", "netbench")


def call(*words: object) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words], prog_name="accordion-hvd")


@pytest.mark.parametrize("name", ["", *(name for name in COMMANDS if name not in FORWARDED)])
def test_help_fits_a_screen(name: str) -> None:
    found = call(*name.split(), "--help")
    lines = found.output.splitlines()
    assert found.exit_code == 0 and len(lines) <= 24 and max(map(len, lines)) <= 80


def test_help_loads_no_framework() -> None:
    code = (
        "import sys; from accordion_hvd.tools.command import main; "
        "main(['--help'], standalone_mode=False); "
        "sys.exit(bool({'torch', 'tensorflow', 'horovod', 'keras'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)


@pytest.mark.parametrize("words", [("nonsense",), ("checkpoint", "show", "nowhere"), ("replay",)])
def test_wrong_usage_ends_with_status_2(words: tuple[str, ...]) -> None:
    assert call(*words).exit_code == 2


@pytest.mark.parametrize(
    "folder", sorted(path.parent.name for path in SAVED.glob("*/manifest.json"))
)
def test_every_checkpoint_can_be_shown(folder: str) -> None:
    found = call("checkpoint", "show", SAVED / folder)
    manifest = json.loads((SAVED / folder / "manifest.json").read_text())
    assert found.exit_code == 0, found.output
    assert "complete" in found.output and f"{manifest['ranks']} rank" in found.output


def test_a_damaged_checkpoint_is_named(tmp_path: Path) -> None:
    folder = shutil.copytree(SAVED / "accordion", tmp_path / "saved")
    victim = sorted(folder.glob("*.npz"))[-1]
    victim.write_bytes(victim.read_bytes()[:-40])
    found = call("checkpoint", "show", folder)
    assert found.exit_code == 1 and "damaged" in found.output and victim.name in found.output


def test_decisions_are_shown_and_repeated(tmp_path: Path) -> None:
    """The written file makes a policy with the recorded compressors at the recorded steps."""
    file = tmp_path / "decisions.json"
    found = call("replay", SAVED / "accordion", "--output", file)
    assert found.exit_code == 0, found.output
    history = json.loads(file.read_text())
    rows = [line.split() for line in found.output.splitlines() if line.strip()[:1].isdigit()]
    shown = [row for row in rows if len(row) > 3 and "PowerSGD" in row[3]]
    assert [(int(row[0]), row[2], row[3]) for row in shown] == [
        (row["step"], row["name"], row["compressor"]) for row in history
    ]
    assert set(Replay(file).levels("w")) <= {PowerSGD(1), PowerSGD(2)}
    only = call("replay", SAVED / "accordion", "--layer", "v").output
    assert " v " in only and " w " not in only


@pytest.mark.parametrize("text", ["", "{", '{"a": 1}', "[]"])
def test_a_file_without_decisions_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "decisions.json"
    file.write_text(text)
    assert call("replay", file).exit_code == 1
    with pytest.raises(ValueError, match="Replay: (the )?history"):
        Replay(file)


@pytest.mark.parametrize("name", ["demo", "bench", "netbench"])
def test_scripts_need_a_checkout(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("accordion_hvd.__file__", str(tmp_path / "accordion_hvd" / "__init__.py"))
    found = call(name)
    assert found.exit_code == 2 and f"scripts/{name}.py is part of a checkout" in found.output


def test_scripts_of_a_checkout_receive_their_options() -> None:
    command = [sys.executable, "-m", "accordion_hvd.tools.command", "netbench", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "accuracy" in done.stdout and "report" in done.stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_names_the_command(shell: str) -> None:
    found = call("completion", shell)
    assert found.exit_code == 0 and "_ACCORDION_HVD_COMPLETE" in found.output


def test_the_page_names_every_command() -> None:
    page = (ROOT / "docs" / "cli.md").read_text()
    assert all(f"`{name}" in page for name in COMMANDS)
