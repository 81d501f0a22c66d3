"""Promises:
- A packed set gives back what went into it, in all modes, by position, with further columns. Sizes of records,
  batches and shards may be any.
- Threads, forks, copies and loaders share one set. Few files are open at once, and all are closed with the set.
- pyarrow, pandas and DuckDB read a packed set without fastload.
- A set may lie in a folder whose name is not UTF-8. A Parquet file with such a name is named. See also
  `tests/datasets/test_staging.py`.
- The length of a shard counts the further columns too.
- Reading ahead asks the kernel for the piece around a record that is not in memory, and changes no record. The page
  cache is simulated here.
"""

from __future__ import annotations

import copy
import errno
import io
import os
import pickle
import sys
import threading
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

pytest.importorskip("pyarrow")
import pyarrow as pa
import pyarrow.dataset

import fastload
from fastload.datasets import PackedDataset, PackedWriter, manifest
from fastload.datasets.packed.packing import pack
from fastload.errors import DecodeError, FileListError, PackedDataError
from fastload.image import RandomResizedCrop, ResizeCenterCrop
from tests.children import run_python

SIZES = [(4, 6), (7, 3), (1, 1), (9, 9), (2, 5)]


def pixels_of(number: int) -> Any:
    height, width = SIZES[number % len(SIZES)]
    return np.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=np.uint8)


def png(pixels: Any) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def write(path: Path, mode: Any, count: int = 20, **arguments: Any) -> Path:
    """A set of `count` images with labels 0 to 2, in shards of a few."""
    arguments = {"shard_bytes": 300, "classes": ["ant", "bee", "cat"], **arguments}
    with PackedWriter(path, mode=mode, **arguments) as writer:
        for number in range(count):
            pixels = pixels_of(number)
            sides = dict(zip(("height", "width"), pixels.shape, strict=False))
            writer.add(
                pixels.tobytes() if mode == "raw" else png(pixels),
                label=number % 3,
                source=f"{number}.png",
                **(sides if mode == "raw" else {}),
            )
    return path


@pytest.fixture(params=["encoded", "raw"])
def packed(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write(tmp_path / "set", request.param)


def test_images_and_labels_are_those_that_went_in(packed: Path) -> None:
    dataset = PackedDataset(packed)
    assert len(dataset) == 20
    assert len(list(packed.glob("shard-*.arrow"))) > 3
    for _ in range(2):
        for number in range(20):
            image, label = dataset[number]
            assert (type(image), image.mode, type(label)) == (Image.Image, "RGB", int)
            assert (np.asarray(image) == pixels_of(number)).all()
            assert label == number % 3
    assert dataset.targets.tolist() == [number % 3 for number in range(20)]
    assert dataset.classes == ["ant", "bee", "cat"]
    assert dataset.class_to_idx == {"ant": 0, "bee": 1, "cat": 2}


def test_a_plan_gives_what_it_gives_of_the_same_bytes_and_nothing_is_overwritten(
    packed: Path,
) -> None:
    # 3 x 2 pixels is what the plan cuts: where nothing is resized, it could hand out the reader's buffer.
    for plan in (ResizeCenterCrop(5, 5), ResizeCenterCrop((9, 9), (9, 9)), RandomResizedCrop(8)):
        dataset = PackedDataset(packed, transform=plan)
        got = []
        for number in range(20):
            with fastload.random_stream(seed=1, epoch=0, position=number, index=number):
                got.append(dataset[number][0])
        for number, tensor in enumerate(got):
            with fastload.random_stream(seed=1, epoch=0, position=number, index=number):
                pixels = pixels_of(number)
                expected = (
                    plan.resample(pixels)
                    if dataset.mode == "raw"
                    else plan.decode(png(pixels), name="")
                )
            assert tensor.dtype == torch.uint8
            assert torch.equal(tensor, expected)


def test_without_decoding_the_payload_is_bytes_or_pixels(packed: Path) -> None:
    dataset = PackedDataset(packed, decode=False)
    payload, _ = dataset[3]
    if dataset.mode == "raw":
        assert payload.shape == (9, 9, 3)
        payload[:] = 0  # it is the caller's own
    else:
        assert payload == png(pixels_of(3))
    assert dataset.read(3) == (
        pixels_of(3).tobytes() if dataset.mode == "raw" else png(pixels_of(3))
    )
    assert PackedDataset(packed, decode=False, transform=len)[3][0] == len(payload)
    seen = PackedDataset(packed, transform=lambda p: p.size, target_transform=str)
    assert seen[1] == ((3, 7), "1")


def test_any_bytes_can_be_packed_and_further_columns_come_with_the_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fastload.datasets.packed.writer.BATCH_RECORDS", 3)
    kind = pa.map_(pa.field("a", pa.string(), nullable=False), pa.field("b", pa.int32()))
    boxes = pa.list_(pa.float32())
    columns = {"caption": pa.string(), "boxes": boxes, "score": pa.float64(), "map": kind}
    payloads = [b"", b"\0", *(os.urandom(k) for k in range(50))]
    with PackedWriter(tmp_path / "s", mode="encoded", columns=columns, shard_bytes=300) as writer:
        for number, payload in enumerate(payloads):
            extras = {"caption": f"é{number}", "boxes": [0.5] * (number % 3), "score": None}
            extras["map"] = {"k": number}
            writer.add(memoryview(payload), label=-number, source="caf\udce9", **extras)
    dataset = PackedDataset(
        tmp_path / "s", decode=False, columns=["boxes", "caption", "score", "map"]
    )
    for number, payload in enumerate(payloads):
        expected = (payload, -number, [0.5] * (number % 3), f"é{number}", None, [("k", number)])
        assert dataset[number] == expected
    assert dataset.classes == []
    assert dataset.locate(0).endswith(r"shard-00000.arrow, record 0 (caf\xe9)")
    with pytest.raises(
        ValueError,
        match=r"has no extra columns \['age'\]. Its extra columns are \['caption', 'boxes'",
    ):
        PackedDataset(tmp_path / "s", columns=["age"])
    for bad in ("caption", ["payload"], ["label"]):
        with pytest.raises(ValueError, match="has no extra columns"):
            PackedDataset(tmp_path / "s", columns=bad)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (pa.string(), "é" * 250),
        (pa.binary(), bytes(500)),
        (pa.list_(pa.float64()), [0.5] * 63),
        (pa.list_(pa.list_(pa.int64())), [[1, 2]] * 32),
        (pa.list_(pa.float32()), np.zeros(125, np.float32)),
        (pa.struct({"a": pa.string(), "b": pa.int64()}), {"a": "x" * 492, "b": 7}),
    ],
    ids=str,
)
def test_a_shard_s_length_counts_the_further_columns_too(
    tmp_path: Path, kind: pa.DataType, value: Any
) -> None:
    """Half a kilobyte in each, and nearly nothing in the payload: four of them are two thousand bytes."""
    with PackedWriter(
        tmp_path / "s", mode="encoded", columns={"more": kind}, shard_bytes=2000
    ) as writer:
        for number in range(9):
            writer.add(b"", label=number, more=value)
    rows = [shard.rows for shard in manifest.read_index(str(tmp_path / "s")).shards]
    assert rows == [4, 4, 1]


@given(
    records=st.lists(
        st.tuples(st.binary(max_size=300), st.integers(-(2**63), 2**63 - 1)), min_size=1
    ),
    shard_bytes=st.integers(1, 1000),
    batch_records=st.integers(1, 9),
)
def test_whatever_the_sizes_of_records_batches_and_shards(
    tmp_path_factory: pytest.TempPathFactory,
    records: list[tuple[bytes, int]],
    shard_bytes: int,
    batch_records: int,
) -> None:
    path = tmp_path_factory.mktemp("sets") / "s"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fastload.datasets.packed.writer.BATCH_RECORDS", batch_records)
        with PackedWriter(path, mode="encoded", shard_bytes=shard_bytes) as writer:
            for payload, label in records:
                writer.add(payload, label=label)
                assert writer.records <= len(records)
    dataset = PackedDataset(path, decode=False)
    assert [dataset[k] for k in range(len(dataset))] == records
    assert dataset.targets.tolist() == [label for _, label in records]
    index = manifest.read_index(str(path))
    assert manifest.parse_index(str(path), manifest.dump_index(index)) == index


def test_arguments_that_cannot_be_are_refused(packed: Path) -> None:
    dataset = PackedDataset(packed)
    for index in (-1, 20, 10**20):
        with pytest.raises(IndexError, match=r"sample -?\d+ of .* expected 0 to 19"):
            dataset[index]
    assert dataset[np.int64(1)][1] == 1
    with pytest.raises(FileNotFoundError, match="holds no set"):
        PackedDataset(packed / "nothing")


def test_an_image_that_cannot_be_decoded_is_named_by_shard_record_and_source(
    tmp_path: Path,
) -> None:
    path = tmp_path / "s"
    with PackedWriter(path, mode="encoded") as writer:
        writer.add(png(pixels_of(0)), label=0, source="a/good.png")
        writer.add(b"no image", label=0, source="a/bad.png")
    for transform in (None, RandomResizedCrop(8)):
        dataset = PackedDataset(path, transform=transform)
        dataset[0]
        with pytest.raises(DecodeError) as caught:
            dataset[1]
        assert caught.value.path == f"{path}/shard-00000.arrow, record 1 (a/bad.png)"
        with (
            fastload.DataLoader(dataset, 2, collate_fn=list, num_workers=1) as loader,
            pytest.raises(DecodeError) as caught,
        ):
            next(iter(loader))
        assert "record 1 (a/bad.png)" in "".join(caught.value.__notes__)


# ---- one set, many readers ----


def test_it_pickles_copies_and_says_what_it_is(packed: Path) -> None:
    dataset = PackedDataset(packed, transform=np.asarray)
    first = dataset[0][0]
    mode = dataset.mode
    expected = f"PackedDataset('{packed}': 20 records, 3 classes, {mode})"
    for twin in (pickle.loads(pickle.dumps(dataset)), copy.deepcopy(dataset), copy.copy(dataset)):
        assert repr(twin) == repr(dataset) == expected
        assert (twin[0][0] == first).all()
    assert len(pickle.dumps(dataset)) < 10_000  # no file, no table, no record


def test_files_are_opened_late_and_closed_with_the_dataset(packed: Path) -> None:
    def opened() -> int:
        return sum(
            str(packed) in os.path.realpath(f"/proc/self/fd/{n}")
            for n in os.listdir("/proc/self/fd")
        )

    dataset = PackedDataset(packed)
    assert opened() == 0
    dataset[0]
    assert 1 <= opened() <= 2
    dataset.targets  # noqa: B018
    assert opened() > 3
    dataset.close()
    assert opened() == 0
    dataset[0]
    del dataset
    assert opened() == 0


def test_of_many_shards_few_are_open_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "s", "encoded", 40, shard_bytes=1)
    monkeypatch.setattr("resource.getrlimit", lambda _: (20, 20))
    dataset = PackedDataset(path, transform=np.asarray)
    for number in [*range(40), *range(39, -1, -1)]:
        assert (dataset[number][0] == pixels_of(number)).all()
        held = [
            n
            for n in os.listdir("/proc/self/fd")
            if "shard-" in os.path.realpath(f"/proc/self/fd/{n}")
        ]
        assert len(held) <= 16


def test_threads_read_at_once_without_mixing_up_their_records(packed: Path) -> None:
    """More files than may be open, first reads and reads again, in eight threads that switch often."""
    dataset = PackedDataset(packed, decode=False)
    dataset._shards._files = [None, None]
    expected = [dataset.read(k) for k in range(20)]
    dataset.close()
    dataset._shards._files = [None, None]
    wrong: list[Any] = []
    barrier = threading.Barrier(8)

    def read(seed: int) -> None:
        barrier.wait()
        for k in np.random.default_rng(seed).integers(0, 20, 200).tolist():
            if dataset.read(k) != expected[k]:
                wrong.append(k)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=read, args=(seed,)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert not wrong


@pytest.mark.parametrize(
    ("method", "mode"), [("thread", "encoded"), ("process", "raw"), ("torch", "encoded")]
)
def test_loaders_of_all_methods_give_each_record_once(
    method: Any, mode: str, tmp_path: Path
) -> None:
    dataset = PackedDataset(
        write(tmp_path / "set", mode), transform=lambda p: int(np.asarray(p).sum())
    )
    dataset[0]  # a fork inherits what is open
    expected = sorted(int(pixels_of(k).sum()) for k in range(20))
    with fastload.DataLoader(
        dataset,
        4,
        shuffle=True,
        num_workers=2,
        worker_method=method,
        collate_fn=list,
        multiprocessing_context="fork" if method == "torch" else None,  # the lambda is no pickle
    ) as loader:
        assert sorted(total for batch in loader for total, _ in batch) == expected


def test_a_short_read_is_read_on(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, counts = os.preadv, cycle([1, 7, 3])

    def short(fd: int, buffers: Any, offset: int) -> int:
        return real(fd, [buffers[0][: next(counts)]], offset)

    monkeypatch.setattr("os.preadv", short)
    dataset = PackedDataset(packed, transform=np.array)
    assert (dataset[5][0] == pixels_of(5)).all()


@pytest.mark.parametrize("refusal", [errno.EAGAIN, errno.EOPNOTSUPP, 0])
def test_reading_ahead_asks_for_the_piece_around_what_is_not_in_memory(
    packed: Path, monkeypatch: pytest.MonkeyPatch, refusal: int
) -> None:
    """Simulated: the kernel has nothing (or, refusal 0, half a record) in memory before the advice, then all."""
    real, asked = os.preadv, []
    cached: set[int] = set()

    def preadv(fd: int, buffers: Any, offset: int, flags: int = 0) -> int:
        if not flags or offset in cached:
            return real(fd, buffers, offset)
        if refusal:
            raise OSError(refusal, os.strerror(refusal))
        return len(buffers[0]) // 2

    def advise(fd: int, offset: int, length: int, advice: int) -> None:
        asked.append((offset, length, advice))

    dataset = PackedDataset(packed, transform=np.asarray, read_ahead_bytes=64)
    table = dataset._shards.table(0)
    begin, length = table.begins[1].item(), table.lengths[1].item()
    monkeypatch.setattr("os.preadv", preadv)
    monkeypatch.setattr("os.posix_fadvise", advise)
    for _ in range(2):
        assert (dataset[1][0] == pixels_of(1)).all()
        cached.add(begin)
    piece = begin // 64 * 64
    assert asked == [(piece, max(64, begin + length - piece), os.POSIX_FADV_WILLNEED)]
    with pytest.raises(ValueError, match="read_ahead_bytes must be 0 or more, got -1"):
        PackedDataset(packed, read_ahead_bytes=-1)


def test_reading_ahead_changes_no_record(packed: Path) -> None:
    dataset = PackedDataset(packed, transform=np.asarray, read_ahead_bytes=1000)
    for path in packed.glob("*.arrow"):
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    for number in range(20):
        assert (dataset[number][0] == pixels_of(number)).all()


def test_an_error_of_the_disk_names_the_file(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = PackedDataset(packed)
    dataset.targets  # noqa: B018

    def fail(*_: Any) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("os.preadv", fail)
    with pytest.raises(OSError, match="Input/output error") as caught:
        dataset[0]
    assert caught.value.filename == str(packed / "shard-00000.arrow")


@pytest.mark.parametrize("mode", ["encoded", "raw"])
def test_a_record_is_read_without_pillow_and_does_not_import_pandas(
    tmp_path: Path, mode: Any
) -> None:
    """As pyarrow does by itself where pandas is installed: time that the first sample is blamed for."""
    path = write(tmp_path / "s", mode, count=5)
    code = (
        "import sys; sys.modules['PIL'] = sys.modules['torchvision'] = None\n"
        "from fastload.datasets import PackedDataset\n"
        f"dataset = PackedDataset({str(path)!r}, decode=False)\n"
        "assert dataset[4][1] == dataset.targets[4] == 1\n"
        "assert 'pandas' not in sys.modules"  # and the set is open when the interpreter ends
    )
    run = run_python("-c", code)
    assert (run.returncode, run.stderr) == (0, "")


# ---- writing ----


@pytest.mark.parametrize(
    ("settings", "record", "message"),
    [
        ({"columns": {"label": pa.string()}}, {}, "cannot be named 'label'"),
        ({"columns": {"d": pa.dictionary(pa.int32(), pa.string())}}, {}, "Cast the column to str"),
        ({"mode": "zip"}, {}, "mode must be one of"),
        ({"classes": [0, 1]}, {}, "classes must be names"),
        ({"made": {1: 2}}, {}, "made must be JSON values"),
        ({}, {"label": None}, "label must be an integer"),
        ({}, {"label": 1.5}, "label must be an integer"),
        ({}, {"label": 2**63}, "label must be an integer"),
        ({}, {"age": 3}, r"expected values for the columns \[\], got \['age'\]"),
        ({"mode": "raw"}, {"height": 0, "width": 5}, "height and width must be in 1"),
        ({"mode": "raw"}, {"height": 1, "width": 2**21}, "height and width must be in 1"),
        ({"mode": "raw"}, {"height": 2, "width": 2}, "got 0 bytes for 2 x 2 pixels of 3 bytes"),
        ({"mode": "raw"}, {}, "give height and width in mode"),
    ],
)
def test_what_a_reader_would_refuse_is_not_written(
    tmp_path: Path, settings: Any, record: Any, message: str
) -> None:
    def write() -> None:
        with PackedWriter(tmp_path / "s", **{"mode": "encoded", **settings}) as writer:
            writer.add(b"", source="a.jpg", **{"label": 0, **record})

    with pytest.raises(ValueError, match=message):
        write()
    assert not (tmp_path / "s" / "index.json").exists()


# ---- other tools ----


@pytest.fixture
def captioned(tmp_path: Path) -> Path:
    path = tmp_path / "set"
    with PackedWriter(
        path, mode="encoded", columns={"caption": pa.string()}, shard_bytes=200
    ) as writer:
        for number in range(20):
            writer.add(bytes([number]) * number, label=number % 3, caption=f"no. {number}")
    return path


def test_pyarrow_reads_it(captioned: Path) -> None:
    files = sorted(map(str, captioned.glob("*.arrow")))
    table = pyarrow.dataset.dataset(files, format="arrow").to_table()
    assert table.column_names == ["payload", "label", "source", "checksum", "caption"]
    assert table["payload"].to_pylist() == [bytes([k]) * k for k in range(20)]
    with pa.ipc.open_file(files[0]) as shard:
        assert b'"mode": "encoded"' in shard.schema.metadata[b"fastload"]
        batch = shard.get_batch(0)
    # Aligned and padded as Arrow asks for, and nothing is compressed: a memory map needs no copy.
    with pa.memory_map(files[0]) as mapped:
        base = mapped.read_buffer()
        mapped.seek(0)
        payload = pa.ipc.open_file(mapped).get_batch(0).column("payload").buffers()[2]
        assert base.address < payload.address < base.address + base.size
        assert (payload.address - base.address) % 8 == 0
    assert batch.num_rows > 1


def test_pandas_reads_it(captioned: Path) -> None:
    pd = pytest.importorskip("pandas")
    frames = [pd.read_feather(path) for path in sorted(captioned.glob("*.arrow"))]
    frame = pd.concat(frames, ignore_index=True)
    assert frame["label"].tolist() == [k % 3 for k in range(20)]
    assert frame["payload"][7] == b"\7" * 7


def test_duckdb_reads_it(captioned: Path) -> None:
    duckdb = pytest.importorskip("duckdb")
    shards = pyarrow.dataset.dataset(captioned, format="arrow", exclude_invalid_files=True)
    with duckdb.connect() as connection:
        connection.register("shards", shards)
        rows = connection.sql(
            "select label, count(*), sum(octet_length(payload)) from shards group by 1 order by 1"
        ).fetchall()
    expected = [(c, len(range(c, 20, 3)), sum(range(c, 20, 3))) for c in range(3)]
    assert rows == expected


def test_a_payload_is_taken_as_it_is_when_it_is_added(tmp_path: Path) -> None:
    memory = bytearray(b"first")
    with PackedWriter(tmp_path / "s", mode="encoded") as writer:
        writer.add(memoryview(memory), label=0)
        memory[:] = b"other"  # the caller uses its buffer again
        writer.add(memoryview(np.arange(3, dtype=np.int32)), label=1)  # 3 elements, 12 bytes
    dataset = PackedDataset(tmp_path / "s", decode=False)
    assert [dataset[k][0] for k in range(2)] == [b"first", np.arange(3, dtype=np.int32).tobytes()]


def test_decoding_is_a_stage_with_any_transform(packed: Path) -> None:
    dataset = PackedDataset(packed, transform=np.array)
    with fastload.DataLoader(dataset, num_workers=1) as loader:
        list(loader)
        stages = loader.stats().stages
    assert {"read", "transform"} <= set(stages)
    assert ("decode" in stages) == (dataset.mode != "raw")


def test_a_shard_that_was_replaced_is_not_read_with_the_old_table(tmp_path: Path) -> None:
    for name, byte in (("a", b"\1"), ("b", b"\2")):
        with PackedWriter(tmp_path / name, mode="encoded", shard_bytes=1) as writer:
            for label in range(3):
                writer.add(byte * 100, label=label)
    dataset = PackedDataset(tmp_path / "a", decode=False)
    dataset._shards._files = [
        None
    ]  # room for one open shard, as where there are more than may be open
    assert [dataset[k][0] for k in range(3)] == [b"\1" * 100] * 3
    for shard in (tmp_path / "b").glob("*.arrow"):
        os.replace(shard, tmp_path / "a" / shard.name)
    with pytest.raises(PackedDataError, match=r"shard-00000.arrow.*replaced"):
        dataset[0]


def test_nothing_is_added_to_a_set_that_is_complete(tmp_path: Path) -> None:
    with PackedWriter(tmp_path / "s", mode="encoded") as writer:
        writer.add(b"a", label=0)
        writer.finish()
        with pytest.raises(ValueError, match="closed"):
            writer.add(b"b", label=0)


def test_a_set_in_a_folder_whose_name_is_not_utf8(tmp_path: Path) -> None:
    """Arrow opens no such name."""
    path = write(tmp_path / os.fsdecode(b"caf\xe9"), "encoded")
    dataset = PackedDataset(path)
    assert len(dataset) == 20
    assert np.array_equal(np.asarray(dataset[3][0]), pixels_of(3))
    dataset.close()


def test_a_parquet_file_whose_name_is_not_utf8_is_named(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"caf\xe9.parquet")
    path.touch()
    with pytest.raises(FileListError, match=r"not UTF-8.*caf\\udce9.parquet"):
        pack(path, tmp_path / "out")
