"""Hooks of mkdocs.yml: files of the repository become pages of the site or lie in it, and commands print their help.

The pages of docs/ are read in the repository, too. So they link to other files as they lie there, `../examples/a.py`,
and mark code that no test runs in the fence, "python no-run" or "python signature". The site has neither.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from fastload.cli import main

ROOT = Path(__file__).resolve().parent.parent
PAGES = {
    "CHANGELOG.md": "changelog.md",
    "CODE_OF_CONDUCT.md": "conduct.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "benchmarks/README.md": "benchmarks.md",
}
"""Files beside docs/ that are pages of the site, under these names."""
COMMANDS = "<!-- commands -->"
WIDTH = 80
LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")
CODE = re.compile(
    r"^( {0,3}```.*?^ {0,3}```|(?: {4}[^\n]*\n)+)|`(?:[^`\n]|\n(?!\n))+`", re.M | re.S
)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages and the files that lie beside docs/ and that pages link to."""
    for source, name in PAGES.items():
        files.append(File.generated(config, name, content=(ROOT / source).read_text()))
    for page in list(files.documentation_pages()):
        for target in _links(page.content_string):
            path = _in_repository(target, page)
            if path and path.exists() and not _page_of(path):
                name = _copied(path)
                if name not in files.src_uris:
                    files.append(_file(path, name, config))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, **_: Any) -> str:
    """Rewrite the links that leave docs/ and the fences, and put in the commands."""

    def rewritten(link: re.Match[str]) -> str:
        path = _in_repository(link[2], page.file)
        if path is None or not path.exists():
            return link[0]  # MkDocs warns of it
        target = _page_of(path) or _copied(path)
        return link[1] + os.path.relpath(target, os.path.dirname(page.file.src_uri)) + link[3]

    markdown = "".join(
        text if is_code else LINK.sub(rewritten, text) for text, is_code in _parts(markdown)
    )
    markdown = re.sub(r"^( *```python) (?:no-run|other|signature)$", r"\1", markdown, flags=re.M)
    return markdown.replace(COMMANDS, "\n".join(_helps(main, "fastload")))


def _parts(markdown: str) -> Iterator[tuple[str, bool]]:
    """Yield the text in pieces, and whether each is code."""
    end = 0
    for code in CODE.finditer(markdown):
        yield markdown[end : code.start()], False
        yield code[0], True
        end = code.end()
    yield markdown[end:], False


def _links(markdown: str) -> list[str]:
    return [
        link[2] for text, is_code in _parts(markdown) if not is_code for link in LINK.finditer(text)
    ]


def _in_repository(target: str, page: File) -> Path | None:
    """Return where a link of a page leads in the repository. None: it leads elsewhere, or to what docs/ has."""
    if urlsplit(target).scheme or target.startswith("/"):
        return None
    origins = {name: ROOT / source for source, name in PAGES.items()}
    origin = origins.get(page.src_uri, ROOT / "docs" / page.src_uri)
    path = Path(os.path.normpath(origin.parent / target))
    inside_docs = origin.is_relative_to(ROOT / "docs") and path.is_relative_to(ROOT / "docs")
    return path if path.is_relative_to(ROOT) and not inside_docs else None


def _page_of(path: Path) -> str | None:
    """Return the page that a file of the repository is, if it is one."""
    name = path.relative_to(ROOT).as_posix()
    if name == "README.md":
        return "index.md"
    return PAGES.get(name) or (name.removeprefix("docs/") if name.startswith("docs/") else None)


def _copied(path: Path) -> str:
    """Return where the site has a file of the repository, or the list of a folder."""
    name = f"repository/{path.relative_to(ROOT).as_posix()}"
    return f"{name}/files.txt" if path.is_dir() else name


def _file(path: Path, name: str, config: MkDocsConfig) -> File:
    if not path.is_dir():
        return File.generated(config, name, abs_src_path=str(path))
    names = sorted(str(found.relative_to(path)) for found in path.rglob("*") if found.is_file())
    return File.generated(config, name, content="\n".join(names))


def _helps(command: click.Command, name: str) -> Iterator[str]:
    """Yield a section for a command and one for each of its commands: what `--help` prints."""
    settings = {"help_option_names": ["-h", "--help"], "max_content_width": WIDTH}
    context = click.Context(command, info_name=name, terminal_width=WIDTH, **settings)
    yield f"## {name}\n\n```text\n{command.get_help(context)}\n```\n"
    if isinstance(command, click.Group):
        for key in command.list_commands(context):
            inner = command.commands[key]
            if not inner.hidden:
                yield from _helps(inner, f"{name} {key}")
