"""`get`: a set becomes a dataset."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from fastload.store.dataset import SetDataset
from fastload.store.root import find, open_root


def get(
    name: str,
    *,
    data: str | Sequence[str] | None = None,
    label: str | None = None,
    transform: Callable[[Any], Any] | None = None,
    root: str | os.PathLike[str] | None = None,
) -> SetDataset:
    """Open the set `name` as a map-style dataset; see `SetDataset` for its samples.

    Args:
        data, label, transform: see `SetDataset`.
        root: the folder of the sets. None: $FASTLOAD_STORE, or this user's folder in shared memory.

    Raises FileNotFoundError with the names that there are, KeyError with the columns, `PackedDataError`.
    """
    path = find(open_root(root), name)
    return SetDataset(path, data=data, label=label, transform=transform)
