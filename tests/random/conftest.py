"""Threads for all tests of this folder: it is about what they draw."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Let loaders have threads."""
    with mock.patch.dict("os.environ", FASTLOAD_WORKER_METHOD="thread"):
        yield
