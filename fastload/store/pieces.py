"""The bytes of a part of a set of columns, in pieces, checked against the checksum of its file."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator

from fastload.datasets.manifest import Index, Shard, expect_size, read_index
from fastload.datasets.packed.pieces import opened, read_piece
from fastload.errors import PackedDataError
from fastload.store.parts import is_here, open_part
from fastload.store.root import this_node

PIECE_BYTES = 4 * 2**20


def pieces(path: str, index: Index, shard: Shard) -> Iterator[memoryview]:
    """Yield the bytes of a part, in order.

    Raises `PackedDataError` after the last piece if the CRC-32 of the file is not that of the index. If the index has
    none, the file is checked as far as `open_part` can, before the first piece.
    """
    if shard.checksum is None:
        open_part(path, shard, index.schema, full=True)
    with opened(path, shard) as fd:
        size = os.fstat(fd).st_size
        expect_size(path, shard, size)
        found = 0
        for begin in range(0, size, PIECE_BYTES):
            piece = read_piece(path, shard, fd, begin, min(PIECE_BYTES, size - begin))
            if shard.checksum is not None:
                found = zlib.crc32(piece, found)
            yield piece
    if shard.checksum is not None and found != shard.checksum:
        reason = (
            f"the file has checksum {found:#010x}, expected {shard.checksum:#010x}. It is damaged"
        )
        raise PackedDataError(path, reason, shard=shard.name)


def read_columns_index(path: str) -> Index:
    """Read the index of a set of columns. Raises FileNotFoundError and `PackedDataError`, also if it has payloads."""
    index = read_index(path)
    if index.mode != "columns":
        raise PackedDataError(path, "this is a packed set, not a set of columns")
    return index


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
