"""Promise: what a command's help says of defaults and choices is what the values behind it have.

The command line imports no folder before it is needed, so it states them a second time.
"""

from __future__ import annotations

from dataclasses import fields
from typing import get_args

import click
import pytest

pytest.importorskip("PIL")

from fastload.bench import plan
from fastload.bench.plan import Workload
from fastload.cli.bench import bench
from fastload.cli.submit import submit
from fastload.cli.train import train
from fastload.distributed.launch import LAUNCHERS
from fastload.measure.page_cache import CacheState
from fastload.train import recipe
from fastload.train.recipe import Recipe

ALIASES = {"nbatch": "batch_size", "nsteps": "steps"}
CHOICES: list[tuple[click.Command, str, tuple[str, ...]]] = [
    (submit, "launcher", ("auto", *LAUNCHERS)),
    (train, "loader", get_args(recipe.LoaderName)),
    (train, "transform", get_args(recipe.TransformName)),
    (train, "precision", get_args(recipe.Precision)),
    (bench, "transform", get_args(plan.TransformName)),
    (bench, "cache", get_args(CacheState)),
]


@pytest.mark.parametrize(("command", "value"), [(train, Recipe), (bench, Workload)])
def test_a_command_and_the_value_that_it_makes_have_the_same_defaults(
    command: click.Command, value: type
) -> None:
    arguments = ["--file-list", __file__] if command is bench else []  # which it cannot do without
    given = command.make_context(command.name, arguments).params
    said = {ALIASES.get(name, name): default for name, default in given.items()}
    owned = {field.name: field.default for field in fields(value) if field.name != "file_list"}
    assert {name: said[name] for name in owned} == owned


@pytest.mark.parametrize(("command", "option", "choices"), CHOICES)
def test_a_command_offers_the_choices_that_there_are(
    command: click.Command, option: str, choices: tuple[str, ...]
) -> None:
    (parameter,) = (parameter for parameter in command.params if parameter.name == option)
    assert isinstance(parameter.type, click.Choice)
    assert tuple(parameter.type.choices) == choices
