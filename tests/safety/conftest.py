"""Threads for the tests of this folder that are about what they copy, share and draw."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest

AUTO = {"test_choice.py", "test_plain.py", "test_programs.py"}
"""The files about what `worker_method="auto"` chooses."""


@pytest.fixture(autouse=True)
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let loaders have threads."""
    method = {} if request.path.name in AUTO else {"FASTLOAD_WORKER_METHOD": "thread"}
    with mock.patch.dict("os.environ", method):
        yield
