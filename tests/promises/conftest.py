"""Fixtures of the tests of rows: of datasets that fill them, and of images."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from fastload.run_length import RunLength
from fastload.slots import SlotPool


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
    made: list[SlotPool] = []
    init = SlotPool.__init__

    def noted(self: SlotPool, **options: Any) -> None:
        made.append(self)
        init(self, **options)

    monkeypatch.setattr(SlotPool, "__init__", noted)
    return made
