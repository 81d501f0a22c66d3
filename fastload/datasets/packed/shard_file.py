"""The file of a shard while it is written."""

from __future__ import annotations

import mmap
import os
import zlib
from contextlib import suppress
from typing import Any

import pyarrow as pa

from fastload._kit.disk import create, write_all
from fastload.datasets.manifest import Shard
from fastload.datasets.packed.format import payload_extents


class ShardFile:
    """A shard that is being written, under a temporary name. It is also the file object to which Arrow writes.

    Args:
        name: path of the file.
        schema: that of its record batches.
        payloads: True for a shard of a packed set, whose checksum leaves out the payloads.
        checksum: compute the checksum of all bytes, unless there are payloads.
        durable: sync the file.

    After an error in a `with` block, the file is deleted.
    """

    def __init__(
        self,
        name: str,
        schema: pa.Schema,
        *,
        payloads: bool = False,
        checksum: bool = False,
        durable: bool = True,
    ) -> None:
        self.name, self.payloads, self.durable = name, payloads, durable
        self.rows = self._size = 0
        self.closed = False  # Arrow asks for it
        self._checksum = 0 if checksum and not payloads else None
        self._fd = create(name)
        try:
            self._arrow = pa.ipc.new_file(self, schema)
        except BaseException:
            self.discard()
            raise

    def __enter__(self) -> ShardFile:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            self.discard()

    def append(self, batch: pa.RecordBatch) -> None:
        """Append a record batch."""
        self._arrow.write_batch(batch)
        self.rows += batch.num_rows

    def complete(self) -> Shard:
        """Complete the file. Return its entry in the index."""
        self._arrow.close()
        if self.durable:
            os.fsync(self._fd)
        self.close()
        payload, checksum = self._payloads() if self.payloads else ((), self._checksum)
        return Shard(os.path.basename(self.name), self.rows, self._size, checksum, payload)

    def discard(self) -> None:
        """Delete the incomplete file."""
        self.close()
        with suppress(OSError):
            os.unlink(self.name)

    def _payloads(self) -> tuple[tuple[tuple[int, int], ...], int]:
        """Return where the payloads lie in the file, and the checksum of all other bytes."""
        with open(self.name, "rb") as file:  # Arrow opens only names that are UTF-8
            whole = pa.py_buffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        reader = pa.ipc.open_file(whole)
        batches = [reader.get_batch(k) for k in range(reader.num_record_batches)]
        payload = payload_extents(batches, whole.address)
        checksum, at = 0, 0
        with memoryview(whole) as content:
            for start, length in (*payload, (len(content), 0)):
                checksum = zlib.crc32(content[at:start], checksum)
                at = start + length
        return payload, checksum

    # ---- for Arrow ----

    def write(self, content: Any) -> int:
        """Append bytes, all of them."""
        count = write_all(self._fd, self.name, content)
        if self._checksum is not None:
            self._checksum = zlib.crc32(content, self._checksum)
        self._size += count
        return count

    def flush(self) -> None:
        """Do nothing: this has no buffer."""

    def close(self) -> None:
        """Close the file. A second call does nothing."""
        if not self.closed:
            self.closed = True
            os.close(self._fd)
