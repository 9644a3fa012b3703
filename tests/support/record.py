"""Keep the last result of ``make test-all`` in git, and say when it is old.

python tests/support/record.py write runs/tests/*.xml    from the JUnit files of a whole run
python tests/support/record.py check                     as a part of `make check`; warns only
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "tests" / "last_test_all.json"
OLD = 300  # commits after which `make check` warns


def git(*words: str, root: Path = ROOT) -> str:
    done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def summary(files: Iterable[Path], commit: str) -> dict[str, Any]:
    """Return date, commit, minutes and counts of a run that wrote these JUnit files."""
    suites = [
        suite for file in files for suite in ElementTree.parse(file).getroot().iter("testsuite")
    ]
    begun = [datetime.datetime.fromisoformat(suite.attrib["timestamp"]) for suite in suites]
    ended = [
        begin + datetime.timedelta(seconds=float(suite.attrib["time"]))
        for begin, suite in zip(begun, suites, strict=True)
    ]
    counts = {
        key: sum(int(suite.attrib[key]) for suite in suites)
        for key in ("tests", "failures", "errors", "skipped")
    }
    failed = counts["failures"] + counts["errors"]
    return {
        "date": min(begun).date().isoformat(),
        "commit": commit,
        "minutes": round((max(ended) - min(begun)).total_seconds() / 60, 1),
        "passed": counts["tests"] - failed - counts["skipped"],
        "failed": failed,
        "skipped": counts["skipped"],
    }


def write(files: Iterable[Path]) -> None:
    found = summary(files, git("rev-parse", "--short=10", "HEAD"))
    print(json.dumps(found))
    if git("status", "--porcelain", "--untracked-files=no"):
        print("Not recorded: files differ from the commit.")
    else:
        RECORD.write_text(json.dumps(found, indent=2) + "\n")
        print(f"Recorded in {RECORD.relative_to(ROOT)}: commit it.")


def warning(root: Path = ROOT) -> str | None:
    """Return what is to be said about the age and the outcome of the last result."""
    record = root / RECORD.relative_to(ROOT)
    if not record.exists():
        return "make test-all has not been recorded yet."
    found = json.loads(record.read_text())
    try:
        since = int(git("rev-list", "--count", f"{found['commit']}..HEAD", root=root))
    except (OSError, subprocess.CalledProcessError):
        return None  # no git, or not the whole history
    if since > OLD:
        return f"make test-all ran {since} commits ago, on {found['date']}: run it."
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("action", choices=["write", "check"])
    parser.add_argument("files", nargs="*", type=Path)
    arguments = parser.parse_args()
    if arguments.action == "write":
        write(arguments.files)
    elif told := warning():
        print(f"check: {told}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
