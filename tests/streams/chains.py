"""Random streams: sources of every format, and steps over them."""

from __future__ import annotations

import io
import itertools
import json
import random
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from fastload.streams import Mixed, PackedStream, Shards, Shuffled, Stream

KINDS = ("jsonl", "parquet", "arrow", "tar", "own")


def write(kind: str, path: Path, ids: list[int]) -> None:
    """Write a shard of samples that have these ids."""
    table = pa.table({"id": pa.array(ids, pa.int64())})
    if kind == "jsonl":
        path.write_text("".join(json.dumps({"id": n}) + "\n" for n in ids))
    elif kind == "parquet":
        pq.write_table(table, path, row_group_size=8)
    elif kind == "arrow":
        make = pa.ipc.new_file if len(ids) % 2 else pa.ipc.new_stream
        with make(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=5)
    elif kind == "tar":
        with tarfile.open(path, "w") as tar:
            for n in ids:
                for ending in ("id", "cls"):
                    info = tarfile.TarInfo(f"folder/{n}.{ending}")
                    info.size = len(data := str(n).encode())
                    tar.addfile(info, io.BytesIO(data))
    else:
        path.write_text(json.dumps(ids))


def own(path: Any) -> Iterator[Any]:
    """Read a shard as a function of the user's does."""
    return iter([{"id": n} for n in json.loads(Path(path).read_text())])


def id_of(sample: dict[str, Any]) -> int:
    """Return the id of a sample of any format."""
    return int(sample["id"])


def source(
    rng: random.Random, folder: Path, kind: str = "", sizes: Any = (), **options: Any
) -> Stream:
    """Return a stream of ids, out of new files."""
    kind = kind or rng.choice(KINDS)
    sizes = sizes or [rng.choice([0, 1, 3, 7, 20, 50]) for _ in range(rng.randint(1, 12))]
    paths = []
    for number, size in enumerate(sizes):
        paths.append(folder / f"{rng.getrandbits(64)}.{kind}")
        write(kind, paths[-1], [1000 * number + k for k in range(size)])
    shards = Shards(
        paths,
        own if kind == "own" else None,
        shuffle=rng.random() < 0.8,
        seed=rng.randint(0, 5),
        **options,
    )
    return shards.map(id_of)


def tripled(n: int) -> int:
    return 3 * n + 1


def is_kept(n: int) -> bool:
    return n % 3 != 1


def at_random(_: int) -> bool:
    return random.random() < 0.7


def several(n: int) -> list[int]:
    return [10 * n + k for k in range(n % 4)]


def changing(given: int) -> list[float]:
    return [1 + given % 3, 2, 1]


class Noisy:
    """Draws from every kind of generator."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng()

    def __call__(self, n: int) -> tuple[float, ...]:
        draws = random.random(), np.random.rand(), torch.rand(()).item(), self.rng.random()
        return (n, *draws)


def late(samples: Iterator[int]) -> Iterator[int]:
    """Yield each sample after the next one was taken."""
    held = []
    for n in samples:
        held.append(n)
        if len(held) > 1:
            yield held.pop(0)
    yield from held


class Late:
    """Does as `late`, and keeps a state."""

    def __init__(self, samples: Iterator[int]) -> None:
        self.samples, self.held = samples, list[int]()

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        self.held += itertools.islice(self.samples, max(0, 2 - len(self.held)))
        if not self.held:
            raise StopIteration
        return self.held.pop(0)

    def state_dict(self) -> dict[str, Any]:
        return {"held": self.held}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.held = [*state["held"]]


SAME_DRAWS, SAME_SAMPLES, SAME_READERS = 4, 5, 6
"""Kinds of steps: after those before the first, other readers draw the same. And so on."""


def chain(
    rng: random.Random, folder: Path, steps: int = SAME_SAMPLES, *, mixes: bool = True
) -> Stream:
    """Return a random stream of integers."""
    stream = source(rng, folder)
    if steps == SAME_DRAWS and rng.random() < 0.5:
        stream = stream.filter(at_random)
    if mixes and rng.random() < 0.3:
        stream = Mixed([chain(rng, folder, steps, mixes=False) for _ in range(3)], changing)
        if rng.random() < 0.5:
            stream = Mixed(stream.ups, [rng.random() for _ in range(3)])
    for _ in range(rng.randint(0, 3)):
        step = rng.randrange(steps)
        if step == 0:
            stream = stream.map(tripled)
        elif step == 1:
            stream = stream.filter(is_kept)
        elif step == 2:
            stream = stream.flat_map(several)
        elif step == 3:
            stream = Shuffled(stream, rng.choice([1, 2, 5, 16, 100]))
        elif step == 4:
            stream = stream.apply(late, rng.choice([1, 3, 40]))
        else:
            stream = stream.apply(Late)
    return stream


def text(n: int) -> list[int]:
    return [n % 97] * (n % 7)


def row(packed: dict[str, torch.Tensor]) -> tuple[int, ...]:
    return tuple(packed["tokens"].tolist())


def packed(rng: random.Random, folder: Path) -> Stream:
    """Return a random stream of packed rows."""
    return PackedStream(chain(rng, folder, SAME_READERS).map(text), 16, rng.choice([1, 4, 30])).map(
        row
    )
