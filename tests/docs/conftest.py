from __future__ import annotations

import pytest

from fastload.loader import ENVIRONMENT


@pytest.fixture(autouse=True)
def _the_default_of_users(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the examples of pages run under the default that users have, not that of the tests."""
    monkeypatch.setenv(ENVIRONMENT, "auto")
