"""Kinds of options. Their names stand in one text, as in "-b --nbatch batch_size". `given` are those of click."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])


class Number(click.FloatRange):
    """A range of finite numbers. Click's own accepts "nan" and "inf"."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Return the number. Raise a usage error if it is not a number, not finite, or out of range."""
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number.", param, ctx)
        return number


def option(names: str, **given: Any) -> Callable[[F], F]:
    """Return an option that is none of the kinds below."""
    return click.option(*names.split(), **given)


def flag(names: str, **given: Any) -> Callable[[F], F]:
    """Return a flag."""
    return option(names, is_flag=True, **given)


def count(
    names: str, *, within: tuple[int | None, int | None] = (1, None), **given: Any
) -> Callable[[F], F]:
    """Return an option for a whole number."""
    return option(names, type=click.IntRange(*within), **given)


def number(
    names: str, *, within: tuple[float | None, float | None] = (0, None), **given: Any
) -> Callable[[F], F]:
    """Return an option for a finite number."""
    return option(names, type=Number(*within), **given)


def choice(names: str, choices: Sequence[str], **given: Any) -> Callable[[F], F]:
    """Return an option for one of several words. The first one is the default."""
    return option(names, type=click.Choice(choices), **{"default": choices[0], **given})


def folder(names: str, *, exists: bool = False, **given: Any) -> Callable[[F], F]:
    """Return an option for the path of a folder."""
    kind = click.Path(exists=exists, file_okay=False, path_type=Path)
    return option(names, type=kind, **given)


def file(names: str, *, exists: bool = False, **given: Any) -> Callable[[F], F]:
    """Return an option for the path of a file."""
    kind = click.Path(exists=exists, dir_okay=False, path_type=Path)
    return option(names, type=kind, **given)
