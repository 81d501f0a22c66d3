"""Promises:
- A worker thread is set up as torch's worker processes are, with one torch thread. All other threads keep their
  number.
- A file position that threads share, and processes would not, gives one warning.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from fastload import DataLoader
from fastload.errors import SharedStateWarning
from tests.fakes import Numbers


class Threads(Dataset[int]):
    """How many threads torch uses in a sample that is read, after a loader of its own if `nested`."""

    def __init__(self, nested: bool) -> None:
        self.nested = nested

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        if self.nested:
            assert len(list(DataLoader(Numbers(4), 2, num_workers=2))) == 2
        torch.ones(200_000).add_(1.0)  # a parallel operation, before which torch may not know
        return torch.get_num_threads()


def run_all(*bodies: Callable[[], object]) -> None:
    threads = [threading.Thread(target=body) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("nested", [False, True])
def test_workers_use_one_torch_thread_and_leave_the_others_theirs(nested: bool) -> None:
    def loop() -> None:
        for _ in range(10):
            list(DataLoader(Numbers(4), 2, num_workers=3))

    later: list[int] = []
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with DataLoader(Threads(nested), num_workers=2, persistent_workers=not nested) as loader:
            for _ in range(2):
                assert [int(batch) for batch in loader] == [1] * 8
            run_all(lambda: later.append(torch.get_num_threads()))
        run_all(loop, loop, loop, loop)
        run_all(lambda: later.append(torch.get_num_threads()))
        assert (torch.get_num_threads(), later) == (3, [3, 3])
    finally:
        torch.set_num_threads(before)


class InOneFile(Dataset[bytes]):
    """Records in a file, at a position that all threads share."""

    def __init__(self, path: Path, *, lazy: bool = False) -> None:
        self.path = path
        self.opened: list[Any] = []
        self.file = None if lazy else self.open()
        self.both = threading.Barrier(1)  # of 2: each worker reads one of every two samples

    def open(self) -> Any:
        self.opened.append(self.path.open("rb"))
        return self.opened[-1]

    def close(self) -> None:
        for file in self.opened:  # two, where both workers found none open
            file.close()

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> bytes:
        if self.file is None:
            self.file = self.open()
        self.both.wait()
        self.file.seek(4 * index)
        return self.file.read(4)


@pytest.fixture
def records(tmp_path: Path) -> Path:
    path = tmp_path / "records"
    path.write_bytes(b"".join(b"%04d" % k for k in range(16)))
    return path


@pytest.mark.parametrize("lazy", [False, True])
def test_a_file_position_that_threads_share_is_warned_of_once(records: Path, lazy: bool) -> None:
    dataset = InOneFile(records, lazy=lazy)
    dataset.both = threading.Barrier(2)
    shared = {"copy_dataset": False, "num_workers": 2, "prefetch_batches": 2}
    with DataLoader(dataset, **shared) as loader:
        with pytest.warns(
            SharedStateWarning, match="InOneFile seems to read through its open file `dataset.file`"
        ):
            list(loader)
        list(loader)  # warnings are errors here
    dataset.close()
    dataset = InOneFile(records)
    with DataLoader(dataset, num_workers=1) as loader:  # one thread shares it with nobody
        assert len(list(loader)) == 16
    dataset.close()
