"""Checking a set of columns against its checksums, for `fastload set verify`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from fastload.datasets.packed.inspecting import counted
from fastload.datasets.packed.passes import Checks, each
from fastload.store.pieces import parts_elsewhere, pieces, read_columns_index


@dataclass(frozen=True)
class Verified:
    """The result of `verify`.

    Attributes:
        parts: number of checked parts.
        bytes: number of bytes that were read.
        seconds: run time.
        unread: number of checked parts without a checksum. Their form was checked: sizes, columns, rows, offsets,
            strings. A wrong number in them is not found.
        elsewhere: number of parts on other nodes, by the name of the node.
        bad: a sentence for each damaged part.
    """

    parts: int
    bytes: int
    seconds: float
    unread: int
    elsewhere: dict[str, int]
    bad: list[str]

    def __str__(self) -> str:
        rate = f", {self.bytes / 1e6 / max(self.seconds, 1e-9):,.0f} MB/s" if self.bytes else ""
        lines = [
            f"{counted(self.parts, 'part')} checked in {self.seconds:.1f} s, {self.bytes:,} bytes read{rate}"
        ]
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
    """Read all parts of the set of columns at `path` that are here, and check them.

    Args:
        workers: threads, each of which reads a part at a time; None: one for each core. 0: the calling thread reads.
        progress: show a bar on standard error, if that is a terminal.
        say: called with each sentence of `bad` as it is found, in the order of the parts.

    Raises FileNotFoundError and `PackedDataError` if the index cannot be read. Memory: 4 MiB for each worker.
    """
    path = os.path.abspath(path)
    index = read_columns_index(path)
    elsewhere = parts_elsewhere(path, index)
    absent = {shard for shards in elsewhere.values() for shard in shards}
    here = [shard for shard in index.shards if shard not in absent]
    began = time.monotonic()
    count, bad = 0, []
    checks = Checks(path, index, here, pieces)
    for shard, wrong in each(checks, workers=workers, progress=progress, what="Verifying"):
        count += 0 if shard.checksum is None else shard.bytes
        if wrong:
            bad.append(wrong)
            if say is not None:
                say(wrong)
    return Verified(
        parts=len(here),
        bytes=count,
        seconds=time.monotonic() - began,
        unread=sum(shard.checksum is None for shard in here),
        elsewhere={node: len(shards) for node, shards in elsewhere.items()},
        bad=bad,
    )
