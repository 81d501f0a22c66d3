"""The README and the pages of docs/, as their tests read them: code by its fences, command lines, code in the text."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted(DOCS.rglob("*.md")),
    ROOT / "benchmarks" / "README.md",
]

FENCE = re.compile(r"^```([^\n`]*)\n(.*?)^```$", re.M | re.S)
SPAN = re.compile(r"`((?:[^`\n]|\n(?!\n))+)`")
OPERATORS = set("();<>|&")


@dataclass(frozen=True)
class Block:
    """A piece of code on a page."""

    page: Path
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def fenced(page: Path, fence: str) -> list[Block]:
    """Return the blocks of a page that begin with "```FENCE"."""
    text = page.read_text()
    return [
        Block(page, text.count("\n", 0, block.start()) + 2, block[2])
        for block in FENCE.finditer(text)
        if block[1].strip() == fence
    ]


def command_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield the lines that are indented by four spaces, outside of fences, and their numbers. `\\` continues a line."""
    lines = FENCE.sub(lambda block: "\n" * block[0].count("\n"), text).splitlines()
    joined = ""
    for number, line in enumerate(lines, 1):
        if line.startswith("    "):
            joined += line[4:]
            if joined.endswith("\\"):
                joined = joined[:-1]
                continue
            yield number, joined
        joined = ""


def spans(text: str) -> Iterator[tuple[int, str]]:
    """Yield the code inside of the text, and the numbers of its lines."""
    text = FENCE.sub(lambda block: "\n" * block[0].count("\n"), text)
    text = re.sub(r"^ {4}.*$", "", text, flags=re.M)
    for span in SPAN.finditer(text):
        yield text.count("\n", 0, span.start()) + 1, " ".join(span[1].split())


def commands(line: str) -> Iterator[list[str]]:
    """Yield the words of each command of a shell's line: what pipes, `;`, `&&` and redirections part."""
    shell = shlex.shlex(line, posix=True, punctuation_chars=True)
    shell.whitespace_split = True
    words: list[str] = []
    redirected = False
    for word in shell:
        if set(word) <= OPERATORS:
            redirected = bool(set(word) & set("<>"))
            if not redirected:
                yield words
                words = []
        elif redirected:
            redirected = False
        else:
            words.append(word)
    yield words
