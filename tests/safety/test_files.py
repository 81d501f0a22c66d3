"""Promise: Open files and archives have no copy for threads: auto takes processes, and threads that were asked for name
them.
"""

from __future__ import annotations

import gzip
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fastload import DataLoader
from fastload.errors import SharedStateWarning
from fastload.safety import libraries


class Opened:
    def __init__(self, file: Any) -> None:
        self.file = file

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return index


OPENERS: dict[str, Callable[..., Any]] = {
    "file": open,
    "compressed": gzip.open,
    "tar": tarfile.open,
    "zip": zipfile.ZipFile,
}


@pytest.mark.parametrize("kind", OPENERS)
def test_open_files_and_archives_are_read_by_processes_and_named_in_threads(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(libraries, "_allowed", set())  # so that the code of this file is read
    opener, path = OPENERS[kind], tmp_path / "file"
    opener(path, "w").close()
    with opener(path) as file:
        chosen = DataLoader(Opened(file), num_workers=1, worker_method="auto").chosen()
        assert chosen.kind == "process"
        assert "`dataset.file`" in chosen.reason
        with pytest.warns(SharedStateWarning, match=r"cannot be copied: dataset\.file"):
            assert len([*DataLoader(Opened(file), num_workers=1, worker_method="thread")]) == 4
