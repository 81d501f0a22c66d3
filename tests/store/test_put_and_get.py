"""Promises:
- Tensors, arrays, cells of frames, tables and Parquet files come back bit by bit, in order, for any dtype, shape and
  number of parts.
- Batches of a set are those of tensors in memory.
- A set is there whole or not at all. Full memory, a killed writer, a wrong column or a taken name leaves nothing
  visible, and `collect` deletes the rest.
- Writing into a sample or a column does not change the set.
- A state resumes with the set that it was made on, and no other (`set_id`), also through torch's `Subset` and
  `ConcatDataset`.
- A set may be named by its path.
- The rows of all parts are gathered in one call, for any dtype and length, on busy cores too.
- A small tmpfs that fills up takes no part of a `put`. It gives its room back, and takes the set once it is larger.
- `put` never stores another value or fewer rows than it was given.
- `put` refuses a null within a row, a masked value, a tensor that is not row-major, and a text as a column.
- `put` refuses a table that is too large for one part.
"""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data import ConcatDataset, Subset

from fastload import DataLoader, store
from fastload.errors import StateError, StoreFullError
from fastload.store.dataset import MAX_ROW
from fastload.store.root import collect, sets
from tests.children import Python
from tests.contracts.filled_rows import FilledRows, Source
from tests.promises.equal import check_same

X = torch.randint(0, 255, (100, 4, 3), dtype=torch.uint8)
Y = torch.arange(100)


def parts(*bounds: int) -> Iterator[dict[str, Any]]:
    """Yield X and Y in parts that end at `bounds`."""
    begin = 0
    for end in bounds:
        yield {"x": X[begin:end], "y": Y[begin:end]}
        begin = end


@pytest.fixture
def root(tmp_path: Path) -> Path:
    store.put(parts(7, 60, 100), "set", root=tmp_path)
    return tmp_path


DTYPES = (torch.bool, torch.uint8, torch.int16, torch.int64, torch.float16, torch.bfloat16)
DTYPES += (torch.float32, torch.float64)
LONG = (2**15,)  # longer than MAX_ROW, also of bytes
COLUMNS = {
    **{f"{dtype} {shape}": (dtype, shape) for dtype in DTYPES for shape in ((), (3,), (2, 5))},
    **{f"long {dtype}": (dtype, LONG) for dtype in (torch.uint8, torch.bfloat16)},
}


def columns_of(rows: int) -> dict[str, torch.Tensor]:
    """Return a column of each dtype and shape, whose rows differ."""
    numbers = torch.arange(rows)
    return {
        name: torch.randint(0, 2, (rows, *shape)).to(dtype)
        * numbers.to(dtype).view(rows, *[1] * len(shape))
        for name, (dtype, shape) in COLUMNS.items()
    }


def test_tensors_come_back_as_they_were(tmp_path: Path) -> None:
    values = columns_of(20)
    store.put(values, "set", root=tmp_path)
    dataset = store.get("set", root=tmp_path)
    for k in range(20):
        check_same(dataset[k], {name: column[k] for name, column in values.items()})
    (batch,) = DataLoader(dataset, 20, num_workers=2)
    check_same(batch, values)
    check_same({name: dataset.column(name) for name in values}, {n: [c] for n, c in values.items()})


def test_what_can_be_a_column(tmp_path: Path) -> None:
    data = {
        "tensor": X,
        "array": Y.numpy(),
        "cells": [row.numpy() for row in X],  # as a frame has them
        "text": [f"image {k}" for k in range(100)],
        "bytes": [bytes([k]) for k in range(100)],
        "list": list(range(100)),
    }
    store.put(data, "set", root=tmp_path, classes=["cat", "dog"], made={"by": "a test"})
    dataset = store.get("set", root=tmp_path)
    sample = dataset[42]
    assert torch.equal(sample["tensor"], X[42])
    assert torch.equal(sample["cells"], X[42])
    assert (sample["array"].item(), sample["list"].item()) == (42, 42)
    assert (sample["text"], sample["bytes"]) == ("image 42", b"*")
    assert (dataset.classes, dataset.made) == (["cat", "dog"], {"by": "a test"})
    assert len(DataLoader(dataset, 10, num_workers=2)) == 10


PAIR = pa.list_(pa.int32(), 2)
PERMUTED = pa.ExtensionArray.from_storage(
    pa.fixed_shape_tensor(pa.int32(), [2, 3], permutation=[1, 0]),
    pa.array([[1, 2, 3, 4, 5, 6]], pa.list_(pa.int32(), 6)),
)
HAS_A_NULL = "column 'x', row 1.* a set has no nulls"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            {"x": X, "y": Y[:3]},
            r"part 0: all columns of a part must have the same length, got {'x': 100",
        ),
        (
            {"x": [1.0, None, 2.0]},
            "part 0: column 'x', row 1: expected a value like .* got nothing",
        ),
        ({"x": [1.0, 2.0, "three"]}, "part 0: column 'x', row 2: .* got text, 'three'"),
        (
            {"x": [np.zeros(2), np.zeros(3)]},
            r"part 0: column 'x': all rows must have the same shape",
        ),
        ({"x": pa.array([1, None])}, HAS_A_NULL),
        ({"x": torch.zeros(())}, "part 0: column 'x': expected a row for each sample"),
        ({"x": torch.zeros(3, dtype=torch.complex64)}, "cannot store the dtype torch.complex64"),
        ({"x": np.zeros(3, ">i4")}, "column 'x' cannot be stored in a set"),
        ({"x": 3}, "column 'x' cannot be stored in a set"),
        ({"x": [2**70, 1]}, "column 'x'"),
        ({"x": [np.uint64(2**63), np.int64(-1)]}, "column 'x': no integer dtype holds"),
        ({1: Y, "1": Y}, "two columns have the same name"),
        ({"x": pa.array([[3, 4], [1, None]], PAIR)}, HAS_A_NULL),
        (
            {
                "x": pa.ExtensionArray.from_storage(
                    pa.fixed_shape_tensor(pa.int32(), [2]), pa.array([[3, 4], [1, None]], PAIR)
                )
            },
            HAS_A_NULL,
        ),
        ({"x": pa.array([[9, 9], [3, 4], [1, None]], PAIR).slice(1)}, HAS_A_NULL),
        ({"x": pa.DictionaryArray.from_arrays(pa.array([0, 1]), pa.array([7, None]))}, HAS_A_NULL),
        ({"x": np.ma.array([1, 2], mask=[False, True])}, HAS_A_NULL),
        ({"x": PERMUTED}, "row-major"),
        ({"x": torch.arange(3), "y": "cat"}, "column 'y': expected a row for each sample, got one"),
        ({"x": ["a", "b", None]}, "column 'x', row 2: expected a value like .* got nothing"),
        ({"x": pd.array([1, None], dtype="Int64")}, HAS_A_NULL),
        (pd.DataFrame([[1, 2]], columns=["a", "a"]), "two columns have the same name"),
        ({}, "part 0: a part must have at least one column"),
        ([{"x": X}, {"x": Y}], "part 1 has the columns .*, but part 0 has"),
        ([], "set: all parts are empty"),
        ([3], "part 0: a part must be a mapping"),
        ("a.parquet", "a mapping .* got 'a.parquet'. Read a file with its own library first"),
    ],
)
def test_what_cannot_be_a_column_is_named_and_leaves_nothing(
    data: Any, message: str, tmp_path: Path
) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        store.put(data, "set", root=tmp_path)
    assert list(sets(str(tmp_path))) == []
    assert not list((tmp_path / ".unsealed").iterdir())


def test_tables_and_parquet_files(tmp_path: Path) -> None:
    table = pa.table(
        {"x": pa.FixedSizeListArray.from_arrays(pa.array(range(12)), 3), "y": range(4)}
    )
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=3)
    store.put(pq.ParquetFile(tmp_path / "a.parquet").iter_batches(3), "set", root=tmp_path)
    dataset = store.get("set", data="x", label="y", root=tmp_path)
    assert [(x.tolist(), int(y)) for x, y in (dataset[k] for k in range(4))] == [
        ([0, 1, 2], 0),
        ([3, 4, 5], 1),
        ([6, 7, 8], 2),
        ([9, 10, 11], 3),
    ]
    store.put(table, "whole", root=tmp_path)
    assert torch.equal(store.get("whole", data="x", root=tmp_path)[3], torch.tensor([9, 10, 11]))


@pytest.mark.parametrize("on_one_core", [False, True])
def test_rows_of_many_parts_are_those_of_one(on_one_core: bool, tmp_path: Path) -> None:
    values = columns_of(50)
    parts = zip(*(column.split(7) for column in values.values()), strict=True)
    store.put((dict(zip(values, part, strict=True)) for part in parts), "set", root=tmp_path)
    dataset = store.get("set", root=tmp_path)
    dataset._gatherer._on_one_core = 100 if on_one_core else 0
    order = torch.randperm(50)
    batches = [*DataLoader(dataset, 13, sampler=order.tolist())]
    for name, column in values.items():
        check_same(torch.cat([batch[name] for batch in batches]), column[order])
    assert dataset._gatherer._on_one_core > 0 or not on_one_core


class TestRows(FilledRows):
    @pytest.fixture(params=["parts", "long rows"])
    def source(self, request: pytest.FixtureRequest, tmp_path: Path) -> Source:
        rows = torch.arange(12, dtype=torch.uint8)[:, None].expand(12, MAX_ROW + 1)
        data = {
            "parts": (
                {"x": x, "y": y} for x, y in zip(X[:20].split(7), Y[:20].split(7), strict=True)
            ),
            "long rows": ({"x": x, "y": x[:, 0]} for x in rows.split(5)),
        }
        store.put(data[request.param], tmp_path / "set")
        return lambda: store.get(tmp_path / "set", data="x", label="y")


@pytest.mark.parametrize("workers", [0, 2])
def test_a_transform_gets_the_columns_that_were_asked_for(root: Path, workers: int) -> None:
    doubled = store.get("set", data=["y", "x"], transform=lambda yx: yx[0] * 2, root=root)
    assert torch.equal(torch.cat([*DataLoader(doubled, 9, num_workers=workers)]), Y * 2)


@pytest.mark.parametrize("wrap", [lambda d: Subset(d, range(80)), lambda d: ConcatDataset([d, d])])
def test_a_state_of_a_part_of_a_set_wants_that_set(wrap: Any, root: Path) -> None:
    loader = DataLoader(wrap(store.get("set", data="y", root=root)), 4, seed=5)
    next(iter(loader))
    state = loader.state_dict()
    DataLoader(wrap(store.get("set", data="y", root=root)), 4, seed=5).load_state_dict(state)
    store.put({"y": Y.flip(0)}, "other", root=root)
    with pytest.raises(StateError, match="set_id"):
        DataLoader(wrap(store.get("other", data="y", root=root)), 4, seed=5).load_state_dict(state)


def test_lists_of_one_length_are_tensors(tmp_path: Path) -> None:
    frame = pd.DataFrame({"x": [np.arange(3, dtype=np.float32) + k for k in range(4)]})
    frame.to_parquet(tmp_path / "x.parquet")
    store.put(pq.read_table(tmp_path / "x.parquet"), tmp_path / "set")
    (batch,) = DataLoader(store.get(tmp_path / "set", data="x"), 4)
    assert torch.equal(batch, torch.arange(3.0) + torch.arange(4.0)[:, None])


def test_classes_are_names(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="classes must be names, got 0"):
        store.put({"x": X}, "set", root=tmp_path, classes=[0, 1])  # type: ignore[list-item]


def test_what_is_written_into_a_sample_or_a_column_does_not_reach_the_set(root: Path) -> None:
    dataset = store.get("set", data="x", root=root)
    dataset[0].fill_(7)
    assert torch.equal(dataset[0], X[0])
    dataset.column("x")[0].fill_(7)
    assert torch.equal(store.get("set", data="x", root=root)[0], X[0])


def test_names_that_are_not_there_are_answered_by_those_that_are(root: Path) -> None:
    with pytest.raises(KeyError, match=r"no column 'z'. Its columns are \['x', 'y'\]"):
        store.get("set", data="z", root=root)
    with pytest.raises(
        FileNotFoundError, match="the set 'sets' does not exist. The sets here are set"
    ):
        store.get("sets", root=root)
    for index in (100, -1):
        with pytest.raises(IndexError, match="expected indices from 0 to 99"):
            store.get("set", root=root)[index]
    with pytest.raises(FileExistsError, match="a set of this name exists"):
        store.put({"x": X}, "set", root=root)
    with pytest.raises(ValueError, match="the name of a set must have"):
        store.put({"x": X}, "my set", root=root)


def test_a_killed_writer_leaves_nothing_that_can_be_seen(tmp_path: Path) -> None:
    script = f"""
import torch
from fastload import store
def parts():
    yield {{"x": torch.zeros(10)}}
    print("written", flush=True)
    import time; time.sleep(60)
store.put(parts(), "set", root={str(tmp_path)!r})
"""
    with Python(["-c", script], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"written\n"
        assert collect(str(tmp_path)) == []  # its owner lives
        writer.send_signal(signal.SIGKILL)
    assert list(sets(str(tmp_path))) == []
    ((name, nbytes),) = collect(str(tmp_path))
    assert name.startswith("set-")
    assert nbytes > 80
    assert not list((tmp_path / ".unsealed").iterdir())
    store.put({"x": X}, "set", root=tmp_path)


def test_a_root_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fastload.store import root as root_module

    monkeypatch.delenv("FASTLOAD_STORE", raising=False)
    monkeypatch.setattr(root_module, "SHARED_MEMORY", str(tmp_path))
    path = root_module.open_root(None)
    assert (os.stat(path).st_mode & 0o777) == 0o700
    monkeypatch.setattr(root_module.os, "getuid", lambda: 12345)
    os.mkdir(root_module.default_root())
    with pytest.raises(PermissionError, match="belongs to another user"):
        root_module.open_root(None)


def test_each_user_makes_sets_of_a_root_of_another_in_a_folder_of_his_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in /tmp: the first user owns the folder that he made there."""
    store.put({"x": X}, tmp_path / "first")
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    store.put({"x": X}, tmp_path / "second")
    assert {".unsealed", ".unsealed-12345"} < {path.name for path in tmp_path.iterdir()}
    assert [found.name for found in sets(str(tmp_path))] == ["first", "second"]


def test_a_set_may_be_named_by_its_path(tmp_path: Path) -> None:
    store.put({"x": X}, tmp_path / "sets" / "mnist")
    assert (
        len(store.get(f"{tmp_path}/sets/mnist"))
        == len(store.get("mnist", root=tmp_path / "sets"))
        == 100
    )
    with pytest.raises(ValueError, match="either a path or root="):
        store.get(tmp_path / "sets" / "mnist", root=tmp_path)
    with pytest.raises(ValueError, match="the name of a set must have"):
        store.put({"x": X}, tmp_path / ".hidden")


# ---- a memory that is full ----

COUNT = 50_000  # 400 kB a part, five parts


def numbered(number: int) -> dict[str, Any]:
    return {"y": np.arange(number * COUNT, (number + 1) * COUNT)}


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


@pytest.mark.parametrize(
    "data",
    [
        lambda: {"y": np.arange(5 * COUNT)},
        lambda: map(numbered, range(5)),
        lambda: (pa.table(numbered(number)) for number in range(5)),
    ],
    ids=["mapping", "parts", "tables"],
)
def test_a_put_that_does_not_fit_gives_its_room_back(data: Callable[[], Any], memory: Path) -> None:
    said = r"needs [\d,]+ more bytes, but only [\d,]+ are free"
    with pytest.raises(StoreFullError, match=said) as full:
        store.put(data(), memory / "set")
    assert 0 <= full.value.free < full.value.needed == pickle.loads(pickle.dumps(full.value)).needed
    assert list(sets(str(memory))) == []
    assert shutil.disk_usage(memory).used <= 2**14, "folders only"
    subprocess.run(["mount", "-o", "remount,size=4m", memory], check=True)
    store.put(data(), memory / "set")
    dataset = store.get(memory / "set", data="y")
    assert torch.equal(torch.cat(dataset.column("y")), torch.arange(5 * COUNT))


@pytest.mark.slow  # Arrow copies 3 GB
def test_a_table_that_is_too_large_for_one_part_is_refused(tmp_path: Path) -> None:
    """A column of texts has offsets of 32 bits, so Arrow leaves such a table in chunks. These share their bytes."""
    size = 2**30 + 2**29
    offsets = pa.py_buffer(np.array([0, size], np.int32))
    chunk = pa.StringArray.from_buffers(1, offsets, pa.py_buffer(np.zeros(size, np.uint8)))
    with pytest.raises(ValueError, match=r"2 rows has more than 2 GiB in a column of texts"):
        store.put(pa.table({"x": pa.chunked_array([chunk, chunk])}), "a", root=tmp_path)
    pa.default_memory_pool().release_unused()  # Arrow keeps 3 GB for later, which other tests may lack
