"""Promises:
- Row `i` of one Parquet file or many is what pyarrow reads there, bit by bit, for any dtype, list and fixed shape.
- Batches of Parquet rows are those of torch's collate, for 0, 2 and 8 workers, for ranks, and after a resume.
- A null in a Parquet file is an error in its place with file, row and column.
- A Parquet type that cannot be read, and a file with other columns, are named.
- Workers decode a row group of a Parquet file once while it fits. At most `cache_bytes` are kept, and the newest row
  group in any case.
- A decoder of Parquet files that failed or was forked leaves no thread waiting.
- A Parquet file that is cut off, replaced, changed or deleted while in use is an error, never other data. A flipped
  bit is too, under a page checksum.
"""

from __future__ import annotations

import copy
import datetime
import decimal
import os
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data import default_collate

from fastload import DataLoader
from fastload.datasets import ParquetDataset
from fastload.datasets.arrow_columns import Column
from fastload.datasets.row_groups import ParquetPart, RowGroup, RowGroupCache
from fastload.errors import ParquetError, StateError
from tests.contracts.filled_rows import FilledRows, Source

N = 97
X = np.random.default_rng(0).normal(size=(N, 2, 3)).astype(np.float32)
DTYPES = ["bool", "uint8", "int16", "uint16", "int64", "uint64", "float16", "float32", "float64"]


def table(n: int = N) -> pa.Table:
    rows = list(range(n))
    tensors = pa.FixedShapeTensorArray.from_numpy_ndarray(X[:n])
    return pa.table(
        {
            "id": pa.array(rows, pa.int64()),
            "x": tensors,
            "flag": pa.array([k % 3 == 0 for k in rows]),
            "pair": pa.array([[k, -k] for k in rows], pa.list_(pa.int16(), 2)),
            "same": pa.array([[k, k + 1, k + 2] for k in rows], pa.list_(pa.float64())),
            "ragged": pa.array([[k] * (k % 4) for k in rows], pa.list_(pa.int32())),
            "text": [f"row {k}" for k in rows],
            "data": [bytes([k]) for k in rows],
            "word": pa.array([f"w{k % 5}" for k in rows]).dictionary_encode(),
            "code": pa.array([k % 5 for k in rows]).dictionary_encode(),
        }
    )


def write(path: Path, value: pa.Table, size: int = 10) -> Path:
    pq.write_table(value, path, row_group_size=size, write_page_checksum=True)
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write(tmp_path / "all.parquet", table())


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        same = a.dtype == b.dtype and a.shape == b.shape
        return same and a.contiguous().numpy().tobytes() == b.contiguous().numpy().tobytes()
    if isinstance(a, dict):
        return list(a) == list(b) and all(equal(a[name], b[name]) for name in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal, a, b))
    return type(a) is type(b) and bool(a == b)


def drain(loader: Any) -> list[Any]:
    with loader:
        return list(loader)


def test_numbers_have_the_bits_and_the_dtype_of_the_file(tmp_path: Path) -> None:
    columns, expected = {}, {}
    for dtype in DTYPES:
        bits = np.random.default_rng(1).integers(0, 256, (40, 24), np.uint8)
        bits = bits & 1 if dtype == "bool" else bits
        values = np.ascontiguousarray(np.ascontiguousarray(bits).view(dtype)[:, :3])
        columns[dtype] = pa.array(values[:, 0])
        flat = pa.array(values.reshape(-1))
        columns[f"{dtype}[3]"] = pa.FixedSizeListArray.from_arrays(flat, 3)
        expected[dtype] = torch.from_numpy(values[:, 0].copy())
        expected[f"{dtype}[3]"] = torch.from_numpy(values)
    dataset = ParquetDataset(write(tmp_path / "a.parquet", pa.table(columns), 7))
    for k in range(40):
        assert equal(dataset[k], {name: values[k] for name, values in expected.items()})
    assert equal(drain(DataLoader(dataset, batch_size=40, num_workers=2)), [expected])


def test_every_kind_of_column_is_as_pyarrow_has_it(file: Path) -> None:
    dataset = ParquetDataset(file)
    assert len(dataset) == N
    assert dataset.schema.names == table().schema.names
    samples = dataset.__getitems__([*range(N - 1, -1, -1)])[::-1]
    for k, (sample, row) in enumerate(zip(samples, table().to_pylist(), strict=True)):
        assert equal(sample, dataset[k])
        assert equal(sample["x"], torch.from_numpy(X[k]))
        assert equal(sample["id"], torch.tensor(k))
        assert equal(sample["flag"], torch.tensor(k % 3 == 0))
        assert equal(sample["pair"], torch.tensor([k, -k], dtype=torch.int16))
        assert equal(sample["same"], torch.tensor([k, k + 1, k + 2], dtype=torch.float64))
        assert equal(sample["ragged"], torch.tensor(row["ragged"], dtype=torch.int32))
        assert equal(sample["code"], torch.tensor(k % 5))
        assert [sample[name] for name in ("text", "data", "word")] == [
            row[name] for name in ("text", "data", "word")
        ]


def test_a_tensor_with_its_axes_permuted_has_its_logical_shape(tmp_path: Path) -> None:
    storage = pa.FixedShapeTensorArray.from_numpy_ndarray(X).storage
    kind = pa.fixed_shape_tensor(pa.float32(), [2, 3], permutation=[1, 0])
    column = pa.ExtensionArray.from_storage(kind, storage)
    path = write(tmp_path / "a.parquet", pa.table({"x": column}))
    assert equal(ParquetDataset(path, columns="x")[5], torch.from_numpy(X[5].T.copy()))


def test_samples_have_the_columns_that_were_asked_for(file: Path) -> None:
    assert equal(ParquetDataset(file, columns="id")[3], torch.tensor(3))
    pair = (torch.tensor(3), torch.tensor(True))
    assert equal(ParquetDataset(file, columns=["id", "flag"])[3], pair)
    assert equal(ParquetDataset(file, columns="id", label="flag")[3], pair)
    assert equal(ParquetDataset(file, columns=["id"], label="id")[3], (pair[:1], pair[0]))
    data, label = ParquetDataset(file, label="text")[3]
    assert "text" not in data
    assert label == "row 3"
    with pytest.raises(KeyError, match="no column 'y'"):
        ParquetDataset(file, columns=["id", "y"])
    for index in (-1, N):
        with pytest.raises(IndexError, match=f"expected indices from 0 to {N - 1}"):
            ParquetDataset(file)[index]


class TestRows(FilledRows):
    @pytest.fixture(params=[["x", "flag", "same"], "id"], ids=str)
    def source(self, request: pytest.FixtureRequest, tmp_path: Path) -> Source:
        file = write(tmp_path / "some.parquet", table(24))
        return lambda: ParquetDataset(file, columns=request.param, label="id", cache_bytes=1000)


@pytest.mark.parametrize("workers", [0, 2, 8])
def test_batches_with_text_are_those_of_torch_s_collate(workers: int, file: Path) -> None:
    dataset = ParquetDataset(file, columns=["x", "text", "id"], label="pair", cache_bytes=1000)
    loader = DataLoader(dataset, batch_size=16, shuffle=True, num_workers=workers, seed=3)
    batches = drain(loader)
    ids = torch.cat([labels[:, 0] for _, labels in batches]).tolist()
    assert sorted(ids) == [*range(N)]
    again = [default_collate([dataset[k] for k in ids[n : n + 16]]) for n in range(0, N, 16)]
    assert equal(batches, again)


def test_a_state_is_refused_for_other_files(file: Path, tmp_path: Path) -> None:
    def loader(path: Path) -> DataLoader[Any]:
        return DataLoader(ParquetDataset(path, columns="id"), batch_size=8, seed=5)

    state = loader(file).state_dict()
    loader(file).load_state_dict(state)
    with pytest.raises(StateError, match="set_id"):
        loader(write(tmp_path / "other.parquet", table(), 20)).load_state_dict(state)


# ---- many files ----


def test_files_follow_each_other(tmp_path: Path) -> None:
    whole = table()
    for name, begin, end in [("b", 50, 97), ("a", 0, 50), ("c", 97, 97)]:
        write(tmp_path / f"{name}.parquet", whole.slice(begin, end - begin))
    (tmp_path / "readme.txt").touch()
    dataset = ParquetDataset(tmp_path, columns="id", label="x")
    assert [os.path.basename(file) for file in dataset.files] == [f"{c}.parquet" for c in "abc"]
    ids, xs = (torch.cat(part) for part in zip(*drain(DataLoader(dataset, 9)), strict=True))
    assert ids.tolist() == [*range(N)]
    assert equal(xs, torch.from_numpy(X))
    listed = ParquetDataset([tmp_path / "b.parquet", tmp_path / "a.parquet"], columns="id")
    assert int(listed[0]) == 50
    assert int(listed[47]) == 0
    assert listed.locate(47) == f"{tmp_path / 'a.parquet'}, row 0"


def test_no_files_and_no_file_are_said(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"the folder has no \*.parquet files"):
        ParquetDataset(tmp_path)
    with pytest.raises(FileNotFoundError):
        ParquetDataset(tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="empty list"):
        ParquetDataset([])


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"a": pa.array([1.0])}, "column 'a' has type double, but has type int64"),
        ({"b": [1]}, "column 'a' is missing"),
        ({"a": [1], "b": [1]}, "column 'b' has type int64, but is missing"),
    ],
)
def test_a_file_with_other_columns_is_named(
    other: dict[str, Any], said: str, tmp_path: Path
) -> None:
    write(tmp_path / "a.parquet", pa.table({"a": [1]}))
    write(tmp_path / "b.parquet", pa.table(other))
    with pytest.raises(ParquetError, match=f"b.parquet: {said}"):
        ParquetDataset(tmp_path)


def test_a_type_without_tensors_is_named_if_it_is_read(tmp_path: Path) -> None:
    columns = {
        "when": [datetime.datetime(2026, 1, 1)],
        "price": [decimal.Decimal("1.5")],
        "struct": [{"a": 1}],
        "words": [["a"]],
        "matrix": [[[1, 2], [3, 4]]],
    }
    path = write(tmp_path / "a.parquet", pa.table({"a": [1], **columns}))
    for name in columns:
        with pytest.raises(
            TypeError, match=f"column '{name}' has type .*or leave it out with columns="
        ):
            ParquetDataset(path, columns=["a", name])
    assert equal(ParquetDataset(path, columns="a")[0], torch.tensor(1))


# ---- nulls ----


def nulls(tmp_path: Path) -> Path:
    columns = {
        "a": pa.array([1, 2, None, 4]),
        "f": pa.array([1.0, None, 3.0, 4.0], pa.float16()),
        "b": pa.array([True, None, False, True]),
        "pair": pa.array([[1, 2], [3, None], [5, 6], [7, 8]], pa.list_(pa.int8(), 2)),
        "list": pa.array([[1, 2], [None], [3, 4], None], pa.list_(pa.int8())),
        "text": ["a", None, "c", "d"],
        "word": pa.array(["a", None, "c", "d"]).dictionary_encode(),
    }
    return write(tmp_path / "n.parquet", pa.table(columns), 3)


@pytest.mark.parametrize(
    ("column", "row"),
    [("a", 2), ("f", 1), ("b", 1), ("pair", 1), ("list", 3), ("text", 1), ("word", 1)],
)
def test_a_null_is_named_as_its_row_is_read(column: str, row: int, tmp_path: Path) -> None:
    path = nulls(tmp_path)
    dataset = ParquetDataset(path, columns=column)
    assert dataset[0] is not None
    said = f"n.parquet, row {row}, column '{column}': expected a value, found null"
    with pytest.raises(ParquetError, match=said):
        dataset[row]
    loader = DataLoader(dataset, batch_size=None, num_workers=2, on_error="skip")
    skipped = 2 if column == "list" else 1
    assert len(drain(loader)) == 4 - skipped


def test_lists_of_several_lengths_fail_as_torch_says(file: Path) -> None:
    dataset = ParquetDataset(file, columns="ragged")
    with pytest.raises(RuntimeError, match="stack expects each tensor to be equal size"):
        drain(DataLoader(dataset, batch_size=5, num_workers=2))
    lists = drain(DataLoader(dataset, batch_size=5, num_workers=2, collate_fn=list))
    assert [row.tolist() for batch in lists for row in batch] == [[k] * (k % 4) for k in range(N)]


# ---- the cache ----


@pytest.mark.parametrize("limit", [0, 500, 1 << 20])
def test_what_is_kept_is_bounded(limit: int, file: Path) -> None:
    dataset = ParquetDataset(file, columns="id", cache_bytes=limit)  # a row group has 80 bytes
    order = np.random.default_rng(2).permutation(N).tolist()
    for k in order:
        assert int(dataset[k]) == k
        assert dataset._cache.nbytes <= max(limit, 80)
    loader = DataLoader(dataset, batch_size=4, sampler=order, num_workers=8)
    assert torch.cat(drain(loader)).tolist() == order
    assert dataset._cache.nbytes <= max(limit, 8 * 80)


def test_the_workers_decode_each_row_group_once(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[int] = []
    read = ParquetPart.read

    def counted(self: ParquetPart, number: int, names: Any) -> RowGroup:
        decoded.append(number)
        return read(self, number, names)

    monkeypatch.setattr(ParquetPart, "read", counted)
    dataset = ParquetDataset(file, columns="id")
    for _ in range(2):
        drain(DataLoader(dataset, batch_size=2, shuffle=True, num_workers=8))
    assert sorted(decoded) == [*range(10)]


def of_bytes(count: int) -> RowGroup:
    return {"x": Column(torch.zeros(count, dtype=torch.uint8), None)}


def test_threads_wait_for_the_one_that_decodes_and_try_again_if_it_fails() -> None:
    cache, group = RowGroupCache(100), of_bytes(10)
    inside, go = threading.Event(), threading.Event()
    calls: list[str] = []
    found: list[Any] = []

    def fails() -> RowGroup:
        calls.append("fails")
        inside.set()
        assert go.wait(10)
        raise OSError("first")

    def works() -> RowGroup:
        calls.append("works")
        return group

    def read(decode: Callable[[], RowGroup]) -> None:
        try:
            found.append(cache.get(0, decode))
        except OSError as error:
            found.append(str(error))

    threads = [threading.Thread(target=read, args=(fails,))]
    threads[0].start()
    assert inside.wait(10)
    threads += [threading.Thread(target=read, args=(works,)) for _ in range(4)]
    for thread in threads[1:]:
        thread.start()
    assert not found
    go.set()
    for thread in threads:
        thread.join(10)
    assert calls == ["fails", "works"]
    assert found.count("first") == 1
    assert sum(each is group for each in found) == 4


@pytest.mark.parametrize("way", [copy.deepcopy, lambda d: pickle.loads(pickle.dumps(d))])
def test_copies_begin_with_nothing_kept(way: Callable[[Any], Any], file: Path) -> None:
    dataset = ParquetDataset(file, columns="x", label="id")
    assert len(pickle.dumps(dataset)) < 20_000
    assert dataset[3] is not None
    again = way(dataset)
    assert again._cache.nbytes == 0
    assert equal([*map(again.__getitem__, range(20))], [*map(dataset.__getitem__, range(20))])


def test_a_pickled_dataset_reads_columns_of_unsigned_integers(tmp_path: Path) -> None:
    path = tmp_path / "unsigned.parquet"
    kinds = "uint8", "uint16", "uint32", "uint64"  # torch cannot pickle tensors of the last three
    pq.write_table(pa.table({kind: pa.array([7], kind) for kind in kinds}), path)
    again = pickle.loads(pickle.dumps(ParquetDataset(path)))
    assert {kind: int(value) for kind, value in again[0].items()} == dict.fromkeys(kinds, 7)


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_torch_s_worker_processes_read_it(method: str, file: Path) -> None:
    dataset = ParquetDataset(file, columns="id")
    assert int(dataset[0]) == 0
    workers = 2 if method == "fork" else 1  # a spawned one imports torch for seconds
    loader = torch.utils.data.DataLoader(
        dataset, 9, num_workers=workers, multiprocessing_context=method
    )
    assert torch.cat([*loader]).tolist() == [*range(N)]


def test_a_fork_while_a_thread_decodes_leaves_no_child_waiting(file: Path) -> None:
    cache = RowGroupCache(100)
    inside, go = threading.Event(), threading.Event()

    def slow() -> RowGroup:
        inside.set()
        assert go.wait(30)
        return of_bytes(1)

    thread = threading.Thread(target=cache.get, args=(0, slow))
    thread.start()
    assert inside.wait(10)
    child = os.fork()
    if not child:
        os._exit(0 if len(cache.get(0, lambda: of_bytes(2))["x"].values) == 2 else 1)
    _, status = os.waitpid(child, 0)
    go.set()
    thread.join()
    assert status == 0


# ---- damage ----


def test_a_file_cut_off_is_refused(file: Path) -> None:
    content = file.read_bytes()
    for length in (0, 3, 100, len(content) // 2, len(content) - 1):
        file.write_bytes(content[:length])
        with pytest.raises(ParquetError, match="all.parquet: expected a footer"):
            ParquetDataset(file)


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def replace(file: Path) -> None:
    other = file.with_name("new")
    write(other, table().slice(1))
    os.replace(other, file)


def touch(file: Path) -> None:
    os.utime(file, ns=(0, 0))


@pytest.mark.parametrize(("change", "workers"), [(cut, 0), (replace, 2), (touch, 2)])
def test_a_file_changed_meanwhile_is_an_error(
    change: Callable[[Path], None], workers: int, file: Path
) -> None:
    dataset = ParquetDataset(file, columns="id")
    assert int(dataset[0]) == 0
    change(file)
    assert int(dataset[1]) == 1  # kept, and of the file as it was
    with pytest.raises(ParquetError, match="all.parquet: the file was replaced or changed"):
        dataset[50]
    loader = DataLoader(dataset, batch_size=10, num_workers=workers)
    with loader:
        batches = iter(loader)
        assert next(batches).tolist() == [*range(10)]
        with pytest.raises(ParquetError, match="replaced or changed"):
            next(batches)


def test_a_file_deleted_meanwhile_is_named(file: Path) -> None:
    dataset = ParquetDataset(file, columns="id")
    file.unlink()
    with pytest.raises(FileNotFoundError, match="all.parquet"):
        dataset[0]


def test_a_flipped_bit_is_named_with_its_row_group(file: Path) -> None:
    column = pq.read_metadata(file).row_group(4).column(0)
    content = bytearray(file.read_bytes())
    content[column.data_page_offset + column.total_compressed_size // 2] ^= 4
    file.write_bytes(content)
    dataset = ParquetDataset(file, columns="id")
    assert int(dataset[39]) == 39
    with pytest.raises(ParquetError, match="all.parquet: row group 4: expected 10 rows"):
        dataset[45]
    assert int(dataset[50]) == 50
    loader = DataLoader(dataset, batch_size=20, num_workers=2, on_error="skip", max_errors=20)
    seen = torch.cat(drain(loader)).tolist()
    assert seen == [k for k in range(N) if not 40 <= k < 50]


def test_another_content_of_the_same_size_is_another_set(tmp_path: Path) -> None:
    ids = set()
    for value in (1.0, 2.0, 1.0):
        pq.write_table(pa.table({"x": [value] * 100}), tmp_path / "x.parquet")
        ids.add(ParquetDataset(tmp_path / "x.parquet").set_id)
    assert len(ids) == 2
