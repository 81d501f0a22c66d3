"""What holds for every test of this folder: threads switch as often as Python can let them."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes import hasty


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """These libraries are installed for `scripts/test --all`, and for CI when it is their turn."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.slow)
            # Threads that were asked for warn of what these tests are about.
            item.add_marker(
                pytest.mark.filterwarnings("ignore::fastload.errors.SharedStateWarning")
            )


@pytest.fixture(autouse=True)
def _threads_switch_all_the_time() -> Iterator[None]:
    with hasty():
        yield


@pytest.fixture(autouse=True)
def _no_collection_inside_a_parse() -> Iterator[None]:
    """Before CPython 3.11.8, `ast.parse` fails if a collection within it lets another thread parse (gh-106905)."""
    if sys.version_info >= (3, 11, 8):
        yield
        return
    gc.disable()
    yield
    gc.enable()
    gc.collect()
