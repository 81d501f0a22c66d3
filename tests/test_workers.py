"""A worker thread is set up as torch's worker processes are: one torch thread each, and nobody else is touched.

What threads share and processes do not is warned of.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

import fastload
from fastload.errors import SharedStateWarning


class Threads(Dataset[int]):
    """How many threads torch uses where the sample is read."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        torch.ones(200_000).add_(1.0)  # a parallel operation, before which torch may not know
        return torch.get_num_threads()


def test_workers_use_one_torch_thread_and_leave_the_others_theirs() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        with fastload.DataLoader(Threads(), num_workers=2, persistent_workers=True) as loader:
            for _ in range(2):
                assert [int(batch) for batch in loader] == [1] * 8
            later: list[int] = []
            thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
            thread.start()
            thread.join()
        assert (torch.get_num_threads(), later) == (3, [3])
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
    with fastload.DataLoader(dataset, **shared) as loader:
        with pytest.warns(
            SharedStateWarning, match="InOneFile seems to read through its open file `dataset.file`"
        ):
            list(loader)
        list(loader)  # warnings are errors here
    dataset.close()


@pytest.mark.parametrize("settings", [{"num_workers": 1}, {"num_workers": 0}])
def test_a_file_position_of_one_thread_is_not_warned_of(records: Path, settings: Any) -> None:
    dataset = InOneFile(records)
    with fastload.DataLoader(dataset, **settings) as loader:
        assert len(list(loader)) == 16
    dataset.close()


def test_a_data_set_with_a_lock_knows_that_it_is_shared(records: Path) -> None:
    dataset = InOneFile(records)
    dataset.both = threading.Barrier(2)
    dataset.lock = threading.Lock()  # type: ignore[attr-defined]
    with fastload.DataLoader(dataset, num_workers=2, copy_dataset=False) as loader:
        assert len(list(loader)) == 16
    dataset.close()


class OpenedLate(Dataset[bytes]):
    """Records in a file that the first sample opens, as README advises."""

    file: Any = None

    def __init__(self, path: Path) -> None:
        self.path = path

    def __del__(self) -> None:
        if self.file is not None:
            self.file.close()

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> bytes:
        if self.file is None:
            self.file = self.path.open("rb")
        self.file.seek(4 * index)
        return self.file.read(4)


@pytest.mark.filterwarnings(
    "ignore:unclosed file:ResourceWarning"
)  # the finalizers of copies do not run
def test_a_file_opened_at_the_first_sample_is_each_copys_own_and_an_open_one_is_opened_anew(
    records: Path,
) -> None:
    dataset = OpenedLate(records)
    with fastload.DataLoader(dataset, num_workers=4) as loader:
        assert [batch[0] for batch in loader] == [b"%04d" % k for k in range(16)]
        assert dataset.file is None
        assert dataset[3] == b"0003"  # and now it is open in the loop itself
        assert [batch[0] for batch in loader] == [b"%04d" % k for k in range(16)]
        assert dataset.file.tell() == 16
