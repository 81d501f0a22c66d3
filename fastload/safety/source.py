"""The syntax tree of a function, and what its names stand for, found without running anything."""

from __future__ import annotations

import ast
import builtins
import inspect
import linecache
import sys
import tokenize
from collections.abc import Iterator
from contextlib import suppress
from types import CodeType, FunctionType, MemberDescriptorType, ModuleType
from typing import Any

import torch

from fastload.safety.objects import own_dict


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


# ---- names ----

Path = tuple[str, ...]
"""("global", name), ("free", name) of a closure, or ("self",), and names of attributes after it."""

MISSING = object()
"""What a name stands for that only running code would tell."""


def named(function: FunctionType, path: Path) -> Any:
    """Return what a path of a function leads to, or MISSING."""
    head, *names = path or ("",)
    value: Any = MISSING
    if head == "global":
        value = function.__globals__.get(names[0], getattr(builtins, names[0], MISSING))
    elif head == "free":
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=False))
        with suppress(KeyError, ValueError):  # not bound yet
            value = cells[names[0]].cell_contents
    for name in names[1:]:
        if value is MISSING:
            break
        value = attribute(value, name)
    return value


def attribute(x: Any, name: str) -> Any:
    """Return an attribute as it is held, or MISSING."""
    if type(x) is ModuleType:
        return vars(x).get(name, sys.modules.get(f"{x.__name__}.{name}", MISSING))
    if isinstance(x, type):
        kinds = *x.__mro__, *type.mro(type(x))[:-2]  # its metaclass has methods of it, too
        return next((vars(k)[name] for k in kinds if name in vars(k)), MISSING)
    for held in held_by(x):
        if name in held:
            return held[name]
    member = next((vars(k)[name] for k in type(x).__mro__ if name in vars(k)), MISSING)
    return getattr(x, name, MISSING) if type(member) is MemberDescriptorType else member


def held_by(x: Any) -> list[dict[str, Any]]:
    """Return the dicts with what an instance holds by name: its attributes, and the parts of a module of torch."""
    kinds = ("_parameters", "_buffers", "_modules") if issubclass(type(x), torch.nn.Module) else ()
    own = own_dict(x)
    return [own, *(own.get(kind, {}) for kind in kinds)]
