"""Tests of the programs that watch over the tests and the size of the package."""

from __future__ import annotations

import importlib.util
import itertools
import json
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import compare_runs
import mutants
import pytest
import record
from compare_runs import Checked, checked_by
from grouping import Scheduling, front_to_back, is_launch, launch_of

ROOT = Path(__file__).resolve().parents[1]


def script(name: str) -> ModuleType:
    """Load a script of the folder `scripts`."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


budget = script("budget")


def test_the_checks_of_a_launch_stay_in_one_process(request: pytest.FixtureRequest) -> None:
    items = request.session.items
    launches = [launch_of(item.nodeid) for item in front_to_back(items)]
    runs = [launch for launch, _ in itertools.groupby(launches) if launch]
    assert len(runs) == len(set(runs))
    for item in items:
        split = Scheduling._split_scope(None, item.nodeid)  # type: ignore[arg-type]
        assert split == (launch_of(item.nodeid) or item.nodeid.partition("::")[0])
        assert (launch_of(item.nodeid) is not None) == (
            is_launch(item) and "check" in item.fixturenames
        )


# --- the budget of lines ----------------------------------------------------------------


def test_only_code_counts_as_code() -> None:
    source = '''"""A module.

Two lines."""

import os
from sys import (
    path,
)

# a comment
TEXT = """not a
docstring"""


def f(x):
    """A docstring."""
    return [
        x,  # a comment beside code
    ]
'''
    assert budget.code_lines(source) == 6


def repository(folder: Path, *steps: tuple[str, int]) -> None:
    """Make a git repository whose commits, with these messages, set the budget to these numbers."""
    words = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
    for message, number in steps:
        (folder / "setup.cfg").write_text(f"[budget]\npackage = {number}\n")
        subprocess.run(["git", "add", "-A"], cwd=folder, check=True)
        subprocess.run(["git", *words, "commit", "-q", "-m", message], cwd=folder, check=True)


def test_a_raise_of_the_budget_needs_a_word(tmp_path: Path) -> None:
    explained = "Faster\n\nBudget: replaces the old file in the next commit."
    repository(tmp_path, ("First", 10), ("Smaller", 8), (explained, 9), ("Forgotten", 12))
    (found,) = budget.unexplained(tmp_path)
    assert found.endswith("raises the budget from 9 to 12")


def test_a_package_over_budget_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    repository(tmp_path, ("First", 3))
    (tmp_path / "accordion_hvd").mkdir()
    for lines, status in ((3, 0), (4, 1)):
        (tmp_path / "accordion_hvd" / "a.py").write_text("x = 1\n" * lines)
        (tmp_path / "accordion_hvd" / "a.txt").write_text("not counted\n")
        assert budget.main(tmp_path) == status
    told = capsys.readouterr()
    assert "the package has 4 lines, but setup.cfg allows 3" in told.err


def test_the_budget_is_the_one_of_setup_cfg() -> None:
    allowed = budget.budget((ROOT / "setup.cfg").read_text())
    assert allowed and budget.count("package")[1] <= allowed


# --- the last result of make test-all ---------------------------------------------------

JUNIT = """<testsuites><testsuite tests="{tests}" failures="0" errors="0" skipped="1" time="{time}"
timestamp="{timestamp}"><testcase classname="tests.test_a" name="test_b[c@d]"/></testsuite>
</testsuites>"""


def test_a_result_spans_both_parts(tmp_path: Path) -> None:
    parts = [(10, 600, "2026-01-02T03:00:00+00:00"), (5, 120, "2026-01-02T03:11:00+00:00")]
    for number, (tests, time, timestamp) in enumerate(parts):
        text = JUNIT.format(tests=tests, time=time, timestamp=timestamp)
        (tmp_path / f"{number}.xml").write_text(text)
    assert record.summary(sorted(tmp_path.glob("*.xml")), "abc") == {
        "date": "2026-01-02", "commit": "abc", "minutes": 13.0, "passed": 13, "failed": 0,
        "skipped": 2,
    }  # fmt: skip


def test_an_old_result_warns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "tests" / "last_test_all.json"
    file.parent.mkdir()
    assert record.warning(tmp_path) == "make test-all has not been recorded yet."
    repository(tmp_path, *((str(number), number) for number in range(1, 5)))
    first = record.git("rev-list", "--max-parents=0", "HEAD", root=tmp_path)
    file.write_text(json.dumps({"commit": first, "date": "2026-01-02"}))
    monkeypatch.setattr(record, "OLD", 3)
    assert record.warning(tmp_path) is None
    monkeypatch.setattr(record, "OLD", 2)
    assert record.warning(tmp_path) == "make test-all ran 3 commits ago, on 2026-01-02: run it."


# --- what two versions check ------------------------------------------------------------


@pytest.mark.parametrize(
    "name, wanted",
    [
        ("test_ranks[core_checks-gloo2-check_x]", ("[core_checks-check_x]", "", "gloo", "2")),
        ("test_behaviour[keras-mpirun4-(end)]", ("[(end)]", "keras", "mpirun", "4")),
        ("test_law[mean-topk-numpy-poisoned-2]", ("[mean-topk-2]", "numpypoisoned", "", "")),
        ("test_a_rank_that_fails_is_named[gloo-own]", ("", "", "gloo", "")),
        ("test_a_rank_that_fails_is_named[gloo]", ("", "", "gloo", "")),
        ("test_plain", ("", "", "", "")),
    ],
)
def test_names_of_tests_are_understood(name: str, wanted: tuple[str, ...]) -> None:
    check = f"tests/test_a.py::{name.partition('[')[0]}{wanted[0]}"
    assert checked_by("tests.test_a", name) == Checked(check, *wanted[1:])


def test_what_went_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    there = Checked("a.py::test_ranks[s-check_x]", "", "gloo", "2")
    more, old = there._replace(launcher="mpirun", world="4"), Checked("a.py::test_old[1]")
    before = {there, more, old}
    assert compare_runs.compare(before, {there}, before) == []
    (line,) = compare_runs.compare(before, {there}, {there, more})
    assert line.startswith("in neither command") and "test_old" in line
    monkeypatch.setattr(
        compare_runs, "reasons", lambda: [("a.py::test_old*", "*", "its names went")]
    )
    assert compare_runs.compare(before, {there}, {there, more}) == []
    (line,) = compare_runs.compare(before, {old}, before)
    assert line == "not in make test with any launcher: a.py::test_ranks[s-check_x] "
    (line,) = compare_runs.compare({there}, {there, more}, {there})
    assert line.startswith("in make test, not in make test-all")


# --- mutants ----------------------------------------------------------------------------

SOURCE = '''def f(x: int = 3) -> int | None:
    """Add é, and 1."""
    if x < 2 and not x:
        print("é", x + 1)
    return f"{x + 1}"
'''


def test_mutants_change_one_place_each(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(SOURCE)
    found = mutants.mutants_of("a.py", tmp_path)
    changes = {(m.line, m.was, m.text) for m in found}
    assert changes == {
        (1, "3", "4"),
        (3, "x < 2 and not x", "(x < 2 or not x)"),
        (3, "x < 2", "(x <= 2)"),
        (3, "2", "3"),
        (3, "not x", "(x)"),
        (4, 'print("é", x + 1)', "None"),
        (4, "x + 1", "(x - 1)"),
        (4, "1", "2"),
    }
    for mutant in found:
        (tmp_path / "a.py").write_text(SOURCE)
        mutant.apply(tmp_path)
        line = SOURCE.splitlines()[mutant.line - 1].replace(mutant.was, mutant.text, 1)
        assert (tmp_path / "a.py").read_text().splitlines()[mutant.line - 1] == line


def test_probes_tell_which_test_comes_to_a_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.py").write_text(SOURCE)
    places = dict(enumerate(mutants.mutants_of("a.py", tmp_path)))
    (tmp_path / "a.py").write_bytes(mutants.probed((tmp_path / "a.py").read_bytes(), places))
    (tmp_path / "mutants_probe.py").write_text(mutants.PROBE)
    monkeypatch.syspath_prepend(str(tmp_path))
    f = importlib.import_module("a").f
    for name, argument, result in (("one", 5, "6"), ("two", 0, "1"), ("one", 6, "7")):
        monkeypatch.setenv("PYTEST_CURRENT_TEST", f"{name} (call)")
        assert f(argument) == result
    hits = [line.split("\t") for line in (tmp_path / "hits").read_text().splitlines()]
    assert len(hits) == len(set(map(tuple, hits)))
    of = {name: {places[int(n)].was for n, test in hits if test == name} for name in ("one", "two")}
    assert of["one"] == {"x < 2 and not x", "x < 2", "2"}
    assert of["two"] == {place.was for place in places.values()} - {"3"}


def test_a_mutant_is_killed_by_the_first_test_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "accordion_hvd").mkdir()
    (tmp_path / "accordion_hvd" / "__init__.py").write_text("LIMIT = 3\n")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "support").symlink_to(ROOT / "tests" / "support")
    (tmp_path / "benchmarks").symlink_to(ROOT / "benchmarks")
    (tmp_path / "tests" / "test_it.py").write_text(
        "import accordion_hvd\n\n"
        "def test_other(): pass\n\n"
        "def test_limit(): assert accordion_hvd.LIMIT == 3\n\n"
        "def test_broken(): assert False\n"
    )
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    monkeypatch.setattr(mutants, "COPIED", ("accordion_hvd", "benchmarks", "tests"))
    (mutant,) = mutants.mutants_of("accordion_hvd/__init__.py", tmp_path)

    def tried(*tests: str) -> dict[str, Any]:
        names = [f"tests/test_it.py::{test}" for test in tests]
        stages = {"first": names[:1], "test": names[1:]}
        return mutants.attempt(mutant, stages, dict(zip(names, names, strict=True)))

    found = tried("test_other", "test_limit")
    assert found["killed"] == "test" and "test_limit" in found["by"]
    assert tried("test_broken", "test_other")["killed"] == ""


def test_make_check_looks_at_budget_and_record() -> None:
    makefile = (ROOT / "Makefile").read_text()
    recipe = makefile.partition("\ncheck:")[2].partition("\n\n")[0]
    assert "scripts/budget.py" in recipe and "tests/support/record.py check" in recipe
