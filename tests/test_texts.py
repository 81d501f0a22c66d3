"""Promise: The README, pages, help texts, errors, warnings and log messages are plain English, in short sentences."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import product
from pathlib import Path

from tests.commands import COMMANDS
from tests.plain_words import hard_words

ROOT = Path(__file__).parent.parent
WORDS = 25
"""The longest sentence. Quoted code and values, paths and placeholders count as one word each."""


def rendered(node: ast.AST) -> Iterator[str]:
    """Yield each text that an expression can make, with `{}` for what is known only when it runs."""
    match node:
        case ast.Constant(str(text)):
            yield text
        case ast.JoinedStr(values):
            yield from map("".join, product(*map(list, map(rendered, values))))
        case ast.BinOp(left, ast.Add(), right):
            yield from map("".join, product(list(rendered(left)), list(rendered(right))))
        case ast.IfExp(_, one, other):
            yield from (*rendered(one), *rendered(other))
        case ast.FormattedValue(ast.IfExp() as inner):
            yield from rendered(inner)
        case _:
            yield "{}"


def templates(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the place and the text of each template of a module: errors, warnings, logs, what it prints, and parts.

    All texts of three words or more are such, except docstrings, markup and lists of names. So no helper that builds
    a message is missed.
    """
    nodes = list(ast.walk(ast.parse(path.read_text())))
    joined = (ast.JoinedStr, ast.BinOp, ast.IfExp)
    parts = {
        id(part)
        for node in nodes
        if isinstance(node, joined)
        for part in ast.iter_child_nodes(node)
    }
    code = {id(node.value) for node in nodes if isinstance(node, ast.Expr | ast.Attribute)}
    for node in nodes:
        if (
            isinstance(node, ast.Constant | ast.JoinedStr | ast.BinOp | ast.IfExp)
            and id(node) not in parts | code
        ):
            for text in rendered(node):
                if len(text.split()) > 2 and not text.lstrip().startswith("<"):
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", text


def helps() -> Iterator[tuple[str, str]]:
    """Yield the place and the text of each help of a command."""
    for name, context in COMMANDS.items():
        yield f"{name} --help", str(context.command.help)
        for option in context.command.get_params(context):
            yield f"{name} {option.opts[-1]}", getattr(option, "help", None) or ""


def texts() -> dict[str, list[tuple[str, str]]]:
    """Return places and texts of each part of the project, by its name."""
    pages = [path for folder in (".", "docs") for path in (ROOT / folder).glob("*.md")]
    found = {
        "README": [("README.md", (ROOT / "README.md").read_text())],
        "pages": [
            (path.name, path.read_text())
            for path in sorted(pages)
            if path.name != "README.md" or path.parent != ROOT
        ],
        "help": list(helps()),
    }
    for path in sorted((ROOT / "fastload").rglob("*.py")):
        folder = path.relative_to(ROOT / "fastload").parts[:-1]
        found.setdefault(folder[0] if folder else "core", []).extend(templates(path))
    return found


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a text. An item of a list, a heading and a cell of a table are sentences too."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    text = re.sub(r"[\b]\n.*?(\n\n|\Z)", "\n\n", text, flags=re.S)
    text = re.sub(r"^(    |\t).*$", "\n", text, flags=re.M)
    text = re.sub(r"``?[^`]+``?|\"[^\"\n]*\"|(?<!\w)'[^'\n]*'(?!\w)", "quoted", text)
    text = re.sub(r"!?\[([^]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"\n\s*([-*]|\d+\.) |\|", "\n\n", text)
    yield from re.split(r"(?<=[.!?])[)*]*\s+|\n\s*\n|\n#+ ", text)


def faults(text: str, place: str = "") -> Iterator[str]:
    """Yield what is wrong with a text, and what to write instead. The changelog keeps the words of its time."""
    private = place != "CHANGELOG.md"
    for sentence in sentences(text):
        words = [word for word in sentence.split() if re.search(r"\w|\{\}", word)]
        if len(words) > WORDS:
            yield f"{len(words)} words, at most {WORDS}, divide it: {' '.join(words)}"
        for hard, instead in hard_words(sentence, private=private):
            yield f'"{hard}": write {instead}: {" ".join(words)}'


TEXTS = texts()


def test_the_texts_are_plain() -> None:
    texts = [text for part in TEXTS.values() for text in part]
    wrong = [f"{place}: {fault}" for place, text in texts for fault in faults(text, place)]
    if (lines := TEXTS["README"][0][1].count("\n")) > 130:
        wrong.append(f"README.md has {lines} lines, at most 130: move text to docs/")
    assert not wrong, f"{len(wrong)} texts to mend:\n" + "\n".join(wrong)


def test_all_texts_are_found() -> None:
    assert sum(map(len, TEXTS.values())) > 1_500
    assert len(TEXTS["help"]) > 180


def test_a_bad_text_is_found() -> None:
    bad = ["word " * 26, "Nobody reads it.", "a {} behind it", "a data set"]
    assert all(list(faults(text)) for text in bad)


def test_code_and_items_are_no_long_sentences() -> None:
    assert not list(faults('Give `a b c` or "d e":\n\n- ' + "word " * 20 + "\n- " + "word " * 20))
