"""`get`: a set becomes a dataset."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from fastload.store.dataset import SetDataset
from fastload.store.root import find, locate


def get(
    name: str | os.PathLike[str],
    *,
    data: str | Sequence[str] | None = None,
    label: str | None = None,
    transform: Callable[[Any], Any] | None = None,
    root: str | os.PathLike[str] | None = None,
) -> SetDataset:
    """Open the set `name` as a map-style dataset; see `SetDataset` for its samples.

    Args:
        name: of the set, or its path.
        data, label, transform: see `SetDataset`.
        root: the folder of the sets, if `name` is no path. None: $FASTLOAD_STORE, or a folder in shared memory.

    Raises FileNotFoundError with the names that there are, KeyError with the columns, `PackedDataError`.
    """
    return SetDataset(find(*locate(name, root)), data=data, label=label, transform=transform)
