"""Checking a set against its checksums, for `fastload set verify`."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from fastload._kit.texts import counted
from fastload.datasets.manifest import Shard
from fastload.errors import PackedDataError, in_one_line
from fastload.store.shard_bytes import Pieces, each, parts_elsewhere, pieces, read_set


@dataclass(frozen=True)
class Verified:
    """The result of `verify`.

    Attributes:
        parts, rows: number of checked parts, and of their rows or records.
        bytes: number of bytes that were read.
        unread: number of checked parts without a checksum. Their form was checked: sizes, columns, rows, offsets,
            strings. A wrong number in them is not found.
        elsewhere: number of parts on other nodes, by the name of the node.
        bad: a sentence for each damaged part or record.
    """

    parts: int
    rows: int
    bytes: int
    unread: int
    elsewhere: dict[str, int]
    bad: list[str]

    def __str__(self) -> str:
        lines = [f"{counted(self.parts, 'part')} checked, {self.bytes:,} bytes read"]
        if self.unread:
            lines.append(
                f"{self.unread:,} of these parts have no checksums, so only their form was checked, not their values"
            )
        if self.elsewhere:
            nodes = ", ".join(f"{node} ({count:,})" for node, count in self.elsewhere.items())
            count = sum(self.elsewhere.values())
            lines.append(f"{counted(count, 'part is', 'parts are')} not here, but on {nodes}")
        return "\n".join(lines)


def verify(
    path: str | os.PathLike[str],
    *,
    workers: int | None = None,
    progress: bool = False,
    say: Callable[[str], None] | None = None,
) -> Verified:
    """Read all parts of the set at `path` that are here, and check them.

    Args:
        workers: threads, each of which reads a part at a time; None: one for each core. 0: the calling thread reads.
        progress: show a bar on standard error, if that is a terminal.
        say: called with each sentence of `bad` as it is found, in the order of the parts.

    Raises FileNotFoundError and `PackedDataError` if the index cannot be read. Memory: for each worker 4 MiB, or of a
    packed set a record batch and 29 bytes for each record of a shard.
    """
    path = os.path.abspath(path)
    index = read_set(path)
    elsewhere = parts_elsewhere(path, index)
    absent = {shard for shards in elsewhere.values() for shard in shards}
    here = [shard for shard in index.shards if shard not in absent]
    bad: list[str] = []
    found = each(
        faults_of,
        partial(pieces, path, index),
        here,
        workers=workers,
        progress=progress,
        what="Verifying",
    )
    for _, faults in found:
        bad += faults
        for text in faults:
            if say is not None:
                say(text)
    return Verified(
        parts=len(here),
        rows=sum(shard.rows for shard in here),
        bytes=sum(shard.bytes for shard in here if shard.checksum is not None),
        unread=sum(shard.checksum is None for shard in here),
        elsewhere={node: len(shards) for node, shards in elsewhere.items()},
        bad=bad,
    )


def faults_of(_: Shard, read: Pieces) -> list[str]:
    """Read a shard. Return a sentence for each fault."""
    bad: list[str] = []
    try:
        for _piece in read(bad):
            pass
    except (PackedDataError, OSError) as error:
        bad.append(in_one_line(error))
    return bad
