"""Fuzz target: files that fastload reads, with bytes changed at will, or cut off.

    python -m tests.promises.damaged_files FORMAT FOLDER COUNT SEED

Whatever the bytes, each read ends in a value of the right form or in an error that names the file, and the process goes
on. FOLDER/turn has the number of the file that is being read: the turn to repeat after a crash. Prints what came out.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import re
import resource
import shutil
import struct
import sys
import zlib
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from fastload import DataLoader, store
from fastload.datasets import PackedDataset, PackedWriter, ParquetDataset
from fastload.datasets.manifest import INDEX, Shard, dump_index, read_index
from fastload.errors import PackedDataError, ParquetError
from fastload.store.inspecting import inspect
from fastload.store.staging import stage
from fastload.store.verifying import verify
from tests.promises.equal import check_same

ROWS = 8  # in each part, so that most bytes are structure and offsets
ROOM = 2 * 2**30  # bytes of address space beside what the imports take
PART = "shard-00000.arrow"
EXTREMES = [0, 1, -1, 7, 255, 2**31 - 1, -(2**31), 2**32, 2**40, 2**62, 2**63 - 1, -(2**63)]
Read = Callable[[random.Random], Counter[str]]


def rows(begin: int) -> dict[str, Any]:
    """Return a part with each kind of column that a set can have."""
    numbers = range(begin, begin + ROWS)
    return {
        "x": torch.arange(begin, begin + ROWS * 6, dtype=torch.uint8)[: ROWS * 6].view(ROWS, 3, 2),
        "y": torch.tensor(numbers),
        "half": torch.tensor(numbers).to(torch.bfloat16),
        "flag": torch.tensor(numbers) % 3 == 0,
        "text": [f"é {k}" * (k % 3) for k in numbers],
        "blob": [bytes([k]) * k for k in numbers],
        "words": pa.array([[f"w{k}"] * (k % 3) for k in numbers], pa.list_(pa.string())),
        "lists": pa.array([[k] * (k % 4) for k in numbers], pa.large_list(pa.int32())),
        "point": pa.array([{"at": k, "name": f"p{k}"} for k in numbers]),
        "map": pa.array([[(f"k{k}", k)] for k in numbers], pa.map_(pa.string(), pa.int16())),
        "day": pa.array([*numbers], pa.date32()),
    }


def mutated(rng: random.Random, content: bytes) -> bytes:
    """`content` with one to four things done to it that a parser fears."""
    changed = bytearray(content)
    for _ in range(rng.randint(1, 4)):
        place = rng.randrange(len(changed))
        kind = rng.randrange(6)
        if kind == 0:
            changed[place] ^= 1 << rng.randrange(8)
        elif kind == 1:
            changed[place] = rng.choice([0, 1, 0x7F, 0x80, 0xFF])
        elif kind == 2:
            place -= place % 8
            changed[place : place + 8] = struct.pack("<q", rng.choice(EXTREMES))
        elif kind == 3:
            place -= place % 4
            changed[place : place + 4] = struct.pack(
                "<i", max(-(2**31), min(2**31 - 1, rng.choice(EXTREMES)))
            )
        elif kind == 4:
            other = rng.randrange(len(changed))
            length = rng.randint(1, 32)
            changed[place : place + length] = changed[other : other + length]
        else:
            del changed[place : place + rng.randint(1, 16)]
            changed = changed or bytearray(1)
    return bytes(changed)


def mutated_index(rng: random.Random, content: bytes) -> bytes:
    """The text changed as bytes, or one of its numbers or words changed as JSON."""
    if rng.random() < 0.4:
        return mutated(rng, content)
    numbers = list(re.finditer(rb"\d+|\"[a-z_0-9]+\"|\[|\{", content))
    found = rng.choice(numbers)
    other = rng.choice(
        [str(x) for x in EXTREMES] + ["null", "true", '"x"', "[]", "{}", "1e99", "[" * 9]
    )
    return content[: found.start()] + other.encode() + content[found.end() :]


def damaged(rng: random.Random, content: bytes) -> bytes:
    """Return the content with some flipped bits, cut off, or with what a parser fears."""
    kind = rng.random()
    if kind < 0.1:
        return content[: rng.randrange(len(content))]
    if kind < 0.6:
        return mutated(rng, content)
    changed = bytearray(content)
    for _ in range(rng.randint(1, 3)):
        changed[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def form(value: Any) -> Any:
    """Return what damage may not change in a value: types, dtypes and shapes."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return value.dtype, value.shape
    if isinstance(value, dict):
        return {name: form(one) for name, one in value.items()}
    return type(value)


def with_checksum(text: bytes) -> bytes:
    """An index with the checksum of what it now says."""
    body = re.sub(rb',\n "checksum": -?\d+\n}\n\Z', b"", text)
    return body + b',\n "checksum": %d\n}\n' % zlib.crc32(body)


def fitted(shard: Shard, content: bytes) -> Shard:
    """What an index would say of a shard with this content."""
    checksum, at = 0, 0
    for start, length in (*shard.payload, (len(content), 0)):
        checksum = zlib.crc32(content[at:start], checksum)
        at = start + length
    return dataclasses.replace(shard, bytes=len(content), checksum=checksum)


# ---- sets of columns ----


def columns(folder: Path, *, checksums: bool) -> tuple[Path, Read]:
    """Make a set of two parts. The first is damaged. Its entry in the index is made to fit in one of three turns."""
    path = folder / "set"
    store.put([rows(0), rows(ROWS)], path, checksums=checksums)
    whole = [store.get(path)[k] for k in range(2 * ROWS)]
    index, content = read_index(str(path)), (path / PART).read_bytes()

    def read(rng: random.Random) -> Counter[str]:
        found = (path / PART).read_bytes()
        fits = rng.random() < 0.3
        if fits:
            first = fitted(index.shards[0], found)
            first = first if checksums else dataclasses.replace(first, checksum=None)
            changed = dataclasses.replace(index, shards=(first, *index.shards[1:]))
            (path / INDEX).write_bytes(dump_index(changed))
        ends = read_rows(path, whole)
        way = rng.randrange(8)  # one of the slower ones
        if way < 2:
            bad = verify(path, workers=0).bad
            if checksums and not fits:
                assert len(bad) == (found != content), bad
        elif way < 4:
            with suppress(PackedDataError):
                list(DataLoader(store.get(path, data=["x", "y", "half"]), 5))
        elif way < 6:
            with suppress(PackedDataError):
                inspect(path)
        elif way < 7:
            with suppress(PackedDataError):
                stage(path, folder / "copy", workers=0)
                read_rows(folder / "copy", whole)
            shutil.rmtree(folder / "copy", ignore_errors=True)
        (path / INDEX).write_bytes(dump_index(index))
        return ends

    return path / PART, read


def read_rows(path: Path, whole: list[Any]) -> Counter[str]:
    """Read all rows of a set. Those of the part that is not damaged must be right."""
    ends: Counter[str] = Counter()
    dataset = store.get(path)
    for row in range(ROWS):
        try:
            sample = dataset[row]
        except PackedDataError as error:
            assert error.shard == PART
            ends["refused"] += 1
            if error.record is None:
                break  # the part, and not this row alone
        else:
            ends["read"] += 1
            assert form(sample) == form(whole[row]), (sample, whole[row])
    check_same(dataset.__getitems__(range(ROWS, 2 * ROWS)), whole[ROWS:])
    return ends


def index_of(
    folder: Path, write: Callable[[Path], Any], opened: Callable[[Path], Any]
) -> tuple[Path, Read]:
    """Make a set whose index is damaged, often with a checksum that fits."""

    def rows_of() -> list[Any]:
        dataset = opened(path)
        return [dataset[k] for k in range(len(dataset))]

    path = folder / "set"
    write(path)
    whole = rows_of()
    content = (path / INDEX).read_bytes()

    def read(rng: random.Random) -> Counter[str]:
        if rng.random() < 0.8:
            changed = mutated_index(rng, content)
            (path / INDEX).write_bytes(with_checksum(changed))
        try:
            found = rows_of()
            inspect(path)
            verify(path, workers=0)
        except (PackedDataError, ValueError) as error:
            assert str(path) in str(error)
            return Counter(["refused"])
        check_same(found, whole)
        return Counter(["read"])

    return path / INDEX, read


# ---- packed sets ----


def make(path: Path, mode: Any) -> Path:
    """A set of two shards with nested and textual columns."""
    columns = {"caption": pa.string(), "box": pa.list_(pa.float32()), "small": pa.int8()}
    with PackedWriter(path, mode=mode, columns=columns, shard_bytes=60) as writer:
        for k in range(1, 6):
            sides = {"height": k, "width": 2} if mode == "raw" else {}
            extras = {"caption": f"é{k}", "box": [0.5] * k, "small": k if k % 2 else None}
            writer.add(bytes(k * 6), label=k, source=str(k), **sides, **extras)
    return path


def opened(path: Path) -> PackedDataset:
    return PackedDataset(path, decode=False, columns=["caption", "box", "small"])


def packed(folder: Path, mode: Any) -> tuple[Path, Read]:
    """Make a packed set with a checksum of every byte: what is read is right, or refused.

    In one of three turns the entry of the damaged shard fits, as in `columns`: then any record may come.
    """
    path = make(folder / "set", mode)
    whole = [opened(path)[k] for k in range(5)]
    index = read_index(str(path))

    def read(rng: random.Random) -> Counter[str]:
        ends: Counter[str] = Counter()
        fits = rng.random() < 0.3
        if fits:
            first = fitted(index.shards[0], (path / PART).read_bytes())
            changed = dataclasses.replace(index, shards=(first, *index.shards[1:]))
            (path / INDEX).write_bytes(dump_index(changed))
        try:
            dataset = opened(path)
        except PackedDataError:
            assert fits, "its file is shorter than the index says of the payloads"
            ends["refused"] += 1
        else:
            for record, expected in enumerate(whole):
                try:
                    sample = dataset[record]
                    ends["read"] += 1
                except PackedDataError as error:
                    assert error.shard == PART
                    ends["refused"] += 1
                else:
                    if not fits:
                        check_same(sample, expected)
            with suppress(PackedDataError):
                _ = dataset.targets
            dataset.close()
        (path / INDEX).write_bytes(dump_index(index))
        return ends

    return path / PART, read


# ---- files of other programs ----


def table() -> pa.Table:
    """Return rows that Parquet and Arrow files can have, with a dictionary."""
    words = pa.array([f"w{k % 3}" for k in range(ROWS)]).dictionary_encode()
    columns = {name: rows(0)[name] for name in ("text", "blob", "words", "lists")}
    return pa.table({"y": range(ROWS), "word": words, **columns})


def parquet(folder: Path) -> tuple[Path, Read]:
    """Make a Parquet file. Its pages have checksums, its footer and the heads of its pages have none."""
    path = folder / "a.parquet"
    pq.write_table(table().drop(["words"]), path, row_group_size=3, write_page_checksum=True)
    whole = [ParquetDataset(path)[k] for k in range(ROWS)]

    def read(_: random.Random) -> Counter[str]:
        ends: Counter[str] = Counter()
        try:
            dataset = ParquetDataset(path, columns=[*whole[0]])
        except (ParquetError, KeyError, TypeError) as error:
            assert str(path) in str(error) or isinstance(error, TypeError)
            return Counter(["refused"])
        for row in range(min(len(dataset), ROWS)):
            try:
                dataset[row]
                ends["read"] += 1
            except ParquetError as error:
                assert str(path) in str(error)
                ends["refused"] += 1
        return ends

    return path, read


def put(folder: Path) -> tuple[Path, Read]:
    """Make an Arrow file, whose record batches are put."""
    path = folder / "file"
    with pa.ipc.new_file(path, table().schema) as writer:
        writer.write_table(table(), max_chunksize=5)

    def read(_: random.Random) -> Counter[str]:
        try:
            reader = pa.ipc.open_file(pa.memory_map(str(path)))
            batches = map(reader.get_batch, range(reader.num_record_batches))
            store.put(batches, folder / "set")
        except (ValueError, TypeError, OSError, pa.ArrowException):
            return Counter(["refused"])
        with suppress(PackedDataError):  # such as a date that Python does not have
            dataset = store.get(folder / "set")
            for row in range(len(dataset)):
                dataset[row]
        assert not verify(folder / "set", workers=0).bad
        shutil.rmtree(folder / "set")
        return Counter(["read"])

    return path, read


FORMATS: dict[str, Callable[[Path], tuple[Path, Read]]] = {
    "columns": lambda folder: columns(folder, checksums=True),
    "columns-in-memory": lambda folder: columns(folder, checksums=False),
    "index": lambda folder: index_of(folder, lambda path: store.put(rows(0), path), store.get),
    "packed-index": lambda folder: index_of(folder, lambda path: make(path, "raw"), opened),
    "packed-encoded": lambda folder: packed(folder, "encoded"),
    "packed-raw": lambda folder: packed(folder, "raw"),
    "parquet": parquet,
    "put": put,
}


def main(name: str, folder: Path, count: int, seed: int) -> None:
    """Damage the file `count` times, and read it."""
    folder.mkdir(parents=True, exist_ok=True)
    path, read = FORMATS[name](folder)
    content = path.read_bytes()
    read(random.Random(seed))  # all imports
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, used + ROOM))
    ends: Counter[str] = Counter()
    with (folder / "turn").open("wb", buffering=0) as turns:
        for turn in range(count):
            os.pwrite(turns.fileno(), f"{turn:8}".encode(), 0)
            rng = random.Random(seed * 1_000_003 + turn)  # so that one turn can be repeated alone
            path.unlink()  # a mapping of the last turn keeps its own file
            path.write_bytes(damaged(rng, content))
            ends += read(rng)
    print(json.dumps({"turns": count, **ends}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
