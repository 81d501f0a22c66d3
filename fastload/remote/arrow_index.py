"""How many rows each record batch of an Arrow file has, read from the index at its end and the heads of the batches.

pyarrow reads whole batches for that. The tables are flatbuffers, of `File.fbs` and `Message.fbs` of Arrow's format.
"""

from __future__ import annotations

import os

from fastload.remote.files import open_binary, store_of

_MAGIC = b"ARROW1"
_LARGE = 1 << 17
"""Bytes of a batch that are dearer to read than a request is."""
_BATCHES, _HEADER, _LENGTH = 3, 2, 0
"""The numbers of fields: of the index the batches, of a message its header, and of a batch's header the rows."""


def arrow_counts(url: str) -> list[int] | None:
    """Return the number of rows of each record batch of an object, or None if it isn't in Arrow's file format."""
    with open_binary(url) as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            return None
        end = file.seek(-4 - len(_MAGIC), os.SEEK_END)
        file.seek(end - _integer(file.read(4), 0, 4))
        index = file.read(end - file.tell())
    heads = _heads(index)
    store, wanted = store_of(url), [(url, at, at + length) for at, length in heads]
    if end > _LARGE * len(heads):
        for head in wanted:  # one by one: together, what is between them would be read too
            store.will_read([head])
        return [_rows(store.read(*head)) for head in wanted]
    return [_rows(head) for head in store.read_many(wanted)]


def _heads(index: bytes) -> list[tuple[int, int]]:
    """Return where the head of each record batch begins, and its length."""
    field = _field(index, _integer(index, 0, 4), _BATCHES)
    if not field:
        return []
    blocks = field + _integer(index, field, 4)
    starts = range(blocks + 4, blocks + 4 + 24 * _integer(index, blocks, 4), 24)
    return [(_integer(index, at, 8), _integer(index, at + 8, 4)) for at in starts]


def _rows(head: bytes) -> int:
    # Files of before Arrow 0.15 lack the mark ahead of the length.
    message = head[8:] if head.startswith(b"\xff\xff\xff\xff") else head[4:]
    field = _field(message, _integer(message, 0, 4), _HEADER)
    length = _field(message, field + _integer(message, field, 4), _LENGTH)
    return _integer(message, length, 8) if length else 0


def _field(data: bytes, table: int, number: int) -> int:
    """Return where a field of a table is, or 0 if it has its default."""
    offsets = table - _integer(data, table, 4)
    slot = 4 + 2 * number
    offset = _integer(data, offsets + slot, 2) if slot < _integer(data, offsets, 2) else 0
    return offset and table + offset


def _integer(data: bytes, at: int, size: int) -> int:
    return int.from_bytes(data[at : at + size], "little", signed=True)
