"""Promises:
- No garbage collection falls into the reading of a dataset's code, and none that it causes follows.
- A verdict reads at most 10,000 bytes of bytecode, or 3,000 if something was found: beyond, code counts as unknown.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fastload
from fastload.verdicts import effects, verdict
from fastload.verdicts.reach import AFTER_FINDING, CODE
from tests.verdicts.programs import Case, made
from tests.verdicts.test_user_code import MANY


@pytest.fixture
def collections() -> Iterator[list[int]]:
    """The generations of the collections meanwhile."""
    seen: list[int] = []

    def collected(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            seen.append(info["generation"])

    gc.callbacks.append(collected)
    yield seen
    gc.callbacks.remove(collected)


@pytest.mark.parametrize("enabled", [True, False])
def test_no_collection_falls_into_the_reading(
    enabled: bool, collections: list[int], tmp_path: Path
) -> None:
    with made(MANY, tmp_path) as (dataset,):
        loader = fastload.DataLoader(dataset, num_workers=1)
        (gc.enable if enabled else gc.disable)()
        gc.collect()
        collections.clear()
        try:
            loader._chosen()
            assert gc.isenabled() is enabled
        finally:
            gc.enable()
    assert len(collections) <= 1, "the one that is due when the collector is back"


def large(body: str) -> Case:
    """Return a dataset whose sample calls 400 functions, one from another. Equal code is read only once."""
    f = f"of_{len(body)}_"
    functions = [
        f"def {f}{k}(i): return {f}{k + 1}(i) + [{k} for _ in range(9)][0]" for k in range(400)
    ]
    top = "\n".join([*functions, f"def {f}400(i): return i\n"])
    return Case(f"large {body}", body=f"{body}; return {f}0(i)", top=top)


@pytest.mark.parametrize(("body", "limit"), [("i += 1", CODE), ("eval('i')", AFTER_FINDING)])
def test_the_search_ends_at_a_limit_of_code(
    body: str, limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []

    def reading(function: Any, first: Any) -> Any:
        read.append(len(function.__code__.co_code))
        return real(function, first)

    real = effects._read
    monkeypatch.setattr(effects, "_read", reading)
    with made(large(body), tmp_path) as (dataset,):
        found = verdict(dataset)
    assert found.kind == "process"
    assert not found.proven
    assert ("reaches more code" in found.reason) is (limit == CODE)
    assert limit - max(read) <= sum(read) <= limit
