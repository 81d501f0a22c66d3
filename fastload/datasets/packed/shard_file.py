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
    """A shard that is being written, under a temporary name."""

    def __init__(self, name: str, schema: pa.Schema) -> None:
        self.name = name
        self.rows = self.record_bytes = 0
        self._sink = Sink(name)
        try:
            self._writer = pa.ipc.new_file(self._sink, schema)
        except BaseException:
            self.discard()
            raise

    def write(self, batch: pa.RecordBatch, record_bytes: int) -> None:
        """Append a record batch, and count `record_bytes` for its records."""
        self._writer.write_batch(batch)
        self.rows += batch.num_rows
        self.record_bytes += record_bytes

    def close(self) -> Shard:
        """Complete and sync the file. Return its entry in the index."""
        self._writer.close()
        os.fsync(self._sink.fd)
        self._sink.close()
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
        return Shard(os.path.basename(self.name), self.rows, at, checksum, payload)

    def discard(self) -> None:
        """Delete the incomplete file."""
        self._sink.close()
        with suppress(FileNotFoundError):
            os.unlink(self.name)


class Sink:
    """The file object to which Arrow writes a shard. Arrow calls no other methods.

    Attributes:
        fd, at: the descriptor, and the number of bytes written.
        checksum: the CRC-32 of the bytes. None if it is not wanted.
    """

    def __init__(self, name: str, *, checksum: bool = False) -> None:
        self.name = name
        self.closed = False
        self.checksum = 0 if checksum else None
        self.fd = create(name)
        self.at = 0

    def write(self, content: Any) -> int:
        """Append `content`, all of it."""
        count = write_all(self.fd, self.name, content)
        if self.checksum is not None:
            self.checksum = zlib.crc32(content, self.checksum)
        self.at += count
        return count

    def flush(self) -> None:
        """Do nothing: this has no buffer."""

    def close(self) -> None:
        """Close the file. A second call does nothing."""
        if not self.closed:
            self.closed = True
            os.close(self.fd)
