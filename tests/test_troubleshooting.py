"""Tests of docs/troubleshooting.md: the package has the messages that the page explains."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "troubleshooting.md"
VALUE = "\0"
"""Stands for a value in a text of the source."""


def quoted() -> list[str]:
    """Return the page's messages: blocks of text, and the first cells of tables of messages."""
    page = PAGE.read_text()
    found = re.findall(r"^```text\n(.*?)\n```", page, re.DOTALL | re.MULTILINE)
    for table in re.findall(r"^\| message \|.*\n\|[-|]+\n((?:\|.*\n)+)", page, re.MULTILINE):
        found += [re.fullmatch(r"\| `([^`]+)` \|.*", row)[1] for row in table.splitlines()]  # type: ignore[index]
    return found


def texts() -> list[str]:
    """Return the package's strings except docstrings, with `VALUE` in place of values."""
    found = []
    for path in sorted((ROOT / "accordion_hvd").rglob("*.py")):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            if id(node) in docstrings:
                continue
            if isinstance(node, ast.JoinedStr):
                parts = (x.value if isinstance(x, ast.Constant) else VALUE for x in node.values)
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(re.sub(r"%(?:\.\d)?[dsrg]", VALUE, node.value))
    return found


TEXTS = texts()


@pytest.mark.parametrize("message", quoted())
def test_messages_are_in_the_source(message: str) -> None:
    """One string of the source has all fixed parts of a message, in their order."""
    parts = [part for part in message.split("...") if part.strip(" .:;,")]
    assert sum(map(len, parts)) >= 12, "too little is fixed"
    pattern = re.compile(".*".join(map(re.escape, parts)), re.DOTALL)
    assert any(map(pattern.search, TEXTS)), parts


def test_errors_of_jobs_are_explained() -> None:
    """The page names the package's classes of errors that jobs raise."""
    page = PAGE.read_text()
    for name in (
        "BudgetSpent", "ConnectionLost", "PayloadError", "RankLost", "RanksDisagree", "RanksEnded",
        "ReplicasDiffer",
    ):  # fmt: skip
        assert f"`{name}`" in page


def test_there_are_messages() -> None:
    assert len(quoted()) > 70
