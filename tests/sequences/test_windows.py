"""Promises:
- A window of tokens and its targets are those of the files, for any integer dtype, in raw and NumPy files, in order.
- Windows of tokens never cross files. The number of tokens that are in no window is known.
- Segments and positions in a window of tokens begin again after each marker of the end of a document.
- Batches of windows equal the windows, for threads and processes, after pickling, after a fork and in a resumed epoch.
- A file of tokens that is empty, of another size than its dtype needs, cut off or replaced is an error that names it.
- At most 64 files of tokens are open at once, and they close with the dataset.
"""

from __future__ import annotations

import copy
import os
import pickle
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastload import DataLoader
from fastload.errors import SequenceError, StateError
from fastload.sequences import TokenWindows
from fastload.sequences import windows as windows_module
from tests.contracts.filled_rows import FilledRows, Source
from tests.promises.equal import check_same

DTYPES = ["uint8", "int16", "uint16", ">u2", "int32", "uint32", "int64", "uint64"]


def written(path: Path, tokens: Any, dtype: str = "uint16") -> Path:
    """Write tokens, as a NumPy file if the name says so."""
    ids = np.asarray(tokens).astype(dtype)
    if path.suffix == ".npy":
        np.save(path, ids)
    else:
        ids.tofile(path)
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return written(tmp_path / "all.bin", np.arange(1_000) % 251)


class TestRows(FilledRows):
    @pytest.fixture
    def source(self, tmp_path: Path) -> Source:
        first = written(tmp_path / "first.bin", np.arange(100) % 7)
        second = written(tmp_path / "second.npy", np.arange(100, 250) % 11, "int32")
        return lambda: TokenWindows([first, second], 8, dtype=["uint16", None], end=3)


def naive(streams: list[list[int]], length: int, end: int) -> list[dict[str, list[int]]]:
    """Return all windows, token by token."""
    windows = []
    for stream in streams:
        for begin in range(0, len(stream) - length, length):
            tokens = stream[begin : begin + length]
            segments, positions, segment, position = [], [], 1, 0
            for token in tokens:
                segments.append(segment)
                positions.append(position)
                position += 1
                if token == end:
                    segment, position = segment + 1, 0
            targets = stream[begin + 1 : begin + length + 1]
            names = ("tokens", "targets", "segments", "positions")
            windows.append(dict(zip(names, (tokens, targets, segments, positions), strict=True)))
    return windows


STREAMS = st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=40), min_size=1, max_size=4)


@given(STREAMS, st.integers(1, 12), st.data())
def test_windows_are_those_of_the_files(
    tmp_path_factory: pytest.TempPathFactory,
    streams: list[list[int]],
    length: int,
    data: st.DataObject,
) -> None:
    folder = tmp_path_factory.mktemp("windows")
    dtypes = [data.draw(st.sampled_from(DTYPES)) for _ in streams]
    files = [
        written(folder / f"{k}{data.draw(st.sampled_from(['.bin', '.npy']))}", stream, dtype)
        for k, (stream, dtype) in enumerate(zip(streams, dtypes, strict=True))
    ]
    expected = naive(streams, length, 2)
    if not expected:
        with pytest.raises(ValueError, match=f"no file has {length + 1} tokens"):
            TokenWindows(files, length, dtype=dtypes)
        return
    dataset = TokenWindows(files, length, dtype=dtypes, end=2)
    found = [dataset[index] for index in range(len(dataset))]
    kinds = [torch.int64, torch.int64, torch.int32, torch.int64]
    assert all([leaf.dtype for leaf in window.values()] == kinds for window in found)
    assert [{k: v.tolist() for k, v in window.items()} for window in found] == expected
    plain = TokenWindows(files, length, dtype=dtypes)
    assert [*plain[0]] == ["tokens", "targets"]
    seen = sum((len(s) - 1) // length * length + 1 for s in streams if len(s) > length)
    assert dataset.left_out == sum(map(len, streams)) - seen


# ---- workers ----


def test_copies_open_files_of_their_own(file: Path) -> None:
    dataset = TokenWindows(file, 16, dtype="uint16")
    expected = dataset[3]
    for other in (pickle.loads(pickle.dumps(dataset)), copy.copy(dataset), copy.deepcopy(dataset)):
        other.close()
        check_same(other[3], expected)
        check_same(dataset[3], expected)


def test_a_fork_reads_on(file: Path, forks: None) -> None:
    dataset = TokenWindows(file, 16, dtype="uint16")
    expected = dataset[5]["tokens"].numpy().tobytes()
    child = os.fork()
    if not child:
        same = dataset[5]["tokens"].numpy().tobytes() == expected
        dataset.close()
        os._exit(0 if same else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert dataset[5]["tokens"].numpy().tobytes() == expected


def test_few_files_are_open_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows_module, "MOST_OPEN", 16)
    files = [written(tmp_path / f"{k}.bin", [k] * 9) for k in range(40)]
    dataset = TokenWindows(files, 8, dtype="uint16")
    before = len(os.listdir("/proc/self/fd"))
    for index in (*range(40), *range(40)):
        assert dataset[index]["tokens"].tolist() == [index] * 8
    assert len(os.listdir("/proc/self/fd")) - before == 16
    dataset.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_thread_keeps_the_file_that_another_closes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One thread reads a file. Meanwhile another opens more files than the dataset keeps open."""
    monkeypatch.setattr(windows_module, "MOST_OPEN", 16)
    files = [written(tmp_path / f"{k}.bin", [k] * 9) for k in range(40)]
    dataset = TokenWindows(files, 8, dtype="uint16")
    reads, may_read, found, read = threading.Event(), threading.Event(), [], os.preadv

    def waits(fd: int, into: Any, at: int) -> int:
        if threading.current_thread() is reader:
            reads.set()
            assert may_read.wait(30)
        return read(fd, into, at)

    monkeypatch.setattr(os, "preadv", waits)
    reader = threading.Thread(target=lambda: found.append(dataset[0]["tokens"].tolist()))
    reader.start()
    assert reads.wait(30)
    assert [int(dataset[k]["tokens"][0]) for k in range(1, 40)] == [*range(1, 40)]
    may_read.set()
    reader.join()
    assert found == [[0] * 8]


# ---- states ----


def test_a_state_names_files_length_and_marker(file: Path, tmp_path: Path) -> None:
    def loader(path: Path, length: int = 16, **options: Any) -> DataLoader[Any]:
        return DataLoader(TokenWindows(path, length, dtype="uint16", **options), 4, shuffle=True)

    state = loader(file).state_dict()
    (tmp_path / "elsewhere").mkdir()
    copied = tmp_path / "elsewhere" / file.name
    copied.write_bytes(file.read_bytes())
    loader(copied).load_state_dict(state)
    copied.write_bytes(file.read_bytes()[:-2])
    for other in (loader(copied), loader(file, 8), loader(file, end=3)):
        with pytest.raises(StateError, match="set"):
            other.load_state_dict(state)


# ---- faults ----


def test_a_file_that_is_cut_off_while_open(file: Path) -> None:
    dataset = TokenWindows(file, 100, dtype="uint16")
    whole = dataset[8]
    os.truncate(file, 1_850)
    check_same(dataset[8], whole)  # its 101 tokens end at byte 1,802
    with pytest.raises(SequenceError, match=f"{file.name}: .* has 1,000 bytes now, and had 2,000"):
        os.truncate(file, 1_000)
        dataset[8]
    with DataLoader(dataset, 9, num_workers=2, on_error="skip") as loader:
        assert sum(len(batch["tokens"]) for batch in loader) == 4


def test_a_file_that_was_replaced_before_it_is_opened(file: Path, tmp_path: Path) -> None:
    dataset = TokenWindows(file, 100, dtype="uint16")
    dataset[0]
    os.replace(written(tmp_path / "new", np.zeros(1_000)), file)
    assert dataset[0]["tokens"].tolist() == [k % 251 for k in range(100)]  # the file it has open
    dataset.close()
    with pytest.raises(SequenceError, match="was cut off, replaced or changed"):
        dataset[0]
    os.unlink(file)
    with pytest.raises(FileNotFoundError, match=file.name):
        dataset[0]


def test_an_empty_file_and_half_a_token(tmp_path: Path) -> None:
    for name, content, said in (
        ("empty.bin", b"", r"expected tokens of 4 bytes each \(int32\), found 0 bytes"),
        ("half.bin", bytes(10), r"expected tokens of 4 bytes each \(int32\), found 10 bytes"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(SequenceError, match=f"{name}: {said}"):
            TokenWindows(tmp_path / name, 1, dtype="int32")


def test_numpy_files_that_are_not_what_their_name_says(tmp_path: Path) -> None:
    path = written(tmp_path / "a.npy", range(50), "int32")
    content = path.read_bytes()
    for wrong in (content[:-4], content + b"\0"):
        path.write_bytes(wrong)
        found = len(wrong) - 128
        with pytest.raises(SequenceError, match=f"expected 50 tokens of 4 .*found {found} bytes"):
            TokenWindows(path, 4)
    torn = content.replace(b"}", b" ", 1)
    for wrong in (b"", content[:100], bytes(200), torn):
        path.write_bytes(wrong)
        with pytest.raises(SequenceError, match=r"a\.npy: expected a NumPy file of one dimension"):
            TokenWindows(path, 4)
    np.save(path, np.zeros((5, 5), np.int32))
    with pytest.raises(SequenceError, match="one dimension"):
        TokenWindows(path, 4)
    np.save(path, np.zeros(0, np.int32))
    with pytest.raises(SequenceError, match="found 0 bytes"):
        TokenWindows(path, 4)
    np.save(path, np.zeros(25, np.float32))
    with pytest.raises(ValueError, match="dtype of integers, found float32"):
        TokenWindows(path, 4)


def test_arguments_that_cannot_be_used(file: Path, tmp_path: Path) -> None:
    stored = written(tmp_path / "a.npy", range(50), "int32")
    for (files, length, dtype), said in (
        ((file, 4, None), "expected the dtype of its tokens: pass dtype"),
        ((file, 4, "word"), "dtype 'word' is unknown"),
        ((file, 4, "float32"), "expected a dtype of integers, found float32"),
        ((file, 4, ["uint16"] * 2), "expected 1 dtypes, one for each file, got 2"),
        ((stored, 4, "int64"), "dtype is int64, but the file has int32"),
        ((file, 0, "uint16"), "length of 1 or more"),
        (([], 4, "uint16"), "a file or several"),
    ):
        with pytest.raises(ValueError, match=said):
            TokenWindows(files, length, dtype=dtype)  # type: ignore[arg-type]
    for end in (-1, 1 << 16):
        with pytest.raises(ValueError, match=f"token that uint16 can hold, .*all.bin, got {end}"):
            TokenWindows([stored, file], 4, dtype=[None, "uint16"], end=end)
    with pytest.raises(TypeError, match="length must be an integer"):
        TokenWindows(file, 1.5, dtype="uint16")  # type: ignore[arg-type]
    with pytest.raises(OSError, match="not a regular file"):
        os.mkfifo(tmp_path / "pipe")
        TokenWindows(tmp_path / "pipe", 4, dtype="uint16")
