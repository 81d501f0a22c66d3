"""Fuzz target: index and shards of a packed set with bytes changed at will, checksums made to fit.

    python -m tests.promises.packed_fuzz FOLDER SECONDS SEED

Whatever the bytes, opening and reading ends in the records or in a `PackedDataError`; it takes no memory
that the files do not account for (the address space is limited), and does not end the process. Prints what it did.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import random
import re
import resource
import struct
import sys
import time
import zlib
from collections import Counter
from pathlib import Path

import pyarrow as pa

from fastload.datasets import PackedDataset, PackedWriter, manifest
from fastload.datasets.packed import format as packed_format
from fastload.errors import PackedDataError

ROOM = 512 * 2**20  # bytes of address space beside what the imports take
EXTREMES = [0, 1, -1, 7, 255, 2**31 - 1, -(2**31), 2**32, 2**40, 2**62, 2**63 - 1, -(2**63)]


def make(path: Path, mode: packed_format.Mode) -> Path:
    """A set of two shards with nested and textual columns."""
    columns = {"caption": pa.string(), "box": pa.list_(pa.float32()), "small": pa.int8()}
    with PackedWriter(path, mode=mode, columns=columns, shard_bytes=60) as writer:
        for k in range(1, 6):
            sides = {"height": k, "width": 2} if mode == "raw" else {}
            extras = {"caption": f"é{k}", "box": [0.5] * k, "small": k if k % 2 else None}
            writer.add(bytes(k * 6), label=k, source=str(k), **sides, **extras)
    return path


def with_checksum(text: bytes) -> bytes:
    """An index with the checksum of what it now says."""
    body = re.sub(rb',\n "checksum": -?\d+\n}\n\Z', b"", text)
    return body + b',\n "checksum": %d\n}\n' % zlib.crc32(body)


def fitted(shard: manifest.Shard, content: bytes) -> manifest.Shard:
    """What an index would say of a shard with this content."""
    checksum, at = 0, 0
    for start, length in (*shard.payload, (len(content), 0)):
        checksum = zlib.crc32(content[at:start], checksum)
        at = start + length
    return dataclasses.replace(shard, bytes=len(content), checksum=checksum)


def read_all(path: Path) -> Counter[str]:
    """Open the set and read each record in every way; how often what came out."""
    ends: Counter[str] = Counter()
    try:
        dataset = PackedDataset(path, decode=False, columns=["caption", "box", "small"])
    except (PackedDataError, ValueError) as error:
        # Of ValueErrors only the one on columns that the (valid) index does not have.
        assert isinstance(error, PackedDataError) or "has no extra columns" in str(error), error
        return Counter(["index refused"])
    for record in range(min(len(dataset), 20)):
        try:
            dataset[record]
            ends["record read"] += 1
        except PackedDataError:
            ends["record refused"] += 1
        dataset.locate(record)
    with contextlib.suppress(PackedDataError):
        _ = dataset.targets
    dataset.close()
    return ends


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


def main(folder: Path, seconds: float, seed: int) -> None:
    """Fuzz until the time is over."""
    rng = random.Random(seed)
    sets = [make(folder / "encoded", "encoded"), make(folder / "raw", "raw")]
    originals = {path: (path / "index.json").read_bytes() for path in sets}
    shards = {path: (path / "shard-00000.arrow").read_bytes() for path in sets}
    for path in sets:
        assert read_all(path) == {"record read": 5}
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, used + ROOM))
    ends: Counter[str] = Counter()
    deadline = time.monotonic() + seconds
    for turn in itertools.count():
        if time.monotonic() > deadline:
            break
        path = sets[turn % 2]
        if turn % 3 == 0:
            text = mutated_index(rng, originals[path])
            (path / "index.json").write_bytes(with_checksum(text) if rng.random() < 0.8 else text)
        else:
            content = mutated(rng, shards[path])
            (path / "shard-00000.arrow").write_bytes(content)
            index = manifest.parse_index("", originals[path])
            try:
                shard = fitted(index.shards[0], content)
            except ValueError:
                continue
            index = dataclasses.replace(index, shards=(shard, *index.shards[1:]))
            (path / "index.json").write_bytes(manifest.dump_index(index))
        ends += read_all(path)
        (path / "index.json").write_bytes(originals[path])
        (path / "shard-00000.arrow").write_bytes(shards[path])
    print(json.dumps({"turns": turn, **ends}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]))
