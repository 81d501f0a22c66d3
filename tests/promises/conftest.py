"""Fixtures of the tests of rows: of datasets that fill them, and of images."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fastload.memory.slots import SlotPool
from tests.contracts.filled_rows import cut_runs, noted_pools


@pytest.fixture
def cut(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    return cut_runs(monkeypatch)


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> list[SlotPool]:
    return noted_pools(monkeypatch)
