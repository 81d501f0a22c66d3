"""Promises:
- What has a position is no data: files, readers and iterators of Arrow, pandas and fsspec are read by processes under
  `worker_method="auto"`, and `worker_method="thread"` names them. Tables, datasets and file systems are for threads.
- Open compressed files and tar archives have no copy for threads.
- Threads share what connects threads, though it is an iterator: a pool's results, and a loop over another loader.
"""

from __future__ import annotations

import gzip
import tarfile
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import pytest
import torch

import fastload
from fastload.errors import SharedStateError, SharedStateWarning
from fastload.verdicts import libraries, verdict

pa = pytest.importorskip("pyarrow")
pytest.importorskip("pyarrow.dataset")
pytest.importorskip("pyarrow.parquet")
pytest.importorskip("pyarrow.csv")
TABLE = pa.table({"a": [*range(9)]})


def of_fsspec(path: Path) -> Any:
    return pytest.importorskip("fsspec").open(str(path)).open()


def wrapped(path: Path) -> Any:
    arrow = pytest.importorskip("fsspec.implementations.arrow")
    return arrow.ArrowFSWrapper(pa.fs.LocalFileSystem()).open(str(path))


def chunks(path: Path) -> Any:
    return pytest.importorskip("pandas").read_csv(path, chunksize=2)


def ipc_file(path: Path) -> Any:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, TABLE.schema) as writer:
        writer.write_table(TABLE)
    return pa.ipc.open_file(sink.getvalue())


def in_gzip(path: Path) -> Any:
    gzip.open(path, "wt").close()
    return gzip.open(path, "rt")


def in_tar(path: Path) -> Any:
    tarfile.open(path, "w").close()
    return tarfile.open(path)


POSITIONED: dict[str, Callable[[Path], Any]] = {
    "memory map": lambda path: pa.memory_map(str(path)),
    "OSFile": lambda path: pa.OSFile(str(path)),
    "BufferReader": lambda path: pa.BufferReader(b"abc"),
    "input file": lambda path: pa.fs.LocalFileSystem().open_input_file(str(path)),
    "compressed": lambda path: pa.CompressedInputStream(pa.BufferReader(b""), "gzip"),
    "csv reader": pa.csv.open_csv,
    "batches": lambda path: TABLE.to_reader(),
    "file of batches": ipc_file,
    "fsspec": of_fsspec,
    "fsspec over Arrow": wrapped,
    "chunks of pandas": chunks,
    "gzip": in_gzip,
    "tar": in_tar,
}
DATA: dict[str, Callable[[Path], Any]] = {
    "table": lambda path: TABLE,
    "dataset": lambda path: pa.dataset.dataset(path, format="csv"),
    "file system": lambda path: pa.fs.LocalFileSystem(),
    "buffer": lambda path: pa.py_buffer(b"abc"),
}


class Holds(torch.utils.data.Dataset[int]):
    def __init__(self, held: Any) -> None:
        self.held = held

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return index


class Takes(Holds):
    def __getitem__(self, index: int) -> int:
        return int(next(self.held))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "rows.csv").write_text("a,b\n" + "1,2\n" * 9)
    return tmp_path / "rows.csv"


@pytest.mark.parametrize("name", POSITIONED)
def test_what_has_a_position_is_for_processes(name: str, path: Path) -> None:
    dataset = Holds(POSITIONED[name](path))
    found = verdict(dataset)
    assert found.kind == "process"
    assert "dataset.held" in found.reason
    loader = fastload.DataLoader(dataset, num_workers=2, worker_method="thread")
    with pytest.warns(SharedStateWarning, match=r"dataset\.held"), loader:
        assert len([*loader]) == 4
    with suppress(AttributeError):
        dataset.held.close()


def test_threads_share_an_iterator_that_connects_threads() -> None:
    with ThreadPool(1) as pool:
        loader = fastload.DataLoader(
            Takes(pool.imap(int, range(4))), None, num_workers=2, worker_method="thread"
        )
        assert sorted(loader) == [*range(4)]


def test_a_loop_over_another_loader_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries, "_vouched", set())  # so that the code of this file is read
    rows: Any = [*range(4)]
    with fastload.DataLoader(rows, None, num_workers=1) as inner:
        dataset = Takes(iter(inner))
        assert verdict(dataset).kind == "process"
        with pytest.raises(SharedStateError, match=r"dataset\.held.*LoaderIterator"):
            iter(fastload.DataLoader(dataset, num_workers=2, worker_method="thread"))


@pytest.mark.parametrize("name", DATA)
def test_data_is_for_threads(name: str, path: Path) -> None:
    found = verdict(Holds(DATA[name](path)))
    assert found.kind == "thread", found.reason


def test_a_codec_of_arrow_is_for_one_thread() -> None:
    """Threads that decompress by one gzip codec hang."""
    found = verdict(Holds(pa.Codec("gzip")))
    assert found.proven
    assert "pyarrow.lib.Codec" in found.reason


def test_a_reader_that_a_module_holds_is_for_processes(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(libraries, "_vouched", set())  # let the code of this package be read
    monkeypatch.setitem(globals(), "READER", ipc_file(path))
    found = verdict(Reads(0))
    assert "RecordBatchFileReader" in found.reason


READER: Any = None


class Reads(Holds):
    def __getitem__(self, index: int) -> Any:
        return READER.get_batch(0)["a"][index].as_py()
