"""Making packed sets, looking through them, looking at them: what the commands do."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, NamedTuple

from torch.utils.data import Dataset
from tqdm import tqdm

import fastload
from fastload.cores import usable_cores
from fastload.datasets.packed.format import INDEX, MODES, REJECTED, Mode, read_index
from fastload.datasets.packed.reader import PackedDataset
from fastload.datasets.packed.sources import Files, Input, Parquet, Source, parquet_files
from fastload.datasets.packed.writer import PackedWriter
from fastload.errors import DecodeError, PackedDataError
from fastload.loader import DataLoader

_AHEAD_BYTES = (
    64 * 2**20
)  # of records that wait to be written; workers go on while the disk is waited for
_AHEAD = 1024  # records, likewise
_TOGETHER = 16  # records that are handed over at once: each hand-over wakes this thread
_PIECE = 64  # records that a worker verifies at a time


class Prepared(NamedTuple):
    """What a worker made of an input; without a payload it is rejected for the `reason`."""

    made_of: Input
    payload: bytes | None = None
    sides: tuple[int, int] | None = None  # height and width of raw pixels
    input_bytes: int = 0
    reason: str = ""
    error: Exception | None = (
        None  # to be raised in its place: behind the records before it, which it comes with
    )


@dataclass(frozen=True)
class Packed:
    """What packing did. `records`, `rejected`, `shards`, `bytes` are the set's; the rest is of this run.

    `taken_over` are the records of a run that was stopped, `input_bytes` those of this run's inputs.
    """

    path: str
    records: int
    rejected: int
    shards: int
    classes: int
    bytes: int
    taken_over: int
    input_bytes: int
    seconds: float

    def __str__(self) -> str:
        new = self.records - self.taken_over
        lines = [
            f"{self.path}: {_counted(self.records, 'record')} of {_counted(self.classes, 'class', 'classes')} in "
            f"{_counted(self.shards, 'shard')}, {_size(self.bytes)}",
            f"{new:,} records from {_size(self.input_bytes)} in {self.seconds:.1f} s: "
            f"{new / max(self.seconds, 1e-9):,.0f} records/s",
        ]
        if self.taken_over:
            lines.append(f"{self.taken_over:,} records were there from a run that was stopped")
        if self.rejected:
            name = os.path.join(self.path, REJECTED)
            lines.append(f"{self.rejected:,} inputs left out: see {name}")
        return "\n".join(lines)


def pack(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    mode: Mode = "jpeg",
    max_size: int | None = None,
    quality: int | None = None,
    shard_mb: float = 256,
    workers: int | None = None,
    on_error: Literal["raise", "skip"] = "raise",
    check: bool = True,
    base_dir: str | os.PathLike[str] | None = None,
    image_column: str = "image",
    label_column: str = "label",
    columns: Sequence[str] = (),
    progress: bool = False,
) -> Packed:
    """Make the packed set `out` of the pictures in `source`.

    The set is a function of the inputs, the arguments and the decoder and encoder, byte by byte, and not of
    `workers`. Stopped or killed, it leaves a directory that does not open as a set; the same call goes on behind the
    last complete shard.

    Args:
        source: not changed until the run is complete, as of files only the names are compared, and of Parquet
            the sizes: a file list, a tree with one directory per class, a Parquet file, or a directory with some.
        mode: "encoded": the files' bytes as they are. "jpeg": pictures of `max_size` as JPEGs of `quality`.
            "raw": such pictures' pixels. These two neither apply nor keep an EXIF orientation.
        max_size: pixels of the longer side at most, 256 by default; smaller pictures stay as they are.
        quality: libjpeg's, 1 to 95, 90 by default.
        shard_mb: a shard ends with the record that makes its payloads and further columns so many million bytes,
            at least.
        workers: threads; None for one per CPU that this process may use, 0 for none but the calling one.
        on_error: "raise" ends the run at the first input, in order, that cannot be read or decoded; "skip" leaves it
            out, counts it, and lists it in `rejected.txt`.
        check: with "encoded", decode each picture to see whether it can be. False takes any bytes for granted.
        base_dir: see `ImageFileList`.
        image_column, label_column, columns: of Parquet files; `columns` are kept as further columns of the set.
        progress: a bar on standard error, where that is a terminal.

    Memory: at most 1,024 records or about 64 MiB of them in flight, two record batches of 16 MiB, and the paths.

    Raises ValueError for arguments out of range or that do not belong to the mode, DecodeError and OSError for
    inputs (FileListError for lists), OSError where `out` cannot be written, `PackedDataError` where no
    input could be packed, FileExistsError and BlockingIOError as `PackedWriter`.
    """
    pixels = _pixels_of(mode, max_size, quality)
    if on_error not in ("raise", "skip"):
        raise ValueError(f'on_error must be "raise" or "skip", got {on_error!r}')
    if workers is None:
        workers = usable_cores()
    source, out = os.fspath(source), os.fspath(out)
    inputs: Source
    if parquet_files(source):
        inputs = Parquet(
            source, image_column=image_column, label_column=label_column, columns=columns
        )
    elif columns:
        raise ValueError(f"columns are taken from Parquet files, and {source} is none")
    else:
        inputs = Files(source, base_dir=None if base_dir is None else os.fspath(base_dir))
    check = check or mode != "encoded"
    made = {"fastload": fastload.__version__, **inputs.about, **pixels, "check": check}
    began = time.monotonic()
    writer = PackedWriter(
        out,
        mode=mode,
        columns=inputs.columns,
        classes=inputs.classes,
        made=made,
        shard_bytes=int(shard_mb * 1e6),
    )
    with writer:
        taken_over, input_bytes = writer.records, 0
        prepare = _Prepare(mode, skip=on_error == "skip", check=check, **pixels)
        loader: DataLoader[Prepared] = DataLoader(
            prepare,
            batch_size=_TOGETHER,
            sampler=_Order(inputs, writer.done),
            collate_fn=_as_it_is,
            num_workers=workers,
            seed=0,
            prefetch_batches=_AHEAD // _TOGETHER,
            prefetch_bytes=_AHEAD_BYTES,
        )
        with loader, _bar(progress, len(inputs), writer.done, "record") as bar:
            for made_of, payload, sides, size, reason, error in chain.from_iterable(loader):
                if error is not None:
                    raise error
                if payload is None:
                    writer.reject(made_of.name, reason)
                else:
                    height, width = sides or (None, None)
                    input_bytes += size
                    writer.add(
                        payload,
                        label=made_of.label,
                        source=made_of.name,
                        height=height,
                        width=width,
                        **made_of.extras,
                    )
                bar.update()
        index = writer.finish()
    return Packed(
        out,
        index.rows,
        len(writer.rejected),
        len(index.shards),
        len(index.classes),
        sum(shard.bytes for shard in index.shards),
        taken_over,
        input_bytes,
        time.monotonic() - began,
    )


def _counted(number: int, one: str, many: str = "") -> str:
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def _pixels_of(mode: Mode, max_size: int | None, quality: int | None) -> dict[str, int]:
    """The arguments that belong to the mode, with their defaults."""
    if mode not in MODES:
        raise ValueError(f"mode must be one of {', '.join(MODES)}, got {mode!r}")
    if max_size is not None and mode == "encoded":
        raise ValueError('max_size does not go with mode "encoded", which leaves files as they are')
    if quality is not None and mode != "jpeg":
        raise ValueError(f'quality goes with mode "jpeg" only, and the mode is "{mode}"')
    found: dict[str, int] = {}
    if mode != "encoded":
        found["max_size"] = 256 if max_size is None else max_size
        if not 1 <= found["max_size"] <= 65535:
            raise ValueError(f"max_size must be in 1..65535, got {max_size}")
    if mode == "jpeg":
        found["quality"] = 90 if quality is None else quality
        if not 1 <= found["quality"] <= 95:
            raise ValueError(f"quality must be in 1..95, got {quality}")
    return found


class _Order:
    """What the loader takes for a sampler: the inputs themselves, in order, read where the loop is."""

    def __init__(self, source: Source, start: int) -> None:
        self.source, self.start = source, start

    def __len__(self) -> int:
        return len(self.source) - self.start

    def __iter__(self) -> Iterator[Input]:
        return self.source.inputs(self.start)


class _Prepare(Dataset[Prepared]):
    """Makes the payload of an input, in the loader's threads."""

    fastload_per_worker = ()

    def __init__(
        self, mode: Mode, *, skip: bool, check: bool, max_size: int | None = None, quality: int = 0
    ) -> None:
        self.mode, self.skip, self.check = mode, skip, check
        self.max_size, self.quality = max_size, quality

    def __getitem__(self, made_of: Input) -> Prepared:
        try:
            return self._prepared(made_of)
        except (DecodeError, OSError) as error:
            if not self.skip:
                return Prepared(made_of, error=error)
            reason = error.strerror if isinstance(error, OSError) else error.reason
            return Prepared(made_of, reason=reason or str(error))

    def _prepared(self, made_of: Input) -> Prepared:
        name, encoded = made_of.path or made_of.name, made_of.encoded
        if made_of.path is not None:
            try:
                with fastload.stage("read"), open(made_of.path, "rb", buffering=0) as file:
                    encoded = file.readall()
            except OSError as error:
                error.filename = name  # unlike open(), a read does not say
                raise
        if not isinstance(encoded, bytes):  # out of a table
            found = "nothing" if encoded is None else f"a {type(encoded).__name__}"
            raise DecodeError(
                name, f"the row has {found} where the bytes of a picture are expected"
            )
        size = len(encoded)
        if not self.check:
            return Prepared(made_of, encoded, None, size)

        from fastload.image import decode_pixels, encode_rgb

        with fastload.stage("decode"):
            pixels = decode_pixels(encoded, name=name, max_size=self.max_size)
        if self.mode == "encoded":
            return Prepared(made_of, encoded, None, size)
        if self.mode == "raw":
            return Prepared(made_of, pixels.tobytes(), pixels.shape[:2], size)
        with fastload.stage("encode"):
            return Prepared(made_of, encode_rgb(pixels, quality=self.quality), None, size)


def _as_it_is(sample: Any) -> Any:
    return sample


def _bar(progress: bool, total: int, done: int, unit: str) -> tqdm[Any]:
    # None: hidden unless standard error is a terminal.
    return tqdm(total=total, initial=done, unit=unit, disable=None if progress else True)


# ---- verify ----


@dataclass(frozen=True)
class Verified:
    """What was read, and what is wrong: a sentence for each shard or record."""

    records: int
    bytes: int
    seconds: float
    bad: list[str]


def verify(
    path: str | os.PathLike[str],
    *,
    workers: int | None = None,
    progress: bool = False,
    say: Callable[[str], None] | None = None,
) -> Verified:
    """Read everything in the set at `path` and hold it against its checksums.

    Args:
        workers: see `pack`.
        say: called with each sentence as it is found, in the order of the records.

    Raises FileNotFoundError and `PackedDataError` where the index cannot be read. Memory: as `PackedDataset`.
    """
    dataset = PackedDataset(path, decode=False, verify="always")
    if workers is None:
        workers = usable_cores()
    began, records, count = time.monotonic(), 0, 0
    bad: list[str] = []
    loader: DataLoader[tuple[int, int, list[str]]] = DataLoader(
        _Pieces(dataset), batch_size=None, collate_fn=_as_it_is, num_workers=workers, seed=0
    )
    with loader, _bar(progress, len(dataset), 0, "record") as bar:
        for rows, size, found in loader:
            for text in found:
                if text not in bad[-1:]:  # each piece of a bad shard says it
                    bad.append(text)
                    if say is not None:
                        say(text)
            records, count = records + rows, count + size
            bar.update(rows)
    dataset.close()
    return Verified(records, count, time.monotonic() - began, bad)


class _Pieces(Dataset[tuple[int, int, list[str]]]):
    """Sample k reads up to 64 records of one shard: how many there are, their bytes, what is wrong."""

    fastload_per_worker = ()

    def __init__(self, dataset: PackedDataset) -> None:
        self.dataset = dataset
        self.pieces: list[tuple[str, range]] = []
        # What is said of them, for all their pieces: each would read the shard's columns again.
        self.bad_shards: dict[str, str] = {}
        end = 0
        for shard in read_index(dataset.path).shards:
            begin, end = end, end + shard.rows
            starts = range(begin, end, _PIECE)
            self.pieces += [(shard.name, range(k, min(k + _PIECE, end))) for k in starts]

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, number: int) -> tuple[int, int, list[str]]:
        shard, piece = self.pieces[number]
        size = 0
        bad: list[str] = []
        if shard not in self.bad_shards:
            try:
                self.dataset.load(piece[0])
            except (PackedDataError, OSError) as error:
                self.bad_shards[shard] = str(error)
        for record in piece:
            if shard in self.bad_shards:
                break
            try:
                size += len(self.dataset.read(record))
            except PackedDataError as error:
                if error.record is None:
                    self.bad_shards[shard] = str(error)
                else:
                    bad.append(f"{self.dataset.locate(record)}: {error.reason}")
            except OSError as error:
                bad.append(f"{self.dataset.locate(record)}: {error.strerror}")
        bad += [self.bad_shards[shard]] if shard in self.bad_shards else []
        return len(piece), size, bad


# ---- inspect ----


def inspect(path: str | os.PathLike[str], *, records: int = 5) -> str:
    """Lines that say what the set at `path` is: schema, counts, sizes, how it was made, its first records.

    Raises FileNotFoundError and `PackedDataError`, as `PackedDataset`.
    """
    dataset = PackedDataset(path, decode=False)
    index = read_index(dataset.path)
    size = sum(shard.bytes for shard in index.shards)
    payload = sum(length for shard in index.shards for _, length in shard.payload)
    lines = [
        f"{dataset.path}: {index.rows:,} records, mode {index.mode}, {len(index.classes):,} classes",
        f"{len(index.shards)} shards, {_size(size)}; payloads {_size(payload)}, {_size(payload / index.rows)} each",
        "columns: " + ", ".join(f"{name} {kind}" for name, kind in index.schema),
        "made: " + (", ".join(f"{name} {value}" for name, value in index.made.items()) or "-"),
        f"index: {os.path.join(dataset.path, INDEX)}",
    ]
    for number in range(min(records, index.rows)):
        length, label = len(dataset.read(number)), dataset[number][1]
        name = dataset.classes[label] if 0 <= label < len(dataset.classes) else ""
        lines.append(f"{dataset.locate(number)}: {_size(length)}, label {label} {name}".rstrip())
    dataset.close()
    return "\n".join(lines)


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} TB"
