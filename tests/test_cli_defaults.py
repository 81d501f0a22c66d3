"""Promise: Defaults and choices that a command states a second time are those of the functions that it calls."""

from __future__ import annotations

import inspect
from typing import Any, get_args, get_type_hints

import click
import pytest

pytest.importorskip("PIL")

import fastload
from fastload.cli.parameters import serve
from fastload.cli.predict import predict
from fastload.cli.submit import Ranks
from fastload.distributed.flight_access import MAX_CALLS
from fastload.distributed.launch import LAUNCHERS
from fastload.store.model_set import BATCH_SIZE, MOST_PARTS, ROWS_OF_PART


def parsed(command: click.Command, *arguments: str) -> dict[str, Any]:
    """Return what a command makes of arguments. It keeps its help option, so that has the names that `main` gives."""
    context = command.make_context(
        command.name, list(arguments), help_option_names=["-h", "--help"]
    )
    return context.params


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


def test_submit_offers_the_launchers_that_there_are() -> None:
    assert get_args(get_type_hints(Ranks)["launcher"]) == ("auto", *LAUNCHERS)
