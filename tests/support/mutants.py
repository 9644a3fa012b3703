"""Measure which small faults of the package the tests notice.

    python tests/support/mutants.py cover [--count 200]  which test runs which place (an hour)
    python tests/support/mutants.py run [--count 200]    try mutants (hours; what is tried is kept)
    python tests/support/mutants.py report

A mutant is the package with one small change at a place that tests run: another comparison, number
or operator, a negated condition, a call left out. It is killed if a test fails. The tests that come
to the place are tried in the order of their duration: first those of `make test`, then those that
only `make test-all` has, of each at most as many as take `SECONDS`. Draws are by a fixed seed.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import pytest  # noqa: E402
from grouping import unit_of  # noqa: E402

from benchmarks import processes  # noqa: E402

RUNS = ROOT / "runs" / "mutants"
SEED = 2021
FIRST = 40  # tests that are tried before all others that come to the place
SECONDS = 120.0  # of the tests that are tried of each command
LIMIT = 1200  # seconds after which tests are ended that should have taken fewer than `SECONDS`
COPIED = ("accordion_hvd", "benchmarks", "configs", "docs", "examples", "scripts", "tests")


# --- mutants ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Mutant:
    """A change of one place of a file.

    Attributes:
        file: path below the repository.
        line: first line of the changed node.
        begin: offset of the changed bytes.
        end: offset of their end.
        text: what takes their place.
        was: what stood there.
    """

    file: str
    line: int
    begin: int
    end: int
    text: str
    was: str

    def apply(self, root: Path) -> None:
        path = root / self.file
        content = path.read_bytes()
        assert content[self.begin : self.end].decode() == self.was
        path.write_bytes(content[: self.begin] + self.text.encode() + content[self.end :])


_SWAPPED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv,
}  # fmt: skip


def changed(node: ast.AST) -> ast.AST | None:
    """Return the node with a small change; None if this kind of node is left alone."""
    copy: Any = deepcopy(node)
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _SWAPPED:
        copy.ops[0] = _SWAPPED[type(node.ops[0])]()
    elif isinstance(node, ast.BinOp | ast.BoolOp) and type(node.op) in _SWAPPED:
        copy.op = _SWAPPED[type(node.op)]()
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        copy = copy.operand
    elif isinstance(node, ast.IfExp):
        copy.test = ast.UnaryOp(ast.Not(), copy.test)
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        copy.value = not node.value
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        copy.value = node.value + 1
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        copy = ast.Constant(None)
    else:
        return None
    return copy


def mutants_of(file: str, root: Path = ROOT) -> list[Mutant]:
    """Return all mutants of a file."""
    content = (root / file).read_bytes()
    starts = [0]
    for line in content.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found = []
    for node in _outside_annotations(ast.parse(content)):
        if (new := changed(node)) is not None:
            place: Any = node
            begin = starts[place.lineno - 1] + place.col_offset
            end = starts[place.end_lineno - 1] + place.end_col_offset
            text, was = ast.unparse(ast.fix_missing_locations(new)), content[begin:end].decode()
            if isinstance(node, ast.expr) and not isinstance(node, ast.Constant):
                text = f"({text})"
            found.append(Mutant(file, place.lineno, begin, end, text, was))
    return found


def _outside_annotations(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a tree that run: no annotations, and no parts of f-strings."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns") or isinstance(node, ast.JoinedStr):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield child
                yield from _outside_annotations(child)


# --- which test runs which place --------------------------------------------------------

PROBE = '''"""Writes which test comes to a place first; True, so that `hit(3) and (x)` is x."""
from os import O_APPEND, O_CREAT, O_WRONLY, close, environ, open, path, write

FILE = path.join(path.dirname(__file__), "hits")
seen = set()


def hit(number):
    test = environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    if (number, test) not in seen:
        seen.add((number, test))
        file = open(FILE, O_WRONLY | O_APPEND | O_CREAT)
        write(file, f"{number}\\t{test}\\n".encode())
        close(file)
    return True
'''


def probed(content: bytes, places: Mapping[int, Mutant]) -> bytes:
    """Return a file's content that tells, by their numbers, which of these places run."""
    edits = []  # (offset, order at that offset, text): what ends there first, and the inner before
    for number, place in places.items():
        size = place.end - place.begin
        opening = f'(__import__("mutants_probe").hit({number}) and ('
        edits += [(place.begin, 1, -size, opening), (place.end, 0, size, "))")]
    parts, last = [], 0
    for offset, _, _, text in sorted(edits):
        parts += [content[last:offset], text.encode()]
        last = offset
    return b"".join([*parts, content[last:]])


def cover(count: int) -> None:
    """Draw mutants; run all tests; store which test comes to which, and how long each takes."""
    shutil.rmtree(RUNS, ignore_errors=True)
    RUNS.mkdir(parents=True)
    files = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("accordion_hvd/**/*.py"))
    known = [mutant for file in files for mutant in mutants_of(file)]
    drawn = random.Random(SEED).sample(known, min(2 * count, len(known)))  # no test runs some
    with tempfile.TemporaryDirectory(prefix="mutants") as folder:
        tree = Path(folder)
        copy_to(tree)
        (tree / "mutants_probe.py").write_text(PROBE)
        for file in {mutant.file for mutant in drawn}:
            places = {n: mutant for n, mutant in enumerate(drawn) if mutant.file == file}
            (tree / file).write_bytes(probed((tree / file).read_bytes(), places))
        words = ["-m", "pytest", "-q", "-p", "mutants", "tests", "-m", "not quiet", "-n", "2"]
        words += ["--no-loadscope-reorder", "--timeout", "900"]
        environment = _environment(tree) | {
            "MUTANTS_TIMES": str(RUNS / "times.jsonl"), "ALL_TESTS": "1"
        }  # fmt: skip
        subprocess.run([sys.executable, *words], cwd=tree, check=False, env=environment)
        tests: dict[int, set[str]] = defaultdict(set)
        for line in (tree / "hits").read_text().splitlines():
            number, _, test = line.partition("\t")
            if test:  # otherwise it ran at an import, before all tests
                tests[int(number)].add(test)
    rows = [{**asdict(m), "tests": sorted(tests[n])} for n, m in enumerate(drawn) if tests[n]]
    (RUNS / "drawn.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def _environment(tree: Path) -> dict[str, str]:
    paths = [str(tree), str(tree / "tests" / "support")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1"}


# --- as a plugin of pytest: times, and the selection of tests ----------------------------


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "MUTANTS_TESTS" in os.environ:
        wanted = json.loads(Path(os.environ["MUTANTS_TESTS"]).read_text())
        order = {name: number for number, name in enumerate(wanted)}
        kept = [item for item in items if unit_of(item) in order]
        items[:] = sorted(kept, key=lambda item: order[unit_of(item)])


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    began = time.monotonic()
    yield
    if "MUTANTS_TIMES" in os.environ:
        row = {
            "name": item.nodeid, "unit": unit_of(item),
            "seconds": round(time.monotonic() - began, 3),
            "nightly": item.get_closest_marker("nightly") is not None,
        }  # fmt: skip
        with open(os.environ["MUTANTS_TIMES"], "a") as file:
            file.write(json.dumps(row) + "\n")


# --- trying mutants ---------------------------------------------------------------------


def draw(count: int) -> list[tuple[Mutant, list[str]]]:
    """Return mutants with the tests that come to them."""
    rows = map(json.loads, (RUNS / "drawn.jsonl").read_text().splitlines())
    return [(Mutant(**row), tests) for row in rows for tests in [row.pop("tests")]][:count]


def _read_times() -> tuple[dict[str, str], dict[str, float], set[str]]:
    """Return test -> unit, unit -> seconds, and the units that only `make test-all` has."""
    units: dict[str, str] = {}
    seconds: dict[str, float] = defaultdict(float)
    nightly = set()
    for line in (RUNS / "times.jsonl").read_text().splitlines():
        row = json.loads(line)
        units[row["name"]] = row["unit"]
        seconds[row["unit"]] += row["seconds"]
        if row["nightly"]:
            nightly.add(row["unit"])
    return units, seconds, nightly


def copy_to(tree: Path) -> None:
    """Copy what tests need, so that a mutant has files of its own."""
    for name in COPIED:
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in ROOT.iterdir():
        if path.is_file() or path.name == ".venv":
            (tree / path.name).symlink_to(path)


def attempt(mutant: Mutant, stages: dict[str, list[str]], units: dict[str, str]) -> dict[str, Any]:
    """Return what became of a mutant: by which stage and test it was killed, if at all.

    A test that fails without the mutant, too, does not count.

    Args:
        mutant: the mutant.
        stages: name -> units to run, one stage after the other.
        units: test -> unit.
    """
    began, killed, by = time.monotonic(), "", ""
    with (
        tempfile.TemporaryDirectory(prefix="mutant") as changed,
        tempfile.TemporaryDirectory(prefix="mutant") as unchanged,
    ):
        for tree in (changed, unchanged):
            copy_to(Path(tree))
        mutant.apply(Path(changed))
        for stage, tests in stages.items():
            left = list(tests)
            while left and (failed := _first_failure(Path(changed), left, stage)):
                unit = units.get(failed.partition(" - ")[0])
                suspects = [unit] if unit in left else left
                if _first_failure(Path(unchanged), suspects, stage) is None:
                    killed, by = stage, failed
                    break
                left = [test for test in left if test not in suspects]
            if killed:
                break
    seconds = round(time.monotonic() - began, 1)
    return {**asdict(mutant), "killed": killed, "by": by, "seconds": seconds}


def _first_failure(tree: Path, tests: Sequence[str], stage: str) -> str | None:
    """Return the first test that fails and why, or how pytest itself ended; None if all pass."""
    wanted = tree / "wanted.json"
    wanted.write_text(json.dumps(list(tests)))
    files = sorted({test.partition("::")[0] for test in tests})
    words = ["-m", "pytest", "-q", "-x", "-p", "mutants", "--timeout", "120", "--no-header"]
    environment = _environment(tree) | {"MUTANTS_TESTS": str(wanted)}
    environment |= {"ALL_TESTS": "1"} if stage == "all" else {}
    process = subprocess.Popen(
        [sys.executable, *words, *files], cwd=tree, env=environment,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        return None  # no test hung, which its own limit would have ended
    finally:
        processes.end(process, "MUTANTS_TESTS", str(wanted))
    if process.returncode in (0, 5):
        return None
    lines = [line for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return (lines or [" ".join(output.splitlines()[-3:])])[0].partition(" ")[2][:300]


def run(count: int, jobs: int) -> None:
    """Try mutants that were not tried yet."""
    units, seconds, nightly = _read_times()
    launches = set(units.values()) - set(units)  # `make test-all` has more cases in them
    file = RUNS / "results.jsonl"
    done = {
        (row["file"], row["begin"], row["end"], row["text"])
        for row in map(json.loads, file.read_text().splitlines() if file.exists() else [])
    }

    def try_out(drawn: tuple[Mutant, list[str]]) -> None:
        mutant, tests = drawn
        ran = sorted({units[n] for n in tests if n in units}, key=lambda unit: seconds[unit])
        quick = _quickest([unit for unit in ran if unit not in nightly], seconds)
        more = [unit for unit in ran if unit in nightly or unit in launches]
        stages = {
            "first": quick[:FIRST], "test": quick[FIRST:], "all": _quickest(more, seconds)
        }  # fmt: skip
        row = attempt(mutant, stages, units)
        with open(file, "a") as results:
            results.write(json.dumps(row) + "\n")
        print(f"{row['killed'] or 'alive':6} {row['seconds']:6.0f} s  {mutant.file}:{mutant.line}")

    left = [(m, tests) for m, tests in draw(count) if (m.file, m.begin, m.end, m.text) not in done]
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(try_out, left))
    report()


def _quickest(units: Sequence[str], seconds: Mapping[str, float]) -> list[str]:
    """Return the first of these units that take `SECONDS` together, and always the first one."""
    sums = itertools.accumulate(seconds[unit] for unit in units)
    taken = [unit for unit, total in zip(units, sums, strict=True) if total <= SECONDS]
    return taken or list(units[:1])


def report() -> None:
    """Print how many mutants each command kills, and those that nothing kills."""
    rows = [json.loads(line) for line in (RUNS / "results.jsonl").read_text().splitlines()]
    counts = Counter(row["killed"] for row in rows)
    quick, whole = counts["first"] + counts["test"], len(rows) - counts[""]
    for row in rows:
        if row["killed"] in ("", "all"):
            who = "only make test-all kills" if row["killed"] else "nothing kills"
            print(f"{who} {row['file']}:{row['line']}: {row['was']!r} -> {row['text']!r}")
    print(
        f"{len(rows)} mutants; make test-all kills {whole}, make test {quick}"
        f" ({100 * quick / max(1, whole):.1f} % of these)."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("action", choices=["cover", "run", "report"])
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time")
    arguments = parser.parse_args()
    if arguments.action == "run":
        run(arguments.count, arguments.jobs)
    elif arguments.action == "cover":
        cover(arguments.count)
    else:
        report()


if __name__ == "__main__":
    main()
