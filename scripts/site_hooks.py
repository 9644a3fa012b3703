"""Hooks of MkDocs (mkdocs.yml): the top-level documents become pages, and links fit the site.

In the repository, a page of docs links to `../CONTRIBUTING.md` and to source files, and a top-level
document links to `docs/guide.md`. The site has the pages of docs and the top-level documents side
by side, llms.txt, which lists them for programs, and no source files. A link to a source file leads
to the repository if mkdocs.yml has a `repo_url`; otherwise only its text remains. The table of
compressors in docs/methods.md is made from the package.
"""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from accordion_hvd import compressors  # noqa: E402

DOCUMENTS = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")  # pages of the site
INSTEAD = {"README.md": "index.md"}
_LINK = re.compile(r"(?<!!)\[(?P<text>[^\[\]]+)\]\((?P<target>[^\s()#:]+)(?P<anchor>#[^\s()]*)?\)")
_NAMED = re.compile(r"(?<![\w/])docs/(?P<page>[\w/-]+\.md)\b")


def on_files(files: Files, config: Any) -> Files:
    """Add the top-level documents to the pages."""
    for name in DOCUMENTS:
        files.append(File.generated(config, name, abs_src_path=str(_root(config) / name)))
    return files


def on_nav(nav: Any, config: Any, files: Files) -> Any:
    """Add llms.txt, a list of the pages in the order of the navigation."""
    lines = [f"# {config.site_name}", "", f"> {config.site_description}"]
    for section in nav.items:
        pages = section.children or [section]
        lines += ["", f"## {section.title}", ""]
        lines += [f"- [{page.title or section.title}]({page.url})" for page in pages]
    files.append(File.generated(config, "llms.txt", content="\n".join(lines) + "\n"))
    return nav


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Change links to files outside of docs, and links of the top-level documents."""
    here = page.file.src_uri

    def changed(link: re.Match[str]) -> str:
        """Return the link for the site; a broken link remains, so that the build fails."""
        path = repository_path(here, link["target"])
        if path.startswith("..") or not (_root(config) / path).exists():
            return link[0]
        other = site_path(path)
        if other is not None:
            target = posixpath.relpath(other, posixpath.dirname(here) or ".")
            return f"[{link['text']}]({target}{link['anchor'] or ''})"
        if config.repo_url:
            return f"[{link['text']}]({config.repo_url.rstrip('/')}/blob/HEAD/{path})"
        return link["text"] if "`" in link["text"] else f"{link['text']} (`{path}`)"

    return _LINK.sub(changed, markdown.replace("<!-- the table of compressors -->", methods()))


def methods() -> str:
    """Return a table with a row for each compressor, of its docstring and its `summary`."""
    rows = ["| compressor | what it does | bytes per step | when to use it |", "|---|---|---|---|"]
    for name in sorted(compressors.__all__, key=str.lower):
        kind = getattr(compressors, name)
        usual, sent, use = kind.summary
        link = f"[`{usual}`](api/compressors.md#accordion_hvd.compressors.{name})"
        rows.append(f"| {link} | {kind.__doc__.partition(chr(10))[0]} | {sent} | {use} |")
    return "\n".join(rows)


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    """Link the pages that docstrings name, such as docs/guide.md."""

    def linked(name: re.Match[str]) -> str:
        file = files.get_file_from_path(name["page"])
        if file is None:
            return name[0]
        return f'<a href="{file.url_relative_to(page.file)}">{name["page"]}</a>'

    return _NAMED.sub(linked, html) if page.file.src_uri.startswith("api/") else html


def repository_path(page: str, target: str) -> str:
    """Return the path from the top of the repository to which a link on a page leads."""
    folder = "" if page in DOCUMENTS else posixpath.dirname(f"docs/{page}")
    return posixpath.normpath(posixpath.join(folder, target))


def site_path(path: str) -> str | None:
    """Return the path in the site of a file of the repository; None if the site lacks it."""
    if path in DOCUMENTS:
        return path
    return path.removeprefix("docs/") if path.startswith("docs/") else INSTEAD.get(path)


def _root(config: Any) -> Path:
    return Path(config.config_file_path).parent
