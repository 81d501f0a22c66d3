"""The syntax tree of a function, found without running anything."""

from __future__ import annotations

import ast
import inspect
import linecache
import tokenize
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any


def codes_of(code: CodeType) -> Iterator[CodeType]:
    """Yield a code object and those within it, without those that compute annotations."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType) and constant.co_name != "__annotate__":
            yield from codes_of(constant)


def source_of(function: FunctionType) -> ast.FunctionDef | ast.expr | None:
    """Return the syntax tree of a function, or of a lambda's expression, or None if the source is not there.

    The tree's second line is the function's first one. A tree that lacks a name of the code is that of another
    version of the file, and counts as not there.
    """
    code = function.__code__
    lines = linecache.getlines(code.co_filename, function.__globals__)[code.co_firstlineno - 1 :]
    if not lines:
        return None
    tree = _of_lambda(code, lines) if code.co_name == "<lambda>" else _of_function(code, lines)
    if tree is None:
        return None
    found = {part for node in ast.walk(tree) for part in _names(node)}
    names = {name for each in codes_of(code) for name in (*each.co_names, *each.co_freevars)}
    plain = {name.rpartition(".")[2] for name in names if not name.startswith("_")}
    return tree if plain <= found else None


def _names(node: ast.AST) -> Iterator[str]:
    for _, value in ast.iter_fields(node):
        if isinstance(value, str):
            yield from value.split(".")


def _of_function(code: CodeType, lines: list[str]) -> ast.FunctionDef | None:
    within = lines[0][:1].isspace()
    ends = filter(None, (p[1] for each in codes_of(code) for p in each.co_positions()))
    size = max(ends, default=0) - code.co_firstlineno + 1
    for block in (lines[:size], lines):
        try:
            # Code that a comment, or a statement that does nothing, ends is longer than its instructions tell.
            text = inspect.getblock(block) if block is lines else block
            (node,) = ast.parse("".join(["if 1:\n" if within else "\n", *text])).body
        except (SyntaxError, ValueError, tokenize.TokenError):  # a file that has changed
            continue
        node = node.body[0] if isinstance(node, ast.If) else node
        if isinstance(node, ast.FunctionDef) and node.name == code.co_name:
            return node
    return None


def _of_lambda(code: CodeType, lines: list[str]) -> ast.expr | None:
    spans: list[Any] = [s for s in code.co_positions() if None not in s and s[::2] != s[1::2]]
    if not spans:
        return None
    # The instruction that returns has the place of the whole expression.
    begin, end, left, right = max(spans, key=lambda s: (s[1] - s[0], s[3] - s[2]))
    before = begin - code.co_firstlineno
    text = [line.encode() for line in lines[before : end - code.co_firstlineno + 1]]
    text[-1] = text[-1][:right]
    text[0] = text[0][left:]
    try:
        return ast.parse(b"".join([b"\n" * (before + 1), b"(", *text, b")"]), mode="eval").body
    except SyntaxError:
        return None
