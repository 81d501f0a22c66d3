"""Promise: Defaults and choices that a command states a second time are those of the functions that it calls."""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import get_args, get_type_hints

import pytest

pytest.importorskip("PIL")
pytest.importorskip("pyarrow")

import fastload
from fastload.cli.predict import ForStream, Predicted
from fastload.cli.submit import Ranks
from fastload.distributed.launch import LAUNCHERS
from fastload.store.model_set import BATCH_SIZE, MOST_PARTS, ROWS_OF_PART
from tests.commands import COMMANDS


def test_predict_has_the_defaults_of_the_functions() -> None:
    given = {field.name: field.default for kind in (Predicted, ForStream) for field in fields(kind)}
    owned = inspect.signature(fastload.predict).parameters
    for name in ("batch_size", "max_wait_ms", "num_workers"):
        assert given[name] == owned[name].default, name
    assert given["batch_size"] == BATCH_SIZE
    for command, key in (("predict", "predictions"), ("featurize", "features")):
        page = " ".join(COMMANDS[f"fastload {command}"].get_help().split())
        per = f"one per {ROWS_OF_PART}"
        assert f"at most {MOST_PARTS[key]}]" in page.partition(per)[2][:30]


def test_submit_offers_the_launchers_that_there_are() -> None:
    assert get_args(get_type_hints(Ranks)["launcher"]) == ("auto", *LAUNCHERS)
