"""Promise: The defaults and choices in a command's help are those of the values that it uses.

The command line imports no folder before it is needed, so it states them a second time.
"""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import Any, get_args

import click
import pytest

pytest.importorskip("PIL")

import fastload
from fastload.bench import plan
from fastload.bench.plan import Workload
from fastload.cli.bench import bench
from fastload.cli.parameters import serve
from fastload.cli.predict import predict
from fastload.cli.submit import submit
from fastload.cli.train import train
from fastload.distributed.flight_access import MAX_CALLS
from fastload.distributed.launch import LAUNCHERS
from fastload.measure.page_cache import CacheState
from fastload.store.model_set import BATCH_SIZE, MOST_PARTS, ROWS_OF_PART
from fastload.train import recipe
from fastload.train.recipe import Recipe

CHOICES: list[tuple[click.Command, str, tuple[str, ...]]] = [
    (submit, "launcher", ("auto", *LAUNCHERS)),
    (train, "loader", get_args(recipe.LoaderName)),
    (train, "transform", get_args(recipe.TransformName)),
    (train, "precision", get_args(recipe.Precision)),
    (bench, "transform", get_args(plan.TransformName)),
    (bench, "cache", get_args(CacheState)),
]


def parsed(command: click.Command, *arguments: str) -> dict[str, Any]:
    """Return what a command makes of arguments. It keeps its help option, so that has the names that `main` gives."""
    context = command.make_context(
        command.name, list(arguments), help_option_names=["-h", "--help"]
    )
    return context.params


@pytest.mark.parametrize(("command", "value"), [(train, Recipe), (bench, Workload)])
def test_a_command_and_the_value_that_it_makes_have_the_same_defaults(
    command: click.Command, value: type
) -> None:
    arguments = ["--file-list", __file__] if command is bench else []  # which it cannot do without
    said = parsed(command, *arguments)
    owned = {field.name: field.default for field in fields(value) if field.name != "file_list"}
    assert {name: said[name] for name in owned} == owned


def test_predict_has_the_defaults_of_the_function() -> None:
    given = parsed(predict, "module:model")
    owned = inspect.signature(fastload.predict).parameters
    for name in ("batch_size", "max_wait_ms", "num_workers"):
        assert given[name] == owned[name].default, name
    assert given["batch_size"] == BATCH_SIZE
    option = next(one for one in predict.params if one.name == "parts")
    assert isinstance(option, click.Option)
    assert f"one per {ROWS_OF_PART} samples, at most {MOST_PARTS['predictions']}]" in str(
        option.help
    )


def test_servers_take_as_many_calls_as_their_class() -> None:
    assert parsed(serve)["max_calls"] == MAX_CALLS


@pytest.mark.parametrize(("command", "option", "choices"), CHOICES)
def test_a_command_offers_the_choices_that_there_are(
    command: click.Command, option: str, choices: tuple[str, ...]
) -> None:
    (parameter,) = (parameter for parameter in command.params if parameter.name == option)
    assert isinstance(parameter.type, click.Choice)
    assert tuple(parameter.type.choices) == choices
