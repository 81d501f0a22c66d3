"""Promises:
- A worker thread is set up as torch's worker processes are, with one torch thread. All other threads keep their
  number.
- A worker thread has as much stack as the main thread, and 8 MiB at least, also under `ulimit -s unlimited`.
- A file position that threads share, and processes would not, gives one warning.
"""

from __future__ import annotations

import ctypes
import resource
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from fastload import DataLoader
from fastload.engine.threads import deep_stacks
from fastload.errors import SharedStateWarning
from fastload.safety import libraries
from tests.children import ROOT
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


# ---- stacks ----

MIB = 1 << 20


def stack_bytes() -> int:
    """Return the size of the calling thread's stack."""
    libc, attributes, size = ctypes.CDLL(None), ctypes.create_string_buffer(256), ctypes.c_size_t()
    libc.pthread_self.restype = ctypes.c_void_p
    this = ctypes.c_void_p(libc.pthread_self())
    assert libc.pthread_getattr_np(this, attributes) == 0
    assert libc.pthread_attr_getstacksize(attributes, ctypes.byref(size)) == 0
    libc.pthread_attr_destroy(attributes)
    return size.value


def size_of_later() -> int:
    """Return what threads that start later get. `threading.stack_size()` alone would set it to 0."""
    size = threading.stack_size()
    threading.stack_size(size)
    return size


class Stacks(Numbers):
    def __getitem__(self, index: int) -> int:
        return stack_bytes()


@pytest.fixture
def restored() -> Iterator[None]:
    before = size_of_later()
    yield
    threading.stack_size(before)


@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize("others", [MIB, 32 * MIB])
def test_workers_have_the_stack_of_a_process_and_leave_the_others_theirs(others: int) -> None:
    threading.stack_size(others)
    later: list[int] = []
    assert min(DataLoader(Stacks(4), None, num_workers=2)) >= max(others, 8 * MIB)
    assert size_of_later() == others
    run_all(lambda: later.append(stack_bytes()))
    assert later[0] < others + MIB


@pytest.mark.slow
def test_without_a_limit_workers_have_more_than_glibc_gives() -> None:
    if resource.getrlimit(resource.RLIMIT_STACK)[1] != resource.RLIM_INFINITY:
        pytest.skip("the limit cannot be lifted")
    script = (
        "from fastload import DataLoader; from tests.test_workers import Stacks\n"
        "print(min(DataLoader(Stacks(4), None, num_workers=2)))"
    )
    program = ["bash", "-c", 'ulimit -s unlimited; exec "$@"', "bash", sys.executable, "-c", script]
    said = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, check=True)
    assert int(said.stdout) >= 8 * MIB


@pytest.mark.usefixtures("restored")
def test_the_size_is_restored_if_a_thread_cannot_start() -> None:
    before = size_of_later()
    with pytest.raises(RuntimeError, match="can't start"), deep_stacks():
        raise RuntimeError("can't start new thread")
    assert size_of_later() == before


# ---- files ----


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
def test_a_file_position_that_threads_share_is_warned_of_once(
    records: Path, lazy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(libraries, "_allowed", set())  # so that the code of this file is read
    dataset = InOneFile(records, lazy=lazy)
    dataset.both = threading.Barrier(2)
    shared = {
        "copy_dataset": False,
        "num_workers": 2,
        "prefetch_batches": 2,
        "worker_method": "thread",
    }
    with DataLoader(dataset, **shared) as loader:
        with pytest.warns(SharedStateWarning, match="InOneFile.__getitem__") as warned:
            list(loader)
        assert {one.filename for one in warned} == {__file__}
        list(loader)  # warnings are errors here
    dataset.close()
    dataset = InOneFile(records)
    with (
        DataLoader(dataset, num_workers=1) as loader,  # one thread shares it with the loop
        pytest.warns(SharedStateWarning, match="cannot be copied"),
    ):
        assert len(list(loader)) == 16
    dataset.close()
