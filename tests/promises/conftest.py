"""Fixtures of the tests of rows: of datasets that fill them, and of images."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fastload.run_length import RunLength
from fastload.slots import SlotPool
from tests.contracts.filled_rows import noted_pools


@pytest.fixture
def cut(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Return a function that sets the number of samples in every run, whatever their cost."""

    def runs_of(units: int) -> None:
        monkeypatch.setattr(
            RunLength, "of", lambda length, of_ticket: max(1, min(units, of_ticket))
        )

    return runs_of


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> list[SlotPool]:
    return noted_pools(monkeypatch)
