"""Promises:
- A small tmpfs that fills up takes no part of a `put`. It gives its room back, and takes the set once it is larger.
  See also `tests/store/test_put_and_get.py`.
- `prepare` keeps complete parts when the tmpfs is full, and continues once there is room. See also
  `tests/store/test_engines.py`.
- Reading a set needs no room.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from fastload import store
from fastload.errors import StoreFullError
from fastload.store.root import sets

ROWS = 50_000  # 400 kB a part, five parts


def columns(number: int) -> dict[str, Any]:
    return {"y": np.arange(number * ROWS, (number + 1) * ROWS)}


def mapping() -> Any:
    return {"y": np.arange(5 * ROWS)}


def parts() -> Any:
    return (columns(number) for number in range(5))


def tables() -> Any:
    return (pa.table(columns(number)) for number in range(5))


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    """Yield a tmpfs of 1 MiB."""
    mount = tmp_path / "memory"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", mount]
    if os.getuid() != 0 or subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        yield mount
    finally:
        subprocess.run(["umount", "-l", mount], check=True)


@pytest.mark.parametrize("data", [mapping, parts, tables])
def test_a_put_that_does_not_fit_gives_its_room_back(data: Callable[[], Any], memory: Path) -> None:
    with pytest.raises(StoreFullError) as full:
        store.put(data(), memory / "set")
    assert 0 <= full.value.free < full.value.needed
    assert list(sets(str(memory))) == []
    assert shutil.disk_usage(memory).used <= 2**14, "folders only"
    subprocess.run(["mount", "-o", "remount,size=4m", memory], check=True)
    store.put(data(), memory / "set")
    dataset = store.get(memory / "set", data="y")
    assert torch.equal(torch.cat(dataset.column("y")), torch.arange(5 * ROWS))
