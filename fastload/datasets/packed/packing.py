"""Packing sets, for the command `fastload set pack`."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from tqdm import tqdm

import fastload
from fastload._kit.pool import in_order
from fastload._kit.texts import counted, size_text
from fastload.datasets.manifest import REJECTED, Mode
from fastload.datasets.packed.format import MODES
from fastload.datasets.packed.sources import Input, open_source
from fastload.datasets.packed.writer import PackedWriter
from fastload.errors import DecodeError
from fastload.image import decode_pixels, encode_rgb
from fastload.image.decode import read_file

AHEAD, AHEAD_BYTES = 1024, 64 * 2**20
"""The most records, and the most bytes, that wait to be written: so workers continue while the disk is slow."""
_PIXELS = {"max_size": (("jpeg", "raw"), 256, 65535), "quality": (("jpeg",), 90, 95)}
"""For arguments that belong to some modes: these modes, the default, the maximum."""


class Result(NamedTuple):
    """An input that a worker has prepared. Without a payload, it is rejected for the `reason`."""

    made_of: Input
    payload: bytes | None = None
    sides: Mapping[str, int] = {}  # of raw pixels
    input_bytes: int = 0
    reason: str = ""


@dataclass(frozen=True)
class PackResult:
    """The result of packing. `bytes` is the size of the set, `input_bytes` that of its inputs."""

    path: str
    records: int
    rejected: int
    shards: int
    classes: int
    bytes: int
    input_bytes: int
    seconds: float

    def __str__(self) -> str:
        lines = [
            f"{self.path}: {counted(self.records, 'record')} of {counted(self.classes, 'class')} in "
            f"{counted(self.shards, 'shard')}, {size_text(self.bytes)}",
            f"packed from {size_text(self.input_bytes)} in {self.seconds:.1f} s: "
            f"{self.records / max(self.seconds, 1e-9):,.0f} records/s",
        ]
        if self.rejected:
            name = os.path.join(self.path, REJECTED)
            lines.append(f"{counted(self.rejected, 'input')} left out: see {name}")
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
) -> PackResult:
    """Pack the images in `source` into the set `out`.

    Every byte of the set is a function of the inputs, the arguments, the decoder and the encoder, and not of
    `workers`. If it is stopped or killed, there is no set, and the next call begins anew.

    Args:
        source: a file list, a tree with one directory per class, a Parquet file, or a directory of Parquet files.
        mode: "encoded": the files' bytes as they are. "jpeg": images of `max_size` as JPEGs of `quality`.
            "raw": the pixels of such images. These two neither apply nor keep an EXIF orientation.
        max_size: the longest side, in pixels (default 256). Smaller images stay as they are.
        quality: libjpeg's, 1 to 95 (default 90).
        shard_mb: a shard ends with the record that brings its payloads and extra columns to this many million bytes.
        workers: threads. None: one for each CPU that this process may use. 0: only the calling thread.
        on_error: "raise" ends the run at the first input, in order, that cannot be read or decoded. "skip" leaves
            such an input out, counts it, and lists it in `rejected.txt`.
        check: with "encoded", decode each image to check that it can be decoded. False accepts any bytes.
        base_dir: see `ImageFileList`.
        image_column, label_column, columns: columns of Parquet files. `columns` become extra columns of the set.
        progress: a bar on standard error, if that is a terminal.

    Memory: at most 1,024 records, or about 64 MiB of them, in flight, but one for each thread at least. Beside them
    two record batches of 16 MiB, and the paths.

    Raises ValueError for arguments that are out of range or do not belong to the mode. Raises DecodeError and OSError
    for inputs, FileListError for lists, and OSError if `out` cannot be written. Raises `PackedDataError` if no input
    could be packed, and FileExistsError and BlockingIOError as `PackedWriter` does.
    """
    pixels = _pixels_of(mode, max_size=max_size, quality=quality)
    if on_error not in ("raise", "skip"):
        raise ValueError(f'on_error must be "raise" or "skip", got {on_error!r}')
    source, out = os.fspath(source), os.fspath(out)
    inputs = open_source(
        source,
        base_dir=None if base_dir is None else os.fspath(base_dir),
        named=(image_column, label_column, *columns),
    )
    check = check or mode != "encoded"
    name = os.path.basename(os.path.normpath(source))
    made = {"fastload": fastload.__version__, "source": name, **pixels, "check": check}
    began = time.monotonic()
    with PackedWriter(
        out,
        mode=mode,
        columns=inputs.columns,
        classes=inputs.classes,
        made=made,
        shard_bytes=int(shard_mb * 1e6),
    ) as writer:
        input_bytes = 0
        prepare = _Prepare(mode, skip=on_error == "skip", check=check, **pixels)
        # None: hidden unless standard error is a terminal.
        hidden = None if progress else True
        with (
            _prepared(prepare, inputs.inputs(), workers) as results,
            tqdm(total=len(inputs), unit="record", disable=hidden) as bar,
        ):
            for made_of, payload, sides, size, reason in results:
                if payload is None:
                    writer.reject(made_of.name, reason)
                else:
                    more: Any = {**sides, **made_of.extras}
                    writer.add(payload, label=made_of.label, source=made_of.name, **more)
                input_bytes += size
                bar.update()
        index = writer.finish()
    return PackResult(
        out,
        index.rows,
        len(writer.rejected),
        len(index.shards),
        len(index.classes),
        sum(shard.bytes for shard in index.shards),
        input_bytes,
        time.monotonic() - began,
    )


def _pixels_of(mode: Mode, **given: int | None) -> dict[str, int]:
    """Return the arguments that belong to the mode, with their defaults."""
    if mode not in MODES:
        raise ValueError(f"mode must be one of {', '.join(MODES)}, got {mode!r}")
    found: dict[str, int] = {}
    for name, (modes, default, most) in _PIXELS.items():
        value = given[name]
        if mode in modes:
            found[name] = default if value is None else value
            if not 1 <= found[name] <= most:
                raise ValueError(f"{name} must be in 1..{most}, got {value}")
        elif value is not None:
            raise ValueError(
                f"{name} works only with mode {' or '.join(modes)}, but the mode is {mode!r}"
            )
    return found


@contextmanager
def _prepared(
    prepare: _Prepare, inputs: Iterator[Input], workers: int | None
) -> Iterator[Iterator[Result]]:
    """Yield the prepared inputs. In the block, each thread computes with one of torch's: they use all cores already."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with in_order(
            prepare, inputs, workers, ahead=AHEAD, nbytes=_nbytes, max_bytes=AHEAD_BYTES
        ) as results:
            yield results
    finally:
        torch.set_num_threads(before)


def _nbytes(prepared: Result) -> int:
    """Return the bytes in memory: those of the record, and of an input that a table holds."""
    encoded = prepared.made_of.encoded
    return len(prepared.payload or b"") + (len(encoded) if isinstance(encoded, bytes) else 0)


class _Prepare:
    """Prepares the payload of the input that it is called with."""

    def __init__(
        self, mode: Mode, *, skip: bool, check: bool, max_size: int | None = None, quality: int = 0
    ) -> None:
        self.mode, self.skip, self.check = mode, skip, check
        self.max_size, self.quality = max_size, quality

    def __call__(self, made_of: Input) -> Result:
        try:
            return self._prepared(made_of)
        except (DecodeError, OSError) as error:
            if not self.skip:
                raise
            reason = error.strerror if isinstance(error, OSError) else error.reason
            return Result(made_of, reason=reason or str(error))

    def _prepared(self, made_of: Input) -> Result:
        name, encoded = made_of.path or made_of.name, made_of.encoded
        if made_of.path is not None:
            encoded = read_file(name)
        if not isinstance(encoded, bytes):  # a value from a table
            found = "nothing" if encoded is None else f"a {type(encoded).__name__}"
            raise DecodeError(name, f"the row has {found}, expected the bytes of an image")
        size = len(encoded)
        if not self.check:
            return Result(made_of, encoded, {}, size)
        pixels = decode_pixels(encoded, name=name, max_size=self.max_size)
        if self.mode == "raw":
            height, width, _ = pixels.shape
            return Result(made_of, pixels.tobytes(), {"height": height, "width": width}, size)
        payload = encode_rgb(pixels, quality=self.quality) if self.mode == "jpeg" else encoded
        return Result(made_of, payload, {}, size)
