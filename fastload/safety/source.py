"""The syntax tree of a function, and what its names stand for, found without running anything."""

from __future__ import annotations

import ast
import builtins
import linecache
import sys
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


def source_of(function: FunctionType) -> ast.FunctionDef | None:
    """Return the syntax tree of a function, or None if the source is not there. Those of lambdas are not looked for.

    The tree's second line is the function's first one. A tree that lacks a name of the code is that of another
    version of the file, and counts as not there. So does one that ends with `...`.
    """
    code = function.__code__
    lines = linecache.getlines(code.co_filename, function.__globals__)[code.co_firstlineno - 1 :]
    ends = filter(None, (p[1] for each in codes_of(code) for p in each.co_positions()))
    block = lines[: max(ends, default=0) - code.co_firstlineno + 1]
    within = bool(block) and block[0][:1].isspace()
    try:
        (tree,) = ast.parse("".join(["if 1:\n" if within else "\n", *block])).body
    except (SyntaxError, ValueError):  # there is none, or it has changed
        return None
    tree = tree.body[0] if isinstance(tree, ast.If) else tree
    if not isinstance(tree, ast.FunctionDef) or tree.name != code.co_name:
        return None
    found = {part for node in ast.walk(tree) for part in _names(node)}
    names = {name for each in codes_of(code) for name in (*each.co_names, *each.co_freevars)}
    plain = {name.rpartition(".")[2] for name in names if not name.startswith("_")}
    return tree if plain <= found else None


def _names(node: ast.AST) -> Iterator[str]:
    for _, value in ast.iter_fields(node):
        if isinstance(value, str):
            yield from value.split(".")


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
