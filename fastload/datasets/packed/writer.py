"""`PackedWriter`: writes a packed set completely or not at all."""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fastload._kit.disk import write_file
from fastload.datasets.manifest import REJECTED, Index, Mode, Shard, described, shard_name
from fastload.datasets.packed.format import BATCH_BYTES, BATCH_RECORDS, MAX_SIDE, MODES, schema_of
from fastload.datasets.packed.shard_file import ShardFile
from fastload.datasets.packed.unfinished import expect_free, preparing, seal
from fastload.errors import PackedDataError

_TAB = "\t"


class PackedWriter:
    """Writes a packed set, record by record.

    Leaving the `with` block completes the set. Until then, its files lie in a hidden folder `.unsealed` beside it.
    After an exception, nothing is left. After a kill, the next writer of this set deletes what is left.

    Args:
        path: the directory to create. It may exist, but must be empty.
        mode: the form of payloads. "encoded": any bytes; "jpeg": JPEGs; "raw": pixels.
        columns: name and Arrow type of each extra column.
        classes: class names in the order of their numbers; () if labels are not class numbers.
        made: how the set is written, as JSON values.
        shard_bytes: a shard ends with the record that makes its payloads and extra columns at least this long.
            fastload adds 24 bytes to a record (32 with pixels) and the name of its source, which are not counted.

    Memory: two record batches, each of 16 MiB or one record.

    Raises:
        FileExistsError: `path` has files already.
        BlockingIOError: another process writes this set.
        ValueError: an argument is out of range.
        OSError: the disk is full or cannot be written.

    Examples:
        >>> with fastload.datasets.PackedWriter("set", mode="encoded") as writer:
        ...     for number, text in enumerate([b"one", b"two"]):
        ...         writer.add(text, label=number, source=f"{number}.txt")
        >>> fastload.datasets.PackedDataset("set", decode=False)[1]
        (b'two', 1)
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        mode: Mode,
        columns: Mapping[str, pa.DataType] | None = None,
        classes: Sequence[str] = (),
        made: Mapping[str, Any] | None = None,
        shard_bytes: int = 256 * 10**6,
    ) -> None:
        if mode not in MODES:
            raise ValueError(f"mode must be one of {', '.join(MODES)}, got {mode!r}")
        if shard_bytes < 1:
            raise ValueError(f"shard_bytes must be 1 or more, got {shard_bytes}")
        extras = [pa.field(name, kind) for name, kind in (columns or {}).items()]
        self.path = os.path.abspath(path)
        self.mode = mode
        self.classes = tuple(classes)
        self.made = dict(made or {})
        if not all(isinstance(name, str) for name in self.classes):
            raise ValueError(f"classes must be names, got {self.classes[:3]}")
        if json.loads(json.dumps(self.made)) != self.made:
            raise ValueError(
                "made must be JSON values: objects with string keys, lists, numbers, strings"
            )
        self.shard_bytes = shard_bytes
        self.schema = schema_of(mode, extras)
        self.rejected: list[tuple[str, str]] = []
        self.shards: list[Shard] = []
        self._inputs = 0  # all inputs so far
        self._extras = [field.name for field in extras]
        self._rows: list[tuple[Any, ...]] = []
        self._memory = np.empty(0, np.uint8)  # see `_joined`
        # Bytes of payloads and extra columns: of waiting rows, and of those in the file.
        self._waiting_bytes = self._written_bytes = 0
        self._file: ShardFile | None = None
        self._index: Index | None = None
        self._folder = self._begin()
        self._is_open = True

    @property
    def records(self) -> int:
        """The number of records written so far."""
        waiting = len(self._rows) + (self._file.rows if self._file else 0)
        return waiting + sum(shard.rows for shard in self.shards)

    def add(
        self,
        payload: bytes | memoryview,
        *,
        label: int,
        source: str = "",
        height: int | None = None,
        width: int | None = None,
        **extras: Any,
    ) -> None:
        """Append a record. `height` and `width` are for raw pixels, `extras` are the values of extra columns."""
        if not self._is_open:
            raise ValueError(f"{self.path}: the writer is closed, so nothing can be added")
        payload = bytes(payload)  # copy a view now: its owner may reuse the memory
        number = self._inputs
        if not isinstance(label, int | np.integer) or not -(2**63) <= label < 2**63:
            raise ValueError(
                f"record {number} ({source}): the label must be an integer of 64 bits, got {label!r}"
            )
        sides = [side for side in (height, width) if side is not None]
        if not all(1 <= side <= MAX_SIDE for side in sides):
            raise ValueError(
                f"record {number} ({source}): height and width must be in 1..{MAX_SIDE}, got {sides}"
            )
        if len(sides) != (2 if self.mode == "raw" else 0):
            raise ValueError(
                f'record {number} ({source}): give height and width in mode "raw", and in no other. '
                f"The mode is {self.mode!r}, height is {height} and width is {width}"
            )
        if sides and len(payload) != sides[0] * sides[1] * 3:
            raise ValueError(f"got {len(payload)} bytes for {height} x {width} pixels of 3 bytes")
        if extras.keys() != set(self._extras):
            raise ValueError(f"expected values for the columns {self._extras}, got {list(extras)}")
        values = [extras[name] for name in self._extras]
        # A name that is not UTF-8 cannot be in an Arrow file; its odd bytes are shown as \xff.
        name = os.fsencode(source).decode("utf-8", "backslashreplace")
        self._inputs += 1
        self._rows.append((payload, *sides, label, name, zlib.crc32(payload), *values))
        self._waiting_bytes += len(payload) + sum(map(_nbytes, values))
        full = self._written_bytes + self._waiting_bytes >= self.shard_bytes
        if full or self._waiting_bytes >= BATCH_BYTES or len(self._rows) >= BATCH_RECORDS:
            self._flush()
        if full:
            self._end_shard()

    def reject(self, source: str, reason: str) -> None:
        """Record that an input is left out, and why."""
        self._inputs += 1
        self.rejected.append((source, " ".join(reason.split())))

    def finish(self) -> Index:
        """Write the waiting records and the index. Now the set is complete, and takes no more records.

        Returns:
            The index of the set.
        """
        if self._index is not None:
            return self._index
        if self._rows:
            self._flush()
        if self._file is not None:
            self._end_shard()
        if not self.shards:
            first = f"; the first: {': '.join(self.rejected[0])}" if self.rejected else ""
            raise PackedDataError(
                self.path, f"none of {self._inputs} inputs could be packed{first}"
            )
        rows = sum(shard.rows for shard in self.shards)
        made = {**self.made, "rejected": len(self.rejected)}
        index = Index(
            self.mode, rows, self.classes, described(self.schema), made, tuple(self.shards)
        )
        if self.rejected:
            write_file(os.path.join(self._folder, REJECTED), self._rejected_lines())
        seal(self._folder, self.path, index, durable=True)
        self._index = index
        self.abandon()
        return index

    def abandon(self) -> None:
        """Stop, and delete what is written, unless the set is complete."""
        if self._is_open:
            self._is_open = False
            if self._file is not None:
                self._file.discard()
            shutil.rmtree(self._folder, ignore_errors=True)
            self._lock.close()

    def __enter__(self) -> PackedWriter:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                self.finish()
        finally:
            self.abandon()

    def _begin(self) -> str:
        """Lock the folder in which the set is made, and delete what a killed writer has left there."""
        expect_free(self.path)
        with ExitStack() as stack:
            try:
                folder = stack.enter_context(preparing(*os.path.split(self.path), wait=False))
            except BlockingIOError as error:
                error.filename, error.strerror = self.path, "another process packs into this folder"
                raise
            shutil.rmtree(folder)
            os.mkdir(folder)
            self._lock = stack.pop_all()
        return folder

    # ---- writing ----

    def _flush(self) -> None:
        """Append the waiting rows to the shard as one record batch."""
        payloads, *others = zip(*self._rows, strict=True)
        offsets = np.zeros(len(payloads) + 1, np.int64)
        np.cumsum([len(payload) for payload in payloads], out=offsets[1:])
        buffers = [
            None,
            pa.py_buffer(offsets),
            pa.py_buffer(self._joined(payloads, int(offsets[-1]))),
        ]
        payload = pa.Array.from_buffers(pa.large_binary(), len(payloads), buffers)
        columns = [
            pa.array(values, type=field.type)
            for values, field in zip(others, list(self.schema)[1:], strict=True)
        ]
        batch = pa.record_batch([payload, *columns], schema=self.schema)
        if self._file is None:
            name = shard_name(len(self.shards))
            self._file = ShardFile(os.path.join(self._folder, name), self.schema, payloads=True)
        self._file.append(batch)
        self._written_bytes += self._waiting_bytes
        self._rows, self._waiting_bytes = [], 0

    def _joined(self, payloads: Sequence[bytes], nbytes: int) -> NDArray[np.uint8]:
        """Return the payloads end to end. The next batch overwrites this memory: fresh memory costs page faults."""
        if len(self._memory) < nbytes:
            self._memory = np.empty(nbytes * 5 // 4, np.uint8)
        joined = self._memory[:nbytes]
        np.concatenate([np.frombuffer(payload, np.uint8) for payload in payloads], out=joined)
        return joined

    def _end_shard(self) -> None:
        assert self._file is not None
        self.shards.append(self._file.complete())
        self._file, self._written_bytes = None, 0

    def _rejected_lines(self) -> bytes:
        """Return a line for each input that was left out, with the reason."""
        lines = (
            f"{' '.join(name.replace(_TAB, ' ').splitlines())}{_TAB}{reason}\n"
            for name, reason in self.rejected
        )
        return os.fsencode("".join(lines))


def _nbytes(value: Any) -> int:
    """Return about how many bytes a value of an extra column takes in a shard. A number counts as 8 bytes."""
    if isinstance(value, str):
        return len(value.encode(errors="surrogatepass"))
    if isinstance(value, bytes | bytearray):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(_nbytes, value.values()))
    if isinstance(value, list | tuple):
        if value and type(value[0]) in (int, float):
            # A vector. Counting its numbers one by one would take longer than writing them.
            return 8 * len(value)
        return sum(map(_nbytes, value))
    return int(getattr(value, "nbytes", 8))
