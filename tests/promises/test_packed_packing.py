"""Promises:
- A packing that is killed, interrupted or out of disk at any call that writes leaves no set. Running it again gives
  the same bytes.
- Any number of workers packs the same bytes into a set.
- A folder is read as a folder and a file as a file, also if its name ends in `.parquet`.
"""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("PIL")
pytest.importorskip("pyarrow")
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from fastload.datasets import PackedDataset, PackedWriter
from fastload.datasets.packed.packing import pack
from fastload.errors import DecodeError, PackedDataError
from fastload.image import decode_pixels
from fastload.store.inspecting import inspect
from fastload.store.verifying import verify
from tests.contracts.sets import at_change, call, killed

ARGUMENTS: dict[str, Any] = {"mode": "raw", "max_size": 8, "shard_mb": 0.00025, "on_error": "skip"}


def sample_image(number: int, kind: str = "PNG") -> bytes:
    rng = np.random.default_rng(number)
    pixels = rng.integers(0, 256, (4 + number % 9, 12 - number % 5, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, kind)
    return buffer.getvalue()


@pytest.fixture(scope="module")
def listed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A list of 20 files: 17 images in three classes, one cut off, one empty, one missing, at 3, 4 and 19."""
    folder = tmp_path_factory.mktemp("files")
    lines = []
    for number in range(20):
        name = f"{('dog', 'cat', 'eel')[number % 3]}/{number}.png"
        lines.append(name + "\n")
        (folder / name).parent.mkdir(exist_ok=True)
        content = {3: sample_image(3)[:60], 4: b""}.get(number, sample_image(number))
        if number != 19:
            (folder / name).write_bytes(content)
    (folder / "list.txt").write_text("".join(lines))
    return folder / "list.txt"


def contents(path: Path) -> dict[str, bytes]:
    """All files below `path`, and directories as names that end in a slash."""
    return {
        str(p.relative_to(path)) + "/" * p.is_dir(): b"" if p.is_dir() else p.read_bytes()
        for p in path.rglob("*")
    }


@pytest.fixture(scope="module")
def uninterrupted(listed: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    path = tmp_path_factory.mktemp("whole") / "set"
    packed = pack(listed, path, workers=0, **ARGUMENTS)
    assert (packed.records, packed.rejected) == (17, 3)
    assert 5 < packed.shards < 17
    found = contents(path)
    assert sorted(found) == sorted(
        ["index.json", "rejected.txt", *(f"shard-{k:05d}.arrow" for k in range(packed.shards))]
    )
    return found


@pytest.mark.parametrize("workers", [1, 3])
def test_the_set_does_not_depend_on_the_number_of_workers(
    listed: Path, uninterrupted: dict[str, bytes], tmp_path: Path, workers: int
) -> None:
    pack(listed, tmp_path / "set", workers=workers, **ARGUMENTS)
    assert contents(tmp_path / "set") == uninterrupted


def test_what_is_left_out_is_listed_and_the_rest_is_right(
    listed: Path, uninterrupted: dict[str, bytes], tmp_path: Path
) -> None:
    pack(listed, tmp_path / "set", **ARGUMENTS)
    names = [line.split("\t")[0] for line in uninterrupted["rejected.txt"].decode().splitlines()]
    assert names == ["dog/3.png", "cat/4.png", "cat/19.png"]
    assert uninterrupted["rejected.txt"].endswith(b"\tNo such file or directory\n")
    dataset = PackedDataset(tmp_path / "set", decode=False)
    assert dataset.classes == ["cat", "dog", "eel"]
    good = [number for number in range(19) if number not in (3, 4)]
    for record, number in enumerate(good):
        pixels, label = dataset[record]
        expected = decode_pixels(sample_image(number), name="", max_size=8)
        assert max(pixels.shape) <= 8
        assert (pixels == expected).all()
        assert label == [1, 0, 2][number % 3]
        assert dataset.locate(record).endswith(f"/{number}.png)")


# ---- interruptions ----

CALLS = ("write", "replace", "rename", "fsync", "unlink", "rmdir")


def pack_and_die(listed: Path, path: Path, number: int) -> bool:
    """Pack in a fork that kills itself at a call. Return whether it came that far."""
    return killed(number, CALLS, lambda: pack(listed, path, workers=0, **ARGUMENTS))


def left(path: Path) -> list[str]:
    """Return what is left of writers beside a set."""
    return os.listdir(path.parent / ".unsealed")


def test_killed_before_any_write_it_is_no_set_and_running_again_gives_the_same_bytes(
    listed: Path, uninterrupted: dict[str, bytes], tmp_path: Path
) -> None:
    complete = []
    for number in range(1, 10_000, 11):
        path = tmp_path / str(number) / "set"
        path.parent.mkdir()
        if not pack_and_die(listed, path, number):
            assert contents(path) == uninterrupted
            break
        complete.append(path.exists())
        if not path.exists():
            pack(listed, path, workers=0, **ARGUMENTS)
        assert contents(path) == uninterrupted
        assert left(path) == ["set.lock"]
    assert complete.count(False) > 8


@pytest.mark.parametrize("interruption", ["disk full", "Ctrl-C"])
def test_a_full_disk_and_ctrl_c_leave_nothing_half_written(
    listed: Path, uninterrupted: dict[str, bytes], tmp_path: Path, interruption: str
) -> None:
    expected = OSError if interruption == "disk full" else KeyboardInterrupt

    def act() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) if expected is OSError else expected

    for number in range(1, 80, 17):
        path = tmp_path / str(number) / "set"
        path.parent.mkdir()
        with at_change(number, act, CALLS) as calls, pytest.raises(expected) as caught:
            pack(listed, path, workers=2, **ARGUMENTS)
        if expected is OSError and calls[number - 1] == "write":
            assert str(path.parent / ".unsealed" / "set") in caught.value.filename
        assert not path.exists()
        assert number == 1 or left(path) == ["set.lock"]
        pack(listed, path, workers=2, **ARGUMENTS)
        assert contents(path) == uninterrupted


def test_two_packs_of_one_set_at_once_are_refused(tmp_path: Path) -> None:
    with PackedWriter(tmp_path / "set", mode="encoded") as writer:
        writer.add(b"x", label=0)
        with pytest.raises(BlockingIOError, match="another process packs into this folder"):
            PackedWriter(tmp_path / "set", mode="encoded")
    assert len(PackedDataset(tmp_path / "set")) == 1


def test_only_a_folder_without_files_becomes_a_set(tmp_path: Path) -> None:
    path = tmp_path / "set"
    for said in (
        "another file or folder of this name exists. Remove it",
        "a set of this name exists",
    ):
        path.mkdir(exist_ok=True)
        with PackedWriter(path, mode="encoded") as writer:
            writer.add(b"x", label=0)
        assert len(PackedDataset(path)) == 1
        if said.startswith("another"):
            (path / "index.json").unlink()
        before = contents(path)
        with pytest.raises(FileExistsError, match=said):
            PackedWriter(path, mode="encoded")
        assert contents(path) == before
        shutil.rmtree(path)


# ---- modes and sources ----


def test_the_first_bad_input_in_order_ends_the_run(listed: Path, tmp_path: Path) -> None:
    with pytest.raises(DecodeError, match=r"dog/3\.png") as caught:
        pack(listed, tmp_path / "set", workers=3, mode="jpeg")
    assert caught.value.path == str(listed.parent / "dog" / "3.png")
    lines = listed.read_text().splitlines()
    (tmp_path / "missing.txt").write_text("\n".join([lines[0], lines[19], lines[3]]))
    with pytest.raises(FileNotFoundError) as missing:
        pack(tmp_path / "missing.txt", tmp_path / "other", base_dir=listed.parent, workers=3)
    assert missing.value.filename == str(listed.parent / lines[19])


def test_encoded_keeps_the_bytes_and_jpeg_makes_them_small(listed: Path, tmp_path: Path) -> None:
    pack(listed, tmp_path / "encoded", mode="encoded", on_error="skip")
    dataset = PackedDataset(tmp_path / "encoded", decode=False)
    assert len(dataset) == 17
    assert dataset[3][0] == sample_image(5)
    pack(listed, tmp_path / "unseen", mode="encoded", check=False, on_error="skip")
    assert len(PackedDataset(tmp_path / "unseen")) == 19  # all but the missing one
    pack(listed, tmp_path / "jpeg", max_size=6, quality=50, on_error="skip")
    payload, _ = PackedDataset(tmp_path / "jpeg", decode=False)[3]
    assert payload[:3] == b"\xff\xd8\xff"
    assert max(Image.open(io.BytesIO(payload)).size) == 6
    assert PackedDataset(tmp_path / "jpeg").made["quality"] == 50


def test_a_folder_is_packed_as_image_folder_reads_it(tmp_path: Path) -> None:
    for number in range(6):
        path = tmp_path / "train" / ("b", "a")[number % 2] / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(sample_image(number, "JPEG"))
    pack(tmp_path / "train", tmp_path / "set", mode="encoded")
    dataset = PackedDataset(tmp_path / "set", decode=False)
    assert dataset.classes == ["a", "b"]
    assert [label for _, label in (dataset[k] for k in range(6))] == [0, 0, 0, 1, 1, 1]
    assert dataset[1][0] == sample_image(3, "JPEG")
    assert dataset.locate(1).endswith("(a/3.jpg)")


@pytest.mark.parametrize(
    "arguments", [{"max_size": 3}, {"quality": 3}, {"columns": ["a"]}, {"shard_mb": 0}]
)
def test_arguments_that_do_not_belong_are_refused(
    listed: Path, tmp_path: Path, arguments: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match="max_size|quality|columns|shard_bytes"):
        pack(listed, tmp_path / "set", mode="encoded", **arguments)
    assert not (tmp_path / "set").exists()


def test_where_nothing_can_be_packed_there_is_no_set(listed: Path, tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_text("a/1.png\na/2.png\n")
    with pytest.raises(
        PackedDataError, match="none of 2 inputs could be packed; the first: a/1.png: No such"
    ):
        pack(tmp_path / "list.txt", tmp_path / "set", on_error="skip")
    with pytest.raises(FileNotFoundError):
        PackedDataset(tmp_path / "set")


def parquet(path: Path, numbers: range, **changes: Any) -> Path:
    columns = {
        "image": [{"bytes": sample_image(k), "path": f"{k}.png"} for k in numbers],
        "label": [("dog", "cat")[k % 2] for k in numbers],
        "caption": [f"no. {k}" for k in numbers],
        **changes,
    }
    path.parent.mkdir(exist_ok=True)
    pq.write_table(pa.table(columns), path, row_group_size=7)
    return path


@pytest.mark.parametrize("workers", [0, 2])
def test_parquet_files_are_packed_in_order_with_their_columns(
    tmp_path: Path, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fastload.datasets.packed.sources._ROWS", 4)
    parquet(tmp_path / "rows" / "1.parquet", range(20))
    parquet(tmp_path / "rows" / "2.parquet", range(20, 31))
    arguments: dict[str, Any] = {"mode": "encoded", "columns": ["caption"], "shard_mb": 0.001}
    pack(tmp_path / "rows", tmp_path / "set", workers=workers, **arguments)
    dataset = PackedDataset(tmp_path / "set", decode=False, columns=["caption"])
    assert dataset.classes == ["cat", "dog"]
    assert [dataset[k] for k in range(31)] == [
        (sample_image(k), 1 - k % 2, f"no. {k}") for k in range(31)
    ]
    assert dataset.locate(30).endswith("(30.png)")


def test_parquet_with_bytes_numbers_and_rows_that_lack_them(tmp_path: Path) -> None:
    images = [sample_image(0), None, b"no image", sample_image(3)]
    labels = pa.array([5, 6, 7, None], pa.int32())
    path = parquet(tmp_path / "p" / "x.parquet", range(4), image=images, label=labels)
    pack(path, tmp_path / "set", mode="encoded", on_error="skip")
    dataset = PackedDataset(tmp_path / "set", decode=False)
    assert [dataset[k] for k in range(2)] == [(sample_image(0), 5), (sample_image(3), -1)]
    rejected = (tmp_path / "set" / "rejected.txt").read_text().splitlines()
    assert [line.split("\t")[0] for line in rejected] == ["x.parquet:1", "x.parquet:2"]
    assert dataset.classes == []


def test_a_folder_may_be_named_as_a_parquet_file_is(tmp_path: Path) -> None:
    """Spark's sets are so; and what lies in a folder under such a name is a file only if it is one."""
    parquet(tmp_path / "spark.parquet" / "part-0.snappy.parquet", range(3))
    (tmp_path / "spark.parquet" / "empty.parquet").mkdir()
    pack(tmp_path / "spark.parquet", tmp_path / "rows", mode="encoded", workers=0)
    assert PackedDataset(tmp_path / "rows", decode=False)[2] == (sample_image(2), 1)
    for name in ("ant.parquet", "bee"):
        path = tmp_path / "classes.parquet" / name / "1.jpg"
        path.parent.mkdir(parents=True)
        path.write_bytes(sample_image(1, "JPEG"))
    pack(tmp_path / "classes.parquet", tmp_path / "images", mode="encoded", workers=0)
    assert PackedDataset(tmp_path / "images").classes == ["ant.parquet", "bee"]
    with pytest.raises(FileNotFoundError, match="missing"):
        pack(tmp_path / "missing.parquet", tmp_path / "none")


def test_parquet_with_the_class_names_of_hugging_face(tmp_path: Path) -> None:
    names = {"label": {"names": ["dog", "cat"], "_type": "ClassLabel"}}
    table = pa.table({"image": [sample_image(0)], "label": pa.array([1])})
    table = table.replace_schema_metadata(
        {"huggingface": json.dumps({"info": {"features": names}})}
    )
    pq.write_table(table, tmp_path / "x.parquet")
    pack(tmp_path / "x.parquet", tmp_path / "set", mode="encoded")
    assert PackedDataset(tmp_path / "set").classes == ["dog", "cat"]


# ---- the commands ----


def test_the_commands_pack_verify_and_inspect(listed: Path, tmp_path: Path) -> None:
    path = tmp_path / "set"
    result = call(
        "set", "pack", listed, path, "--mode", "jpeg", "--max-size", "8", "--on-error", "skip"
    )
    assert result.exit_code == 0, result.output
    assert f"{path}: 17 records of" in result.output
    assert f"3 inputs left out: see {path}/rejected.txt" in result.output
    result = call("set", "verify", path)
    assert result.exit_code == 0, result.output
    assert result.output.endswith("All checked parts are valid.\n")
    result = call("set", "inspect", path)
    assert result.exit_code == 0
    assert result.output.strip() == inspect(path)
    for told in (
        "17 rows, mode jpeg, 3 classes",
        "column payload: large_binary",
        "max_size 8",
    ):
        assert told in result.output
    ((start, _),) = json.loads((path / "index.json").read_text())["shards"][0]["payload"]
    with open(path / "shard-00000.arrow", "r+b") as file:
        os.pwrite(file.fileno(), b"\0", start)
    result = call("set", "verify", path, "--workers", "0")
    assert result.exit_code == 1
    assert "record 0 (dog/0.png): the payload has checksum" in result.output
    assert "1 part or record is damaged" in result.output
    assert verify(path).bad == [result.output.splitlines()[0]]
