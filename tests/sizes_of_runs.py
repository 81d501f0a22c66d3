"""How much a test does: its whole in `scripts/test --all`, a part elsewhere. Scripts that tests start do without it."""

from __future__ import annotations

from typing import TypeVar

import hypothesis

T = TypeVar("T")


def in_full(whole: T, part: T) -> T:
    """Return `whole` in `scripts/test --all`, which has a profile of more examples, and else `part`."""
    return whole if hypothesis.settings().max_examples > 100 else part
