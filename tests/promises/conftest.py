"""Fixtures of the tests of rows, of datasets that fill them and of images, and the cases of a contract that wait."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.contracts.filled_rows import cut_runs
from tests.contracts.workers import mark_what_waits


@pytest.fixture
def cut(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    return cut_runs(monkeypatch)


@pytest.hookimpl(tryfirst=True)  # the slow ones get another time-out, and may be deselected
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_what_waits(items)
