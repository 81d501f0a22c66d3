"""What a function names, and which objects it changes, read from its source. Nothing runs."""

from __future__ import annotations

import ast
import dis
import inspect
import linecache
import textwrap
import tokenize
import weakref
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
    if code not in _known:
        _known[code] = _read(function, first)
    return _known[code]


def _read(function: FunctionType, first: str | None) -> Effects:
    code = function.__code__
    node = _source_of(code, function.__globals__)
    if node is None:
        return _without_source(code)
    reader = Reader(code)
    arguments = list(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])
    for name in arguments:
        reader.env[name] = Value(frozenset({ANY, ("default", name)}), frozenset({ANY}))
    variadic = bool(code.co_flags & inspect.CO_VARARGS) + bool(
        code.co_flags & inspect.CO_VARKEYWORDS
    )
    for name in code.co_varnames[len(arguments) : len(arguments) + variadic]:
        reader.env[name] = Value(inner=frozenset({ANY}))
    if first is not None and arguments:
        path: Path = ("self",) if first == "self" else ("self", CLASS)
        reader.env[arguments[0]] = Value(frozenset({path}))
        if code.co_name in ("__get__", "__set__"):  # a descriptor: the instance is as new
            reader.env[arguments[1]] = Value()
    if isinstance(node, ast.expr):
        reader.escape(reader.value(node))
    else:
        for _ in range(2 if code.co_cellvars else 1):  # a function within may use a later variable
            reader.block(node.body)
    return reader.effects


def _without_source(code: CodeType) -> Effects:
    effects = Effects()
    fills = code.co_name in ("__init__", "__post_init__")  # a data class: its own new instance
    for each in codes_of(code):
        done = set(each.co_code[::2])
        effects.opaque |= bool(done & ({*_STORES} - ({_STORE_ATTR} if fills else set())))
        effects.opaque |= not fills and not CHANGING.isdisjoint(each.co_names)
        effects.names |= set(each.co_names)
        effects.uses.update((("global", name), each.co_firstlineno) for name in each.co_names)
    return effects


_STORE_ATTR = dis.opmap["STORE_ATTR"]
_STORES = (
    _STORE_ATTR,
    *(dis.opmap[name] for name in ("STORE_SUBSCR", "STORE_GLOBAL", "IMPORT_NAME")),
)


def _source_of(code: CodeType, space: dict[str, Any]) -> Any:
    """Return the syntax tree of a function, or of a lambda's expression, or None if the source is not there."""
    lines = linecache.getlines(code.co_filename, space)
    if not lines:
        return None
    if code.co_name == "<lambda>":
        return _lambda_source(code, lines)
    spans = [end for each in codes_of(code) for _, end, *_ in each.co_positions() if end]
    first, last = code.co_firstlineno - 1, max(spans, default=code.co_firstlineno)
    for text in (lines[first:last], None):
        try:
            block = inspect.getblock(lines[first:]) if text is None else text
            (node,) = ast.parse("\n" * first + textwrap.dedent("".join(block))).body
        except (SyntaxError, ValueError, tokenize.TokenError):  # a file that has changed
            continue
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == code.co_name:
            return node
    return None


def _lambda_source(code: CodeType, lines: list[str]) -> ast.expr | None:
    spans = [span for span in code.co_positions() if None not in span and span[0] != span[2]]
    if not spans:
        return None
    # The instruction that returns has the place of the whole expression.
    begin, end, left, right = max(spans, key=lambda s: (s[1] - s[0], s[3] - s[2]))  # type: ignore[operator]
    text = [line.encode() for line in lines[begin - 1 : end]]  # type: ignore[operator]
    text[-1] = text[-1][:right]
    text[0] = text[0][left:]
    try:
        source = b"\n" * (begin - 1) + b"(" + b"".join(text) + b")"  # type: ignore[operator]
        body: ast.expr = ast.parse(source, mode="eval").body
        return body
    except SyntaxError:
        return None
