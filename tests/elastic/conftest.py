"""Leases that are closed at the end of a test."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from torch.distributed import Store  # type: ignore[attr-defined]

from fastload.elastic import Leases
from tests.elastic.leasing import LENGTH, SHARD, Make


@pytest.fixture
def closing() -> Iterator[Make]:
    """Make leases that are closed in the end."""
    made: list[Leases] = []

    def make(store: Store, length: int = LENGTH, shard: int = SHARD, **options: Any) -> Leases:
        made.append(Leases(length, shard=shard, store=store, **options))
        return made[-1]

    yield make
    for leases in made:
        leases.close()
    made.clear()
