"""The bytes of a shard of a set, in pieces that are checked against its checksums. Threads read several shards."""

from __future__ import annotations

import errno
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import TypeVar

import numpy as np
from tqdm import tqdm

from fastload._kit.disk import preadv, replace_file, write_all
from fastload._kit.pool import in_order
from fastload.datasets.manifest import Index, Shard, expect_size, read_index
from fastload.datasets.packed.format import fault_of, packed_index, read_table
from fastload.errors import PackedDataError
from fastload.store.parts import is_here, open_part
from fastload.store.room import expect_room, room_for
from fastload.store.root import in_memory, this_node

PIECE_BYTES = 4 * 2**20
Result = TypeVar("Result")
Pieces = Callable[[list[str] | None], Iterator[memoryview]]
"""Returns the pieces of a shard; see `pieces`."""
Read = Callable[[Shard, list[str] | None], Iterator[memoryview]]
"""Yields the pieces of a shard that it is called with."""


def read_set(path: str) -> Index:
    """Read the index of a set of either kind. Raises FileNotFoundError and `PackedDataError`."""
    index = read_index(path)
    return index if index.mode == "columns" else packed_index(path, index)


def each(
    use: Callable[[Shard, Pieces], Result],
    read: Read,
    shards: Sequence[Shard],
    *,
    workers: int | None,
    progress: bool,
    what: str,
) -> Iterator[tuple[Shard, Result]]:
    """Yield shards in order, with what `use` returns for each. Threads call `use` with the pieces that `read` yields.

    The bar advances by the bytes of each shard. If the caller stops, each thread ends after its present piece.
    """
    stopped = False

    def used(shard: Shard) -> Result:
        def checked(bad: list[str] | None = None) -> Iterator[memoryview]:
            for piece in read(shard, bad):
                if stopped:
                    raise InterruptedError(errno.EINTR, "stopped", shard.name)
                yield piece

        return use(shard, checked)

    with (
        in_order(used, shards, workers) as results,
        tqdm(
            desc=what,
            total=sum(shard.bytes for shard in shards),
            unit="B",
            unit_scale=True,
            leave=False,
            disable=None if progress else True,  # None: hidden unless standard error is a terminal
        ) as bar,
    ):
        try:
            for shard, result in zip(shards, results, strict=True):
                bar.update(shard.bytes)
                yield shard, result
        finally:
            stopped = True  # before the pool waits for calls in progress


def copy_shards(
    folder: str,
    read: Read,
    shards: Sequence[Shard],
    *,
    workers: int | None = 0,
    progress: bool = False,
) -> None:
    """Copy the shards that `read` yields to `folder`. Each gets its name once it is complete, and `read` has ended.

    Raises StoreFullError, before a byte is written if the shards do not fit, and OSError.
    """
    for shard in shards:
        with suppress(FileNotFoundError):
            os.unlink(partial_path(folder, shard))  # a killed copy left it
    expect_room(folder, sum(shard.bytes for shard in shards))
    durable = not in_memory(folder)

    def copy(shard: Shard, checked: Pieces) -> None:
        path = os.path.join(folder, shard.name)
        whole = replace_file(path, partial=partial_path(folder, shard), durable=durable)
        with room_for(path, shard.bytes), whole as file:
            for piece in checked(None):
                write_all(file.fileno(), path, piece)

    for _ in each(copy, read, shards, workers=workers, progress=progress, what="Copying"):
        pass


def partial_path(folder: str, shard: Shard) -> str:
    """Return the path of a shard in `folder` until its copy is complete."""
    return os.path.join(folder, f"{shard.name}.partial")


def pieces(
    path: str, index: Index, shard: Shard, bad: list[str] | None = None
) -> Iterator[memoryview]:
    """Yield the bytes of a shard of the set at `path`, in order. A piece is valid until the next one is requested.

    Raises `PackedDataError` if a byte is wrong or missing, after the last piece at the latest, and before it yields a
    wrong payload. With a list `bad`, it adds a sentence on each wrong payload there instead, and yields it. If a shard
    of columns has no checksum, it checks the form, as far as `open_part` can.
    """
    with opened(path, shard) as fd:
        expect_size(path, shard, os.fstat(fd).st_size)
        if index.mode != "columns":
            yield from _of_payloads(path, index, shard, fd, bad)
            return
        if shard.checksum is None:
            open_part(path, shard, index.schema, full=True)
        found = (
            read_piece(path, shard, fd, begin, min(PIECE_BYTES, shard.bytes - begin))
            for begin in range(0, shard.bytes, PIECE_BYTES)
        )
        yield from summed(path, shard, found)


def summed(path: str, shard: Shard, found: Iterable[memoryview]) -> Iterator[memoryview]:
    """Yield the pieces of a shard of columns. Raises `PackedDataError` after the last one if the checksum is wrong.

    It stops after more bytes than the shard has. `path` is what the error names.
    """
    checksum = size = 0
    for piece in found:
        if shard.checksum is not None:
            checksum = zlib.crc32(piece, checksum)
        size += len(piece)
        yield piece
        if size > shard.bytes:
            break
    if shard.checksum not in (None, checksum):
        reason = f"the file has checksum {checksum:#010x}, expected {shard.checksum:#010x}. It is damaged"
        raise PackedDataError(path, reason, shard=shard.name)


def _of_payloads(
    path: str, index: Index, shard: Shard, fd: int, bad: list[str] | None
) -> Iterator[memoryview]:
    table = read_table(
        path, index, shard, os.fstat(fd).st_size, partial(preadv, fd), columns=["source"]
    )
    checksum = at = row = 0
    for number, (start, length) in enumerate((*shard.payload, (shard.bytes, 0))):
        columns = read_piece(path, shard, fd, at, start - at)
        checksum = zlib.crc32(columns, checksum)
        yield columns
        payload = read_piece(path, shard, fd, start, length)
        end = int(table.batch_ends[number]) if number < len(shard.payload) else row
        for record in range(row, end):
            begin = int(table.begins[record]) - start
            fault = fault_of(payload[begin : begin + int(table.lengths[record])], table, record)
            if fault and bad is None:
                raise PackedDataError(path, fault, shard=shard.name, record=record)
            if fault and bad is not None:
                source = table.extras[number].column("source")[record - row].as_py()
                bad.append(f"{os.path.join(path, shard.name)}, record {record} ({source}): {fault}")
        yield payload
        at, row = start + length, end
    if checksum != shard.checksum:
        raise PackedDataError(path, "the file changed while it was read", shard=shard.name)


@contextmanager
def opened(path: str, shard: Shard) -> Iterator[int]:
    """Yield a descriptor of a shard. Raises `PackedDataError` if the file is missing."""
    try:
        fd = os.open(os.path.join(path, shard.name), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError as error:
        raise PackedDataError(path, "the file is missing", shard=shard.name) from error
    try:
        yield fd
    except OSError as error:
        error.filename = error.filename or os.path.join(path, shard.name)  # a read does not name it
        raise
    finally:
        os.close(fd)


def read_piece(path: str, shard: Shard, fd: int, offset: int, length: int) -> memoryview:
    """Return `length` bytes of a shard. Raises `PackedDataError` if the file ends before them, and OSError."""
    piece = np.empty(length, np.uint8).data
    if preadv(fd, piece, offset) < length:
        reason = f"the file ends before byte {offset + length:,}. It was cut off"
        raise PackedDataError(path, reason, shard=shard.name)
    return piece


def parts_elsewhere(path: str, index: Index) -> dict[str, list[Shard]]:
    """Return the parts that are not at `path` because they lie on other nodes, by the name of the node."""
    nodes = {shard.node for shard in index.shards}
    found: dict[str, list[Shard]] = {}
    for shard in index.shards:
        # If all parts are of one node, they are here, even if the node has a new name.
        elsewhere = len(nodes) > 1 and shard.node not in ("", this_node())
        if elsewhere and not is_here(path, shard):
            found.setdefault(shard.node, []).append(shard)
    return found
