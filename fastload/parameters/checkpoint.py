"""Checkpoints: `version-V/part-I-of-N.arrow` for each server. A folder without all N parts is no checkpoint.

Servers write into `version-V.partial`, and the server that completes it renames it. A part is an Arrow file: JSON in
the metadata of its schema, and the bytes of all tensors. Nothing is pickled.
"""

from __future__ import annotations

import errno
import re
import shutil
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa

from fastload._kit.disk import replace_file, sync_folder
from fastload.distributed.arrow_memory import SCHEMA, bytes_of
from fastload.errors import ParametersError
from fastload.parameters.wire import Encoded, decode, gathered

_KEY = b"fastload.parameters"


class Checkpoints:
    """The checkpoints of all servers, for server `number` of `of`. Without a folder there are none.

    Attributes:
        newest: the version of the newest checkpoint that this server has loaded or written, or -1.
    """

    def __init__(self, folder: str, number: int, of: int, *, keep: int) -> None:
        self._folder, self._number, self._of, self._keep = Path(folder), number, of, keep
        self._exists = bool(folder)
        self.newest = -1

    def load(self) -> list[dict[str, Any]]:
        """Return the parts of the newest checkpoint that this server needs: its own, or all if their number changed."""
        if not self._exists:
            return []
        self._folder.mkdir(parents=True, exist_ok=True)
        for stale in self._folder.glob(f"version-*.partial/*part-{self._number}-of-*"):
            stale.unlink()  # of an earlier run, so it must not complete a checkpoint of this one
        found = next(complete(self._folder), None)
        if found is None:
            return []
        self.newest, of = found
        folder = self._folder / f"version-{self.newest}"
        numbers = [self._number] if of == self._of else range(of)
        return [_read(folder / _part(number, of)) for number in numbers]

    def save(self, version: int, contents: dict[str, Any]) -> None:
        """Write this server's part of a checkpoint, and make a checkpoint of all parts if it is the last."""
        if not self._exists:
            return
        folder = self._folder / f"version-{version}"
        partial = folder.with_name(f"{folder.name}.partial")
        try:
            _write(partial / _part(self._number, self._of), contents)
        except FileNotFoundError:  # another server was the last, and has renamed the folder
            _write(partial / _part(self._number, self._of), contents)
        self.newest = max(self.newest, version)
        if all((partial / _part(number, self._of)).exists() for number in range(self._of)):
            with suppress(FileNotFoundError):  # another server was faster
                _publish(partial, folder)
            sync_folder(self._folder)
            self._remove_older()

    def has(self, version: int, number: int) -> bool:
        """Return True if a server has written its part of a checkpoint."""
        folders = (self._folder / f"version-{version}{end}" for end in ("", ".partial"))
        return any((folder / _part(number, self._of)).exists() for folder in folders)

    def _remove_older(self) -> None:
        kept = [version for version, _ in complete(self._folder)][: self._keep]
        for version, folder in _versions(self._folder):
            if kept and version < kept[-1]:
                shutil.rmtree(folder, ignore_errors=True)


def complete(folder: Path) -> Iterator[tuple[int, int]]:
    """Yield the version and the number of parts of each complete checkpoint, the newest first."""
    for version, path in _versions(folder):
        firsts = sorted(path.glob("part-0-of-*.arrow"), key=lambda part: -part.stat().st_mtime_ns)
        for first in firsts if path.suffix != ".partial" else ():
            of = int(first.stem.removeprefix("part-0-of-"))
            if all((path / _part(number, of)).exists() for number in range(of)):
                yield version, of
                break


def _versions(folder: Path) -> list[tuple[int, Path]]:
    """Return the versions that have a folder, the newest first."""
    found = [
        (re.fullmatch(r"version-(\d+)(\.partial)?", path.name), path) for path in folder.iterdir()
    ]
    return sorted(((int(name[1]), path) for name, path in found if name), reverse=True)


def _part(number: int, of: int) -> str:
    return f"part-{number}-of-{of}.arrow"


def _publish(partial: Path, folder: Path) -> None:
    """Give a complete folder its name. If a checkpoint of this version is there, replace its parts."""
    try:
        partial.rename(folder)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        for part in list(partial.glob("part-*")):
            part.replace(folder / part.name)
        with suppress(OSError):  # another server writes into it again
            partial.rmdir()


def _write(path: Path, contents: dict[str, Any]) -> None:
    """Write the part of one server, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    encoded = Encoded(contents)
    crc = zlib.crc32(encoded.text)
    for batch in encoded.batches():
        crc = zlib.crc32(bytes_of(batch).data, crc)
    about = {_KEY: encoded.text, b"bytes": str(encoded.size), b"crc32": str(crc)}
    with (
        replace_file(path) as file,
        pa.ipc.new_file(file, SCHEMA.with_metadata(about)) as writer,
    ):
        for batch in encoded.batches():
            writer.write_batch(batch)


def _read(path: Path) -> dict[str, Any]:
    try:
        with pa.memory_map(str(path)) as file, pa.ipc.open_file(file) as reader:
            about = reader.schema.metadata
            batches = map(reader.get_batch, range(reader.num_record_batches))
            content = gathered(int(about[b"bytes"]), batches)
        if zlib.crc32(content.numpy().data, zlib.crc32(about[_KEY])) != int(about[b"crc32"]):
            raise ValueError("its bytes have changed since it was written")
        contents: dict[str, Any] = decode(about[_KEY], content)
        return contents
    except (pa.ArrowException, OSError, LookupError, TypeError, ValueError, RuntimeError) as error:
        # Arrow's own errors have no number. An error with a number means that the file cannot be read.
        if isinstance(error, OSError) and error.errno:
            raise
        raise ParametersError(
            f"{path} is not part of a valid checkpoint: {error}. Remove its folder to resume from the checkpoint "
            "before it"
        ) from error
