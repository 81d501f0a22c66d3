"""Promises:
- No garbage collection falls into the reading of a dataset's code, and none that it causes follows.
- The tripwire asks the system for nothing at a sample.
"""

from __future__ import annotations

import builtins
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fastload
from tests.verdicts.programs import made
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


class Rows:
    """64 MB of data that threads share."""

    def __init__(self) -> None:
        self.rows = np.zeros((2_000, 8_000), np.float32)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index].sum()


def test_the_maps_of_the_process_are_read_at_iter_and_not_at_samples(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with fastload.DataLoader(Rows(), 64, num_workers=2) as loader:
        batches = iter(loader)
        opened: list[Any] = []
        real = builtins.open
        monkeypatch.setattr(
            Path, "read_bytes", lambda path: opened.append(path) or real(path, "rb").read()
        )
        next(batches)
        assert opened == []
