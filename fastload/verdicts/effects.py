"""What a function names, and which objects it changes, read from its source. Nothing runs."""

from __future__ import annotations

import ast
import dis
import inspect
import linecache
import tokenize
import weakref
from inspect import CO_VARARGS, CO_VARKEYWORDS
from types import CodeType, FunctionType
from typing import Any

from fastload.verdicts.reader import Reader, codes_of
from fastload.verdicts.values import ANY, CHANGING, CLASS, Effects, Path, Value

_known: weakref.WeakKeyDictionary[CodeType, Effects] = weakref.WeakKeyDictionary()


def effects_of(function: FunctionType, first: str | None) -> Effects:
    """Return what a function does. `first` says what its first argument is: "self", CLASS, or None for any object.

    Results are kept by code object: a method has one kind of first argument.
    """
    code = function.__code__
    found = _known.get(code)  # once: the key is an equal code, which may end at any time
    if found is None:
        found = _known[code] = _read(function, first)
    return found


def _read(function: FunctionType, first: str | None) -> Effects:
    code = function.__code__
    node = _source_of(code, function.__globals__)
    if node is None:
        return _without_source(code)
    reader = Reader(code)
    names, defaults = code.co_varnames, defaults_of(function)
    count = code.co_argcount + code.co_kwonlyargcount
    for name in names[:count]:
        own = {ANY, ("default", name)} if name in defaults else {ANY}
        reader.env[name] = Value(frozenset(own), frozenset({ANY}))
    variadic = bool(code.co_flags & CO_VARARGS) + bool(code.co_flags & CO_VARKEYWORDS)
    for name in names[count : count + variadic]:
        reader.env[name] = Value(inner=frozenset({ANY}))
    if first is not None and count:
        path: Path = ("self",) if first == "self" else ("self", CLASS)
        reader.env[names[0]] = Value(frozenset({path}))
        if code.co_name in ("__get__", "__set__"):  # a descriptor: the instance is as new
            reader.env[names[1]] = Value()
    if isinstance(node, ast.expr):
        reader.escape(reader.value(node))
    else:
        for _ in range(2 if code.co_cellvars else 1):  # a function within may use a later variable
            reader.block(node.body)
    return reader.effects


def defaults_of(function: FunctionType) -> dict[str, Any]:
    """Return the defaults of a function's arguments."""
    positional = function.__code__.co_varnames[: function.__code__.co_argcount]
    # From the last: a decorator may have assigned more defaults than there are arguments.
    of_last = zip(reversed(positional), reversed(function.__defaults__ or ()), strict=False)
    return {**dict(of_last), **(function.__kwdefaults__ or {})}


def _without_source(code: CodeType) -> Effects:
    effects = Effects()
    for each in codes_of(code):
        effects.opaque |= not _STORES.isdisjoint(each.co_code[::2])
        effects.opaque |= not CHANGING.isdisjoint(each.co_names)
        effects.names |= set(each.co_names)
        effects.uses.update((("global", name), each.co_firstlineno) for name in each.co_names)
    return effects


_STORES = {
    dis.opmap.get(name)
    for name in ("STORE_ATTR", "STORE_SUBSCR", "STORE_SLICE", "STORE_GLOBAL", "IMPORT_NAME")
}


def _source_of(code: CodeType, space: dict[str, Any]) -> Any:
    """Return the syntax tree of a function, or of a lambda's expression, or None if the source is not there.

    Its second line is the function's first one.
    """
    lines = linecache.getlines(code.co_filename, space)[code.co_firstlineno - 1 :]
    if not lines:
        return None
    if code.co_name == "<lambda>":
        return _lambda_source(code, lines)
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
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == code.co_name:
            return node
    return None


def _lambda_source(code: CodeType, lines: list[str]) -> ast.expr | None:
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
