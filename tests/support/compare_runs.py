"""Compare what two versions of the tests check, by the JUnit files of their runs.

    python tests/support/compare_runs.py --before OLD.xml ... --test TEST.xml ... --all ALL.xml ...

A test is a check with a framework, a launcher and a number of ranks. Each that was run before is in
the files of `make test-all`, or tests/left.csv has a reason why it went. Each check of ranks that
was run before is in the files of `make test`, whatever its launcher and number of ranks. The status
is 1 otherwise.
"""

from __future__ import annotations

import argparse
import csv
import fnmatch
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

LEFT = Path(__file__).resolve().parents[1] / "left.csv"
FRAMEWORKS = ("numpy", "poisoned", "torch", "tensorflow", "keras")
_LAUNCHER = re.compile(r"(gloo|mpirun|torchrun|carried)(\d*)")


class Checked(NamedTuple):
    """What one test checks, and where.

    Attributes:
        check: file and function, with those parameters that say nothing of the others.
        framework: the framework that a parameter names, or "".
        launcher: the launcher that a parameter names, or "".
        world: number of ranks beside the launcher, or "".
    """

    check: str
    framework: str = ""
    launcher: str = ""
    world: str = ""


def checked_by(classname: str, name: str) -> Checked:
    """Return the test that a test case of a JUnit file is."""
    function, bracket, words = name.partition("[")
    rest, found = [], {"framework": "", "launcher": "", "world": ""}
    for word in words.removesuffix("]").split("-"):
        launcher = _LAUNCHER.fullmatch(word)
        if launcher and not found["launcher"]:
            found["launcher"], found["world"] = launcher.groups()
        elif word in FRAMEWORKS:
            found["framework"] += word
        elif word not in ("forked", "own"):  # how ranks start
            rest.append(word)
    check = f"{classname.replace('.', '/')}.py::{function}"
    return Checked(f"{check}[{'-'.join(rest)}]" if bracket and rest else check, **found)


def tests_in(files: Iterable[Path]) -> set[Checked]:
    cases = [case for file in files for case in ElementTree.parse(file).getroot().iter("testcase")]
    return {checked_by(case.attrib["classname"], case.attrib["name"]) for case in cases}


def reasons() -> list[tuple[str, str, str]]:
    """Return the rows of left.csv: a pattern of checks, one of frameworks, and why they went."""
    with open(LEFT, newline="") as file:
        return [(row["check"], row["framework"], row["why"]) for row in csv.DictReader(file)]


def is_of_ranks(test: Checked) -> bool:
    return "check_" in test.check and bool(test.launcher)


def compare(before: set[Checked], quick: set[Checked], whole: set[Checked]) -> list[str]:
    """Return what is missing, a line each."""
    patterns = [(check, framework) for check, framework, _ in reasons()]
    lines = [
        f"in neither command, without a reason in left.csv: {test}"
        for test in sorted(before - whole - quick)
        if not any(
            fnmatch.fnmatchcase(test.check, check)
            and fnmatch.fnmatchcase(test.framework, framework)
            for check, framework in patterns
        )
    ]
    lines += [f"in make test, not in make test-all: {test}" for test in sorted(quick - whole)]
    there = {(test.check, test.framework) for test in quick}
    lines += [
        f"not in make test with any launcher: {check} {framework}"
        for check, framework in sorted({t[:2] for t in before & whole if is_of_ranks(t)} - there)
    ]
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    for name in ("before", "test", "all"):
        parser.add_argument(f"--{name}", nargs="+", type=Path, required=True)
    arguments = parser.parse_args()
    before, quick, whole = map(tests_in, (arguments.before, arguments.test, arguments.all))
    lines = compare(before, quick, whole)
    print("\n".join(lines) or "Nothing is missing.")
    print(
        f"{len(before)} tests before; {len(quick)} in make test, {len(whole)} in make test-all;"
        f" {len(before - whole)} went, {len(whole - before)} are new."
    )
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
