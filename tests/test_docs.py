"""Tests of the README, CONTRIBUTING.md and docs: code, figures, links and commands are right."""

from __future__ import annotations

import ast
import configparser
import csv
import functools
import importlib
import os
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from frameworks import Framework, Ranks, normals, parameters
from launch import command_for, need

from accordion_hvd import TopK, averaging, compressors, optimizers, parse, simulate
from accordion_hvd.core.base import Compressor
from accordion_hvd.policies import Policy
from accordion_hvd.tools.command import main
from benchmarks.report import read_tables

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")),
]
FOLDERS = "accordion_hvd|benchmarks|examples|scripts|configs|tests"


def blocks(page: str, language: str) -> list[str]:
    text = (ROOT / page).read_text()
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


PYTHON = [
    pytest.param(block, id=f"{page}-{number}")
    for page in PAGES
    for number, block in enumerate(blocks(page, "python"))
]


def test_there_are_blocks() -> None:
    assert len(PYTHON) >= 2 and blocks("README.md", "diff") and blocks("README.md", "sh")


@pytest.mark.parametrize("source", PYTHON)
def test_python_compiles_and_its_imports_exist(source: str) -> None:
    check_imports(ast.parse(source))


@pytest.mark.parametrize("page", PAGES)
def test_scripts_and_manifests_parse(page: str) -> None:
    """Blocks of shell code are scripts of bash, and YAML blocks are Kubernetes objects."""
    yaml = pytest.importorskip("yaml")
    for script in blocks(page, "sh"):
        done = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True)
        assert done.returncode == 0, done.stderr
    for manifest in blocks(page, "yaml"):
        assert {"apiVersion", "kind", "metadata", "spec"} == yaml.safe_load(manifest).keys()


LINK = re.compile(r"\[[^]]*\]\((?!https?:)([\w./-]+\.md)[^)]*\)")
NUMBER = re.compile(r"(?<![\w.,:])\d+(?:,\d{3})*(?:\.\d+)?(?![\w:]|\.\d)")


def numbers(text: str) -> set[str]:
    """Return the numbers outside of code quotes, as texts without separators of thousands."""
    text = LINK.sub(" ", re.sub(r"`[^`]*`", " ", text))
    return {number.replace(",", "") for number in NUMBER.findall(text)}


@pytest.mark.parametrize("page, start", [("index", "Four hosts"), ("comparison", "- **Measured")])
def test_figures_of_step_times_are_measured(page: str, start: str) -> None:
    files = [*ROOT.glob("docs/data/performance_*.csv"), ROOT / "docs/performance.md"]
    text = "".join(file.read_text() for file in (*files, ROOT / "docs/accuracy.md"))
    known = set(re.findall(r"\d+(?:\.\d+)?", text))
    page_text = (ROOT / f"docs/{page}.md").read_text()
    paragraph = rf"^{re.escape(start)}.*?(?=\n\n|\n- |\n#)"
    found = re.findall(paragraph, page_text, re.DOTALL | re.MULTILINE)
    assert found
    for claim in found:
        assert numbers(claim) <= known, f"{sorted(numbers(claim) - known)}: {claim}"


# ------------------------------------------------- figures of the README and of docs/choosing.md
FIGURE = re.compile(r"(?<![\w.,:])\d+(?:,\d{3})*(?:\.\d+)?(?!\w|[.:]\d)")
WITH_SOURCES = ("README.md", "docs/choosing.md")
with open(ROOT / "tests/figures.csv", newline="") as file:
    FIGURES = list(csv.DictReader(file))
"""The figures of both pages in their order, each with its source: a page or CSV in `docs`,
and there the headings, the first cells and the column of a table, or a sentence (`text`). `A / B`
in place of a row is the quotient of two cells, rounded to `digits` decimals. Settings have none."""


@pytest.mark.parametrize("page", WITH_SOURCES)
def test_every_figure_has_a_row(page: str) -> None:
    text = re.sub(r"^```.*?^```", "", (ROOT / page).read_text(), flags=re.DOTALL | re.MULTILINE)
    for other in (r"`[^`]*`", r"(?<=\])\([^)]*\)", r"^\d+\. "):  # code, links, numbers of lists
        text = re.sub(other, " ", text, flags=re.MULTILINE)
    assert FIGURE.findall(text) == [row["figure"] for row in FIGURES if row["page"] == page]


def test_figures_are_those_of_their_sources() -> None:
    measured = [row for row in FIGURES if row["source"]]
    assert len(measured) > 250 and all(r["section"] for r in FIGURES)
    wrong = [row for row in measured if row["figure"] not in figures_at(**row)]
    assert not wrong, wrong


def figures_at(source: str, section: str, row: str, column: str, digits: str, **_: str) -> set[str]:
    """Return the figures that a source has: the first of a cell, or all of a sentence."""
    page = ROOT / "docs" / source
    if section == "text":
        there = " ".join(row.split()) in " ".join(page.read_text().split())
        return set(FIGURE.findall(row)) if there else set()
    cells = [cell(source, section, name, column) for name in row.split(" / ")]
    found = [re.findall(r"\d+(?:,\d{3})*(?:\.\d+)?", text)[0] for text in cells]
    if not digits:
        return set(found)
    values = [float(number.replace(",", "")) for number in found]
    return {f"{values[0] / (values[1] if values[1:] else 1):.{digits}f}"}


def cell(source: str, section: str, row: str, column: str) -> str:
    """Return the first cell that has these headings, first cells of its row, and this column."""
    headings, first = section.split(" / "), row.split(" ; ")
    for path, table in tables_of(source).items():
        for line in table if list(path[-len(headings) :]) == headings else []:
            if list(line.values())[: len(first)] == first and column in line:
                return line[column]
    raise AssertionError(f"{source} has no cell {section!r}, {row!r}, {column!r}")


@functools.cache
def tables_of(source: str) -> Any:
    return read_tables(ROOT / "docs" / source)


def test_the_readme_claims_no_more_of_gpus_than_their_page() -> None:
    texts = [" ".join((ROOT / page).read_text().split()) for page in ("README.md", "docs/gpu.md")]
    assert len({"this version has not run on one" in text.lower() for text in texts}) == 1


def test_versions() -> None:
    """Ranges and versions of the table of packages are those of setup.cfg and requirements.txt."""
    page = (ROOT / "docs/versions.md").read_text()
    rows = [row.split("|") for row in page.splitlines() if row.startswith("|") and "`" in row]
    declared, tested = ((ROOT / name).read_text() for name in ("setup.cfg", "requirements.txt"))
    assert len(rows) > 10
    for row in rows:
        for requirement in re.findall(r"`([\w-]*[<>=][^`]*)`", row[2]):
            assert requirement in declared.replace(" ", ""), requirement
        for requirement in re.findall(r"`([\w-]+[<>=][^`]*)`", row[3]):
            assert requirement in tested, requirement


def test_the_guide_has_all_extras() -> None:
    declared = configparser.ConfigParser()
    declared.read(ROOT / "setup.cfg")
    section = (ROOT / "docs/guide.md").read_text().partition("\n## Extras\n")[2]
    cells = [row.split("|")[1] for row in section.splitlines() if row.startswith("| `")]
    assert set(re.findall(r"`([\w-]+)`", " ".join(cells))) == {*declared["options.extras_require"]}


def test_papers_are_cited() -> None:
    """The keys of BibTeX entries are unique; methods are on the page or their docstrings cite."""
    page = (ROOT / "docs/citing.md").read_text()
    keys = re.findall(r"^@\w+{(\w+),$", page, re.MULTILINE)
    assert len(keys) == len(set(keys)) > 40
    ours = {"BF16", "Dense", "FP16", "Gathered", "Nesterov", "Topology", "UpdateRule"}
    for catalog in (compressors, averaging, optimizers):
        for name in set(catalog.__all__) - ours:
            kind = getattr(catalog, name)
            text = f"{sys.modules[kind.__module__].__doc__} {kind.__doc__}"
            cited = re.search(rf"`{name}\b", page) or re.search(r"\b(19|20)\d\d\b|\bours\b", text)
            assert cited, name


def test_horovod_and_torchrun_start_with_the_same_script() -> None:
    horovod, torchrun = (
        blocks(f"docs/getting-started/{name}.md", "python")[0] for name in ("horovod", "torchrun")
    )
    assert horovod == torchrun


@pytest.mark.launch
@pytest.mark.parametrize(
    "page, launcher, module", [("torchrun", "torchrun", "torch"), ("keras", "gloo", "tensorflow")]
)
def test_the_first_training_runs(page: str, launcher: str, module: str, tmp_path: Path) -> None:
    """The page's training on two ranks ends with strong compression, and writes a receipt."""
    pytest.importorskip(module)
    need(launcher)
    script = tmp_path / "train.py"
    script.write_text(blocks(f"docs/getting-started/{page}.md", "python")[0])
    done = subprocess.run(
        command_for(launcher, 2, [sys.executable, str(script)]), cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "PowerSGD(rank=1)" in done.stdout.splitlines()[-1], done.stdout
    assert (tmp_path / "runs" / "first" / "receipt.html").exists()


@pytest.mark.parametrize("source", blocks("README.md", "diff"))
def test_added_lines_of_diffs(source: str) -> None:
    added = [line[1:] for line in source.splitlines() if line.startswith("+")]
    assert added
    kept = [line[1:] for line in source.splitlines() if line[:1] in ("+", " ")]
    check_imports(ast.parse("\n".join(kept)))


def check_imports(tree: ast.AST) -> None:
    """Check that every module and name that a tree imports exists."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                found(name.name)
        elif isinstance(node, ast.ImportFrom):
            module = found(node.module or "")
            for name in node.names:
                if not hasattr(module, name.name):
                    found(f"{node.module}.{name.name}")


def found(module: str) -> types.ModuleType:
    top = module.partition(".")[0]
    if top in ("torch", "tensorflow", "keras", "horovod") or module.startswith(
        ("accordion_hvd.torch", "accordion_hvd.tensorflow")
    ):
        framework = "tensorflow" if "keras" in module or "tensorflow" in module else "torch"
        pytest.importorskip(framework)
    if module.startswith(("accordion_hvd.torch", "accordion_hvd.tensorflow")):
        pytest.importorskip("horovod")
    return importlib.import_module(module)


@pytest.mark.parametrize("page", [page for page in PAGES if page != "docs/compressor-accuracy.md"])
def test_words_for_compressions(page: str) -> None:
    """`parse` understands every `word:number` and call of a known compressor in code quotes."""
    text = (ROOT / page).read_text()
    names = "topk|randomk|powersgd|fp16|bf16|dense|twolevel"
    words = re.findall(rf"`((?:{names})(?::[^`]*)?)`", text)
    words += re.findall(
        r"`((?:TopK|RandomK|PowerSGD|FP16|BF16|Dense|TwoLevel|Accordion)\([^`.]*(?:\.\d[^`]*)?\))`",
        text,
    )
    for word in words:
        if word.count("(") == word.count(")"):
            assert isinstance(parse(word), (Compressor, Policy)), word
    assert words or page not in ("README.md", "docs/methods.md")


@pytest.mark.parametrize("name", compressors.__all__)
def test_bytes_in_the_table_of_compressors(name: str) -> None:
    """With two ranks, a rank sends about as many bytes in a step as a class's `summary` says."""
    usual, claim, use = vars(getattr(compressors, name))["summary"]
    method = parse(usual)
    assert isinstance(method, getattr(compressors, name)) and use
    if name in ("LGC", "AdaComp", "Threshold"):  # they begin otherwise, or depend on values
        return
    if formula := re.match(r"[\dn][\dnm .()+/]*", claim):
        product = re.sub(r"(?<=[\w.)]) (?=[\w(])", "*", formula[0].rstrip())
        wanted = eval(product, {"n": 512, "m": 512})
    else:
        assert claim.startswith("as the")
        wanted = sent_by(getattr(method, "codec", None) or method.compressor)
    assert sent_by(method) == pytest.approx(wanted, rel=0.1)


def sent_by(method: Compressor) -> float:
    """Return the bytes of the third step of one of two ranks, for a matrix of 512 by 512."""
    world = simulate(method, 2, local_size=1 + method.topology_aware)
    rng, sent = np.random.default_rng(0), []
    for _ in range(3):
        world.step([{"w": rng.normal(size=(512, 512)).astype(np.float32)} for _ in range(2)])
        sent.append(world.exchanges[0].stats()["sent"])
    return sent[2] - sent[1]


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_files_and_targets_exist() -> None:
    """The files that pages link to or quote exist, and so do the make targets that they name."""
    makefile = (ROOT / "Makefile").read_text()
    for page in PAGES:
        text = (ROOT / page).read_text()
        for target in re.findall(r"\bmake ([a-z]+)`", text):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
        for link in re.findall(r"\]\((?!https?:|#)([^)#]+)", text):
            assert (ROOT / page).parent.joinpath(link).exists(), link
        for path in re.findall(rf"`((?:{FOLDERS})/[\w/.]+)`", text):
            assert (ROOT / path).exists(), path


def test_commands_exist() -> None:
    """Every `accordion-hvd COMMAND` of a page exists, and docs/cli.md has all commands.

    The options of the examples in docs/cli.md exist, too.
    """
    for page in PAGES:
        text = (ROOT / page).read_text()
        for name in re.findall(r"(?:^|`)accordion-hvd ([a-z][a-z-]*)", text, re.MULTILINE):
            assert name in main.commands, (page, name)
    text = (ROOT / "docs/cli.md").read_text()
    for name, command in main.commands.items():
        assert re.search(rf"`(accordion-hvd )?{name}\b", text), name
        options = {word for each in command.params for word in each.opts} | {"--help"}
        named = re.findall(rf"^accordion-hvd {name} (?!.* -- )(.*)", text, re.MULTILINE)
        if command.params:  # its options are its own
            assert {w for line in named for w in line.split() if w[:2] == "--"} <= options, name


@pytest.mark.parametrize("broken, wanted", [("", "check test"), ("check", "check")])
def test_continuous_integration_checks_then_tests(tmp_path: Path, broken: str, wanted: str) -> None:
    """The script runs `make check`, then `make test`, and stops if the first fails.

    The test replaces `make` by a script that records its target and fails at the target `broken`.
    """
    make = f"""#!/bin/sh
echo "$1" >>'{tmp_path}/targets'
test "$1" != '{broken}'
"""
    for name, text in (("make", make), ("g++", "#!/bin/sh\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run([ROOT / ".ci" / "run"], env=environment, timeout=60, check=False)
    assert (tmp_path / "targets").read_text().split() == wanted.split()
    assert (done.returncode != 0) == bool(broken)


# ---------------------------------------------------------------- the examples in CONTRIBUTING.md
def example(number: int = 0) -> Any:
    """Return the class that a block of CONTRIBUTING.md defines."""
    module = sys.modules.setdefault("example", types.ModuleType("example"))
    exec(compile(blocks("CONTRIBUTING.md", "python")[number], "example", "exec"), vars(module))
    return getattr(module, ("RoundRobin", "FadingFeedback", "ErrorBound")[number])


def test_the_law_of_error_feedback(capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(blocks("docs/concepts.md", "python")[0], "concepts", "exec"), {})
    assert float(capsys.readouterr().out) < 1e-4


def test_the_example_of_a_policy() -> None:
    """A window with a small error leads to high compression, and one with a large error to low."""
    world = simulate(example(2)(TopK(0.9), TopK(0.5), bound=0.2, window=2), 2)
    draw = np.random.default_rng(0)
    for _ in range(5):
        world.step([{"w": draw.standard_normal((40, 50)).astype(np.float32)} for _ in "ab"], 0.1)
    for policy in (exchange.policy for exchange in world.exchanges):
        assert [row.level for row in policy.history] == [1, 0]
        assert policy.history[0].norm < 0.2 < policy.history[1].norm


@pytest.mark.parametrize("framework", parameters())
def test_the_example_of_a_wrapper(framework: Framework) -> None:
    """The example multiplies the residual by a factor in each step: e <- fade (e + g - sent)."""
    kind = example(1)
    world, error = Ranks(kind(TopK(0.1), 0.5), 2, framework), np.zeros((2, 24, 50))
    for gradients in normals((24, 50), 2, steps=5):
        total = error + np.array(gradients)
        limit = np.sort(np.abs(total).reshape(2, -1), 1)[:, -120][:, None, None]
        sent = np.where(np.abs(total) >= limit, total, 0)
        error = 0.5 * (total - sent)
        np.testing.assert_allclose(world.step(gradients)[1], sent.mean(0), atol=1e-5)
    with pytest.raises(ValueError, match="FadingFeedback: codec is 3"):
        kind(3)


@pytest.mark.parametrize("framework", ["numpy", "torch", "tensorflow"])
def test_the_example_averages(framework: str) -> None:
    """The sum of all results plus the mean residual at the end is the sum of all mean gradients."""
    make = {
        "numpy": lambda x: x,
        "torch": lambda x: pytest.importorskip("torch").from_numpy(x),
        "tensorflow": lambda x: pytest.importorskip("tensorflow").constant(x),
    }[framework]
    ranks, steps, shape = 3, 25, (41, 29)
    world = simulate(example()(10), ranks)
    draw = np.random.default_rng(0)
    given, got = np.zeros(shape), np.zeros(shape)
    for _ in range(steps):
        gradients = [draw.standard_normal(shape).astype(np.float32) for _ in range(ranks)]
        given += np.mean(gradients, axis=0)
        means = world.step([{"weight": make(g.copy())} for g in gradients])
        assert means[0] is not None
        got += np.asarray(means[0]["weight"])
    carried = [
        np.asarray(e.bucket_states[0].state["error"]).reshape(shape) for e in world.exchanges
    ]
    np.testing.assert_allclose(got + np.mean(carried, axis=0), given, atol=1e-4)
    stats = world.exchanges[0].stats()
    assert stats["ratio"] == pytest.approx(41 * 29 / (41 * 29 // 10), rel=0.02)


def test_the_example_refuses() -> None:
    with pytest.raises(ValueError, match="every is 0, but must be an integer of at least 1"):
        example()(0)
