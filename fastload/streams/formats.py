"""How a shard is read from any of its samples on."""

from __future__ import annotations

import bisect
import gzip
import itertools
import json
import os
import tarfile
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from fastload.errors import StateError
from fastload.remote.arrow_index import arrow_counts
from fastload.remote.files import is_url, mappable, open_binary, size_of

Record = tuple[int, int, Any]
"""The position of a sample in its shard, that of the next one, and what `Format.sample` makes it of."""


class Format(Protocol):
    """Reads shards of one format. Positions are integers of its own, which grow."""

    seeks: bool
    """Whether it can begin anywhere without reading what is before."""

    def read(self, path: Any, start: int, stop: int | None) -> Iterator[Record]:
        """Yield the samples of a shard whose positions are at least `start` and less than `stop`."""

    def bounds(self, path: Any, part: int, parts: int) -> tuple[int, int]:
        """Return the positions where part number `part` of `parts` begins and ends."""

    def sample(self, record: Any) -> Any:
        """Return the sample. If that raises, the next one can be read."""


class _Whole:
    def sample(self, record: Any) -> Any:
        """See `Format`."""
        return record


class JsonLines:
    """Lines of JSON. A position is the offset of a line in bytes."""

    seeks = True

    def read(self, path: Any, start: int, stop: int | None) -> Iterator[Record]:
        """See `Format`."""
        with open_binary(path, stop) as file:
            if start:
                _move_to_line(file, start)
            for line in file:
                if stop is not None and start >= stop:
                    return
                after = start + len(line)
                if not line.isspace():
                    yield start, after, line
                start = after

    def bounds(self, path: Any, part: int, parts: int) -> tuple[int, int]:
        """See `Format`. A line belongs to the part in which it begins."""
        size = size_of(path)
        with open_binary(path) as file:
            return tuple(_line_at(file, size * k // parts) for k in (part, part + 1))  # type: ignore[return-value]

    def sample(self, record: Any) -> Any:
        """See `Format`."""
        return _parsed(record)


def _move_to_line(file: Any, start: int) -> None:
    """Move a file to where a line begins, or the file ends."""
    file.seek(start - 1)
    before, after = file.read(1), file.read(1)
    if before != b"\n" and (after or not before):
        raise StateError(f"no line begins at byte {start}: the file has changed, or is shorter")
    file.seek(start)


_scan = json.JSONDecoder().scan_once  # type: ignore[attr-defined]  # in C


def _parsed(line: bytes) -> Any:
    """Return `json.loads(line)`, in half the time for a plain line."""
    text = line.decode("utf-8", "surrogatepass").rstrip()
    try:
        sample, end = _scan(text, 0)
    except (StopIteration, ValueError):
        end = -1
    return sample if end == len(text) else json.loads(line)


def _line_at(file: Any, offset: int) -> int:
    """Return where the first line begins at or after an offset."""
    if not offset:
        return 0
    file.seek(offset - 1)
    file.readline()
    return int(file.tell())


_ROWS = 1024
"""How many rows of a Parquet file become Python objects at a time."""


class Parquet(_Whole):
    """Parquet files. A position is the number of a row, and a sample a dict."""

    seeks = True

    def read(self, path: Any, start: int, stop: int | None) -> Iterator[Record]:
        """See `Format`. It reads one row group after another, and makes Python objects from `start` on."""
        import pyarrow.parquet as pq

        with mappable(path) as source, pq.ParquetFile(source, memory_map=True) as file:
            counts = [file.metadata.row_group(k).num_rows for k in range(file.num_row_groups)]
            ends = list(itertools.accumulate(counts))
            stop = ends[-1] if stop is None and ends else stop or 0
            first, last = bisect.bisect_right(ends, start), bisect.bisect_left(ends, stop)
            row = ends[first] - counts[first] if first < len(ends) else stop
            groups = range(first, min(last + 1, len(ends)))
            # pyarrow fetches all groups of a call before the first row.
            calls = [[group] for group in groups] if is_url(path) else [groups]
            batches = (file.iter_batches(_ROWS, row_groups=call) for call in calls)
            for batch in itertools.chain.from_iterable(batches):
                if row >= stop:
                    return
                if (skipped := max(0, start - row)) < batch.num_rows:
                    rows = batch.slice(skipped, max(0, stop - row - skipped)).to_pylist()
                    for k, sample in enumerate(rows, row + skipped):
                        yield k, k + 1, sample
                row += batch.num_rows

    def bounds(self, path: Any, part: int, parts: int) -> tuple[int, int]:
        """See `Format`."""
        import pyarrow.parquet as pq

        with mappable(path) as source:
            rows = pq.read_metadata(source).num_rows
        return rows * part // parts, rows * (part + 1) // parts


class Arrow(_Whole):
    """Arrow files, of the file or the stream format. A position is the number of a row, and a sample a dict."""

    seeks = True

    def read(self, path: Any, start: int, stop: int | None) -> Iterator[Record]:
        """See `Format`."""
        for row, batch in _arrow_batches(path, start):
            if stop is not None and row >= stop:
                return
            if (skipped := max(0, start - row)) < batch.num_rows:
                wanted = None if stop is None else max(0, stop - row - skipped)
                for k, sample in enumerate(batch.slice(skipped, wanted).to_pylist(), row + skipped):
                    yield k, k + 1, sample

    def bounds(self, path: Any, part: int, parts: int) -> tuple[int, int]:
        """See `Format`."""
        if is_url(path) and (counts := arrow_counts(path)) is not None:
            rows = sum(counts)
        else:
            rows = sum(batch.num_rows for _, batch in _arrow_batches(path, 0))
        return rows * part // parts, rows * (part + 1) // parts


def _arrow_batches(path: Any, start: int) -> Iterator[tuple[int, Any]]:
    """Yield the record batches of a file, each with the number of its first row. Those of local files are mapped.

    Of an object, it passes over batches before row `start` without reading them, if the file has an index.
    """
    import pyarrow as pa

    with open_binary(path) if is_url(path) else pa.memory_map(os.fspath(path)) as file:
        try:
            reader = pa.ipc.open_file(file)
        except pa.ArrowInvalid:
            file.seek(0)
            reader = pa.ipc.open_stream(file)
            row, batches = 0, reader
        else:
            counts = (arrow_counts(path) if start and is_url(path) else None) or []
            ends = list(itertools.accumulate(counts))
            first = bisect.bisect_right(ends, start)
            row = ends[first - 1] if first else 0
            batches = map(reader.get_batch, range(first, reader.num_record_batches))
        for batch in batches:
            yield row, batch
            row += batch.num_rows


class Tar(_Whole):
    """Tar files of WebDataset's layout: neighbours whose names are equal up to the first dot are one sample.

    A sample is a dict of bytes by ending, with `__key__` and `__url__`, the path. A position is the offset of its first
    header.
    """

    seeks = True

    def read(self, path: Any, start: int, stop: int | None) -> Iterator[Record]:
        """See `Format`."""
        with open_binary(path, stop) as file:
            file.seek(start)
            sample: dict[str, Any] = {}
            with tarfile.open(fileobj=file, mode="r:") as tar:
                for member in tar:
                    # Or it would keep every header.
                    tar.members = []  # type: ignore[attr-defined]
                    key, ending = _key_of(member.name)
                    if not member.isfile():
                        continue
                    # A name that comes twice begins another sample, or one of the two would be lost.
                    if sample and (sample["__key__"] != key or ending in sample):
                        yield start, member.offset, sample
                        sample, start = {}, member.offset
                    if stop is not None and start >= stop:
                        return
                    sample["__key__"], sample["__url__"] = key, str(os.fspath(path))
                    sample[ending] = tar.extractfile(member).read()  # type: ignore[union-attr]
                end = tar.offset
            file.seek(end)
            header = file.read(tarfile.BLOCKSIZE)
            if any(header) or len(header) % tarfile.BLOCKSIZE:
                # `tarfile` ends there as if it were the end of the archive.
                raise tarfile.ReadError(
                    f"the tar file is cut, or has a wrong header, at byte {end}"
                )
            if sample:
                yield start, end, sample

    def bounds(self, path: Any, part: int, parts: int) -> tuple[int, int]:
        """See `Format`. It reads all headers of the shard."""
        with open_binary(path) as file, tarfile.open(fileobj=file, mode="r:") as tar:
            members = [m for m in tar if m.isfile()]
        keys = itertools.groupby(members, lambda member: _key_of(member.name)[0])
        starts = [next(group).offset for _, group in keys] + [size_of(path)]
        first, last = (len(starts[:-1]) * k // parts for k in (part, part + 1))
        return starts[first], starts[last]


def _key_of(name: str) -> tuple[str, str]:
    """Return the name of a sample's file up to the first dot, and what follows."""
    folder, slash, file = name.rpartition("/")
    stem, _, ending = file.partition(".")
    return folder + slash + stem, ending.lower()


class Iterated(_Whole):
    """What a function of the user's iterates over. A position is a sample's number; those before are read again."""

    seeks = False

    def __init__(self, function: Callable[[Any], Iterator[Any]]) -> None:
        self._function = function

    def read(self, path: Any, start: int, stop: int | None) -> Iterator[Record]:
        """See `Format`."""
        for k, sample in enumerate(itertools.islice(self._function(path), start, stop), start):
            yield k, k + 1, sample

    def bounds(self, path: Any, part: int, parts: int) -> tuple[int, int]:
        """See `Format`."""
        raise AssertionError("it does not seek")


def _compressed_lines(path: Any) -> Iterator[Any]:
    with open_binary(path) as raw, gzip.open(raw, "rb") as file:
        yield from (line for line in file if not line.isspace())


class CompressedLines(Iterated):
    """Lines of JSON in a gzip file. A position is the number of a line that is not blank."""

    def __init__(self) -> None:
        super().__init__(_compressed_lines)

    def sample(self, record: Any) -> Any:
        """See `Format`."""
        return _parsed(record)


_FORMATS: dict[str, Format] = {
    "jsonl": JsonLines(),
    "jsonl.gz": CompressedLines(),
    "parquet": Parquet(),
    "arrow": Arrow(),
    "tar": Tar(),
}


def format_of(read: str | Callable[[Any], Iterator[Any]] | None, path: Any) -> Format:
    """Return the format that `read` names, or that the ending of a path tells."""
    if callable(read):
        return Iterated(read)
    name = os.path.basename(os.fspath(path)) if read is None else f".{read}"
    for ending, form in _FORMATS.items():
        if name.endswith(f".{ending}"):
            return form
    known = ", ".join(_FORMATS)
    given = f"read={read!r}" if read is not None else f"the ending of {name!r}"
    raise ValueError(
        f"{given} is not a known format ({known}). Pass read=, a function that returns an iterator"
    )
