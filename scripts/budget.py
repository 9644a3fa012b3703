"""Count lines, and fail if the package has more than its budget: ``python scripts/budget.py``.

The number stands in setup.cfg. The message of a commit that raises it says, in a line that begins
with "Budget:", what the new lines replace. The last commits that changed setup.cfg are checked for
that; where git or the history is missing, they are not.
"""

from __future__ import annotations

import ast
import configparser
import io
import subprocess
import sys
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
KINDS = (".py", ".pyi", ".html", ".patch")
PARTS = {
    "package": ("accordion_hvd", KINDS),
    "tests": ("tests", KINDS),
    "benchmarks, scripts": ("benchmarks scripts", KINDS),
    "examples": ("examples", KINDS),
    "docs": ("docs", (".md",)),
}
"""What the counts are of -> folders, and the endings of the files in them that count."""

COMMITS = 30  # that changed setup.cfg, whose messages are checked


def files(folders: str, endings: Iterable[str], root: Path = ROOT) -> Iterator[Path]:
    """Yield the files in folders, separated by spaces, with one of the endings."""
    for folder in folders.split():
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in endings and "__pycache__" not in path.parts:
                yield path


def code_lines(source: str) -> int:
    """Return the number of lines of Python that are not blank, comments, docstrings or imports."""
    kept: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.string.strip() and token.type not in (tokenize.COMMENT, tokenize.ENDMARKER):
            kept.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        words = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node, ast.Import | ast.ImportFrom) or (
            words and isinstance(node.value.value, str)
        ):
            kept.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(kept)


def count(part: str, root: Path = ROOT) -> tuple[int, int, int]:
    """Return a part's number of files, lines, and lines of code."""
    texts = [(path.suffix, path.read_text()) for path in files(*PARTS[part], root=root)]
    lines = sum(len(text.splitlines()) for _, text in texts)
    return len(texts), lines, sum(code_lines(text) for suffix, text in texts if suffix == ".py")


def budget(text: str) -> int | None:
    """Return the budget that the text of a setup.cfg states."""
    parser = configparser.ConfigParser(interpolation=None)
    parser.read_string(text)
    return parser.getint("budget", "package", fallback=None)


def unexplained(root: Path = ROOT) -> list[str]:
    """Return the commits that raised the budget and do not say what the new lines replace."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=True)
        return done.stdout

    found = []
    try:
        for commit in git("log", f"-n{COMMITS}", "--format=%h", "--", "setup.cfg").split():
            now = budget(git("show", f"{commit}:setup.cfg"))
            before = budget(git("show", f"{commit}^:setup.cfg"))
            message = git("log", "-n1", "--format=%B", commit)
            if now and before and now > before and "\nBudget:" not in message:
                found.append(f"{commit} raises the budget from {before} to {now}")
    except (OSError, subprocess.CalledProcessError):
        pass  # no git, or the history ends here
    return found


def main(root: Path = ROOT) -> int:
    """Print the counts; return the exit status."""
    print(f"{'':20}{'files':>7}{'lines':>8}{'code':>8}")
    for part in PARTS:
        print(f"{part:20}{{:7}}{{:8}}{{:8}}".format(*count(part, root)))
    allowed, (_, lines, _) = budget((root / "setup.cfg").read_text()), count("package", root)
    if allowed is None:
        print("budget: setup.cfg has no [budget] with a number `package`.", file=sys.stderr)
        return 1
    if lines > allowed:
        print(
            f"budget: the package has {lines} lines, but setup.cfg allows {allowed}: remove what"
            " the new lines replace, or raise the number with a word on it.",
            file=sys.stderr,
        )
    for row in (rows := unexplained(root)):
        print(f'budget: {row}, but its message has no line "Budget: ...".', file=sys.stderr)
    return int(lines > allowed or bool(rows))


if __name__ == "__main__":
    sys.exit(main())
