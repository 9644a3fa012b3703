"""Tests of the documentation site: entries of public names, docstrings, and builds of the site."""

from __future__ import annotations

import ast
import json
import logging
import os
import re
import subprocess
import sys
from html import unescape
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
import yaml

import accordion_hvd
from accordion_hvd import compressors, optimizers

ROOT = Path(__file__).resolve().parent.parent
WITH_ALL = ("ddp", "fsdp", "graph", "optimizers", "privacy", "simulation", "torch.torchft")
CATALOGS = ("averaging", "compressors", "optimizers", "policies")
WITH_ALL += ("torch", "tensorflow", "tensorflow.keras")  # names besides those of Horovod


def names_of(module: str) -> list[str]:
    """Return the strings in a module's list `__all__`, without an import."""
    path = ROOT / "accordion_hvd" / module.replace(".", "/")
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return list(ast.literal_eval(node.value))
    raise AssertionError(f"{module} has no __all__")


def public() -> dict[str, set[str]]:
    """Return the public names, each with the paths under which an entry may document it."""
    names = {f"accordion_hvd.{name}" for name in accordion_hvd.__all__}
    for module in WITH_ALL:
        names |= {f"accordion_hvd.{module}.{name}" for name in names_of(module)}
    # A function may have the name of its module.
    allowed = {name: {name, f"{name}.{name.rpartition('.')[2]}"} for name in names}
    for module in ("privacy", "simulation"):  # some of their names are names of the package, too
        for name in set(names_of(module)) & set(accordion_hvd.__all__):
            allowed[f"accordion_hvd.{name}"].add(f"accordion_hvd.{module}.{name}")
    for module in ("torch", "tensorflow.keras"):  # generated classes: their rules are documented
        for name in (*optimizers.NATIVE, *optimizers.ALIASES):
            path = f"accordion_hvd.{module}.{name}"
            allowed[path] = {path, f"accordion_hvd.optimizers.{name}"}
    return allowed


def entries(folder: Path = ROOT / "docs" / "api") -> set[str]:
    """Return the paths of all entries; that of a catalog shows all of its `__all__`."""
    pages = [page.read_text() for page in folder.glob("*.md")]
    paths = {path for page in pages for path in re.findall(r"^::: (\S+)", page, re.MULTILINE)}
    for catalog in CATALOGS:
        if f"accordion_hvd.{catalog}" in paths:
            home = "accordion_hvd" + ".optimizers" * (catalog == "optimizers")
            paths |= {f"{home}.{name}" for name in names_of(catalog)}
    return paths


def missing(documented: set[str]) -> list[str]:
    return [name for name, paths in public().items() if not paths & documented]


def test_every_public_name_has_an_entry() -> None:
    documented = entries()
    assert missing(documented) == []
    assert len(documented) > 100
    assert missing(documented - {"accordion_hvd.TopK"}) == ["accordion_hvd.TopK"]


def test_docstrings_can_be_parsed_and_entries_have_one(caplog: pytest.LogCaptureFixture) -> None:
    griffe = pytest.importorskip("griffe")
    package = griffe.load("accordion_hvd", search_paths=[str(ROOT)], docstring_parser="google")

    def parse(item: Any) -> int:
        """Parse the docstrings of an object and of its members; return their number."""
        if item.is_alias:
            return 0
        parsed = bool(item.docstring and item.docstring.parse(returns_multiple_items=False))
        return parsed + sum(parse(member) for member in item.members.values())

    with caplog.at_level(logging.WARNING):
        assert parse(package) > 1000
    assert caplog.messages == []
    without = [p for p in entries() if not package[p.removeprefix("accordion_hvd.")].has_docstring]
    assert without == []


# --------------------------------------------------------------------------------------- builds
def build(config: Path, site: Path) -> subprocess.CompletedProcess[str]:
    pytest.importorskip("mkdocs")
    pytest.importorskip("material")
    pytest.importorskip("mkdocstrings")
    words = ["mkdocs", "build", "--strict", "--config-file", str(config), "--site-dir", str(site)]
    return subprocess.run(
        [sys.executable, "-m", *words],
        cwd=config.parent, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = build(ROOT / "mkdocs.yml", folder)
    assert done.returncode == 0, done.stderr
    return folder


ADDRESS = re.compile(r'<(\w+)[^>]*?\s(?:href|src)="([^"]*)"')


@pytest.mark.nightly
def test_links_and_anchors_of_the_site_exist(site: Path) -> None:
    pages = {page: page.read_text() for page in site.rglob("*.html") if page.name != "404.html"}
    anchors = {page: set(re.findall(r'\sid="([^"]*)"', text)) for page, text in pages.items()}
    assert len(pages) > 40
    for page, text in pages.items():
        for _, address in ADDRESS.findall(text):
            if re.match(r"https?:|mailto:|data:", address):
                continue
            path, _, anchor = unquote(unescape(address)).partition("#")
            target = (page.parent / path).resolve() if path else page
            assert target.exists(), (page, address)
            if anchor and target in anchors:
                assert anchor in anchors[target] | {"__skip"}, (page, address)


@pytest.mark.nightly
def test_the_table_of_compressors_has_all(site: Path) -> None:
    text = (site / "methods.html").read_text()
    missing = [x for x in compressors.__all__ if f"#accordion_hvd.compressors.{x}" not in text]
    assert missing == []


@pytest.mark.nightly
def test_the_site_loads_nothing_from_elsewhere(site: Path) -> None:
    """The site loads scripts, styles, fonts and pictures from itself; links may lead elsewhere."""
    for page in site.rglob("*.html"):
        for tag, address in ADDRESS.findall(page.read_text()):
            assert tag == "a" or not re.match(r"(https?:)?//", address), (page, address)
    for style in site.rglob("*.css"):
        assert not re.search(r"(@import|url\()\s*[\"']?(https?:)?//", style.read_text()), style


FOUND = {
    "clip gradients": "recipes.html#clip-gradients",
    "gradient accumulation": "recipes.html#gradient-accumulation",
    "torch.compile": "recipes.html#torchcompile",
    "autocast": "recipes.html#mixed-precision-autocast-and-gradscaler",
    "Hugging Face": "recipes.html#hugging-face-transformers",
    "transformers": "recipes.html#hugging-face-transformers",
    "LoRA": "recipes.html#lora-and-frozen-layers",
    "Ray": "recipes.html#ray-train",
    "FSDP": "engines.html#fsdp2-and-hybrid-sharding",
    "checkpoint": "guide.html#checkpoints",
    "NCCL": "gpu.html",
    "averages nothing": "troubleshooting.html#horovods-optimizer-averages-nothing",
}
"""What people type -> the section that answers it."""


@pytest.mark.nightly
@pytest.mark.parametrize("phrase", FOUND)
def test_the_search_finds(phrase: str, site: Path) -> None:
    """The section is among the first five of a ranking like that of the site's search.

    A word that a title has counts a thousand times one in the text; all words count four times.
    """
    ranked = []
    for section in json.loads((site / "search" / "search_index.json").read_text())["docs"]:
        title, text = (
            re.sub("<[^>]*>", " ", unescape(section[part])).lower() for part in ("title", "text")
        )
        hits = [
            1000 * bool(re.search(rf"\b{word}", title)) + bool(re.search(rf"\b{word}", text))
            for word in map(re.escape, phrase.lower().split())
        ]
        ranked.append((sum(hits) * (4 if all(hits) else 1), section["location"]))
    ranked.sort(key=lambda row: -row[0])
    assert FOUND[phrase] in [place for _, place in ranked[:5]]


@pytest.mark.nightly
def test_llms_txt_lists_the_navigation(site: Path) -> None:
    listed = re.findall(r"^- \[.+\]\((.+)\)$", (site / "llms.txt").read_text(), re.MULTILINE)
    _, nav = (ROOT / "mkdocs.yml").read_text().split("\nnav:\n")
    assert listed == [f"{name}.html" for name in re.findall(r"([\w/-]+)\.md$", nav, re.MULTILINE)]
    assert all((site / page).is_file() for page in listed)


GOOD = """# Home

[here](#home), [policy](../CONTRIBUTING.md), `code`, [source](../code.py), [`code.py`](../code.py)
"""
FAULTS = {
    "nothing": ("", ""),
    "a broken link": ("[gone](gone.md)", ""),
    "a broken link to a source file": ("[gone](../gone.py)", ""),
    "a broken anchor": ("[gone](#gone)", ""),
    "an unknown name": ("::: code.gone", ""),
    "an unknown argument in a docstring": ("", "    gone: not an argument."),
}


@pytest.mark.nightly
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_make_a_build_fail(fault: str, tmp_path: Path) -> None:
    """Each fault makes the build fail and is reported; without a fault, the links are right.

    The site is small, and has the settings of mkdocs.yml.
    """
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    for key in ("nav", "extra_css", "watch"):
        del config[key]
    config["hooks"] = [str(ROOT / hook) for hook in config["hooks"]]
    (tmp_path / "mkdocs.yml").write_text(yaml.safe_dump(config))
    page, docstring = FAULTS[fault]
    (tmp_path / "docs" / "api").mkdir(parents=True)
    (tmp_path / "docs" / "index.md").write_text(GOOD + page)
    (tmp_path / "docs" / "api" / "code.md").write_text("# Code\n\n::: code.code\n")
    (tmp_path / "code.py").write_text(
        f'def code(x: int) -> None:\n    """See docs/index.md.\n\n    Args:\n        x: a number.\n'
        f'    {docstring}\n    """\n'
    )
    for name in ("CHANGELOG", "CONTRIBUTING", "SECURITY"):
        text = "# A document\n\n[home](docs/index.md#home), [read me](README.md), [c](code.py)\n"
        (tmp_path / f"{name}.md").write_text(text)
    (tmp_path / "README.md").touch()
    done = build(tmp_path / "mkdocs.yml", tmp_path / "site")
    assert (done.returncode != 0) == (fault != "nothing"), done.stderr
    if fault == "nothing":
        home, document, code = (
            (tmp_path / "site" / f"{name}.html").read_text()
            for name in ("index", "SECURITY", "api/code")
        )
        assert 'href="CONTRIBUTING.html">policy<' in home and "source (<code>code.py" in home
        assert 'href="index.html#home">home<' in document
        assert 'href="index.html">read me<' in document and "c (<code>code.py" in document
        assert '<a href="../index.html">index.md</a>' in code
    else:
        assert "gone" in done.stderr
