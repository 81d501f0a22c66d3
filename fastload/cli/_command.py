"""Commands from functions that take dataclasses: each field is an option, and its docstring is the help."""

from __future__ import annotations

import ast
import inspect
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, Field, fields
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import click

from fastload._kit.options import Option


class Command(click.Command):
    """A command that calls a function with dataclasses, whose fields are its options. Its help is the docstring.

    The options are made when they are needed, so that the list of all commands does not wait for them.
    """

    def __init__(self, function: Callable[..., None]) -> None:
        name = function.__name__.strip("_")
        super().__init__(name, callback=self._call, help=function.__doc__)
        self.function = function

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return the options and arguments."""
        if not self.params:
            self.params = [one for kind in self._kinds() for one in parameters_of(kind)]
        return super().get_params(ctx)

    def _kinds(self) -> list[Any]:
        hints = get_type_hints(self.function)
        return [hints[name] for name in hints if name != "return"]

    def _call(self, **values: Any) -> None:
        made = [kind(**{f.name: values[f.name] for f in fields(kind)}) for kind in self._kinds()]
        self.function(*made)


def parameters_of(kind: Any) -> Iterator[click.Parameter]:
    """Yield an option or an argument for each field of a dataclass."""
    hints, bases = get_type_hints(kind, include_extras=True), kind.__mro__[:-1]
    for field in fields(kind):
        texts = (_helps(base.__module__).get((base.__name__, field.name)) for base in bases)
        yield _parameter(field, hints[field.name], next(filter(None, texts), ""))


@cache
def _helps(module: str) -> dict[tuple[str, str], str]:
    """Return the docstrings of fields in a module, by class and field. Python itself does not keep them."""
    return {
        (of.name, field.target.id): " ".join(str(doc.value.value).split())
        for of in ast.parse(inspect.getsource(sys.modules[module])).body
        if isinstance(of, ast.ClassDef)
        for field, doc in pairwise(of.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(doc, ast.Expr) and isinstance(doc.value, ast.Constant)
    }


def _parameter(field: Field[Any], hint: Any, text: str) -> click.Parameter:
    kind, marks = _unwrapped(hint)
    words = next((mark.names for mark in reversed(marks) if mark.names), "").split()
    names = [word for word in words if word.startswith("-")]
    several = get_origin(kind) is Sequence
    given: dict[str, Any] = {"type": _type(kind, marks), "required": field.default is MISSING}
    given["metavar"] = next((word for word in words if word not in names), None)
    if words and not names:
        return click.Argument([field.name], nargs=-1 if several else 1, **given)
    if field.default is not MISSING:
        listed = get_origin(kind) is tuple
        given["default"] = ",".join(map(str, field.default)) if listed else field.default
    if not names:
        dashed = field.name.replace("_", "-")
        off = f"/--no-{dashed}" if kind is bool and field.default is not False else ""
        names = [f"--{dashed}{off}"]
    return click.Option(
        [*names, field.name],
        help=text.replace(" [default", "  [default"),
        is_flag=kind is bool,
        multiple=several,
        show_default=False if given.get("default") == "" else None,
        **given,
    )


def _unwrapped(hint: Any) -> tuple[Any, list[Option]]:
    """Return a type without None and `Annotated`, and what the latter has. Of several, the last one counts."""
    marks: list[Option] = []
    while get_origin(hint) is Annotated or NoneType in get_args(hint):
        first, *rest = get_args(hint)
        if get_origin(hint) is Annotated:
            marks = [*rest, *marks]
        hint = first
    return hint, marks


def _type(kind: Any, marks: Sequence[Option]) -> click.ParamType[Any]:
    limits = {name: limit for mark in marks for name, limit in mark.limits.items()}
    if get_origin(kind) in (tuple, Sequence):
        inner, of_inner = _unwrapped(get_args(kind)[0])
        one = _type(inner, [*of_inner, *marks])
        return _Listed(one) if get_origin(kind) is tuple else one
    if get_origin(kind) is Literal:
        return click.Choice(get_args(kind))
    if kind is float:
        return _Finite(**limits)
    if kind is Path or (kind is str and limits):
        return click.Path(path_type=kind, **limits)
    return click.IntRange(**limits) if limits else click.types.convert_type(kind)


class _Finite(click.FloatRange):
    """A range of finite numbers. Click's own accepts "nan" and "inf"."""

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number.", param, ctx)
        return number


class _Listed(click.types.UnprocessedParamType):  # click 8.2's ParamType takes no arguments
    """Values with commas between them, each once."""

    name = "list"

    def __init__(self, of: click.ParamType[Any]) -> None:
        self.of = of

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        words = value.split(",") if value else []
        return tuple(dict.fromkeys(self.of(word.strip(), param, ctx) for word in words))
