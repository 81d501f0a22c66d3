"""Fixtures of the tests of rows: of datasets that fill them, and of images."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.contracts.filled_rows import cut_runs


@pytest.fixture
def cut(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    return cut_runs(monkeypatch)
