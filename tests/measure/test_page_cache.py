"""Promise: Files are brought into the page cache or dropped from it. The result is measured, and not only asked for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fastload.measure.page_cache import cached_share, prepare_cache


def in_memory(path: Path) -> bool:
    """Whether the file system of `path` is the page cache itself, so that nothing can be dropped from it."""
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    holding = [(len(at), kind) for at, kind in mounts if path.is_relative_to(at)]
    return max(holding)[1] in {"tmpfs", "ramfs"}


def test_warm_and_cold_are_measured_and_not_only_asked_for(tmp_path: Path) -> None:
    if in_memory(tmp_path):
        pytest.skip("the temporary files are on a file system in memory, which is never cold")
    files = []
    for number in range(3):
        path = tmp_path / str(number)
        path.write_bytes(os.urandom(300_000))
        files.append(str(path))
    prepare_cache(files, "warm")
    assert cached_share(files) == 1.0
    prepare_cache(files, "cold")
    assert cached_share(files) == 0.0


def test_empty_files_have_no_share_in_the_cache(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    assert cached_share([str(tmp_path / "empty")]) is None


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"gone\.jpg"):
        prepare_cache([str(tmp_path / "gone.jpg")], "warm")
