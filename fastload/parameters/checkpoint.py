"""Checkpoints: `version-V/part-I-of-N.arrow` for each server. A checkpoint counts only if all of its parts exist.

A part is an Arrow file: JSON in the metadata of its schema, and the bytes of all tensors. Nothing is pickled.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from fastload._kit.disk import replace_file
from fastload.errors import ParametersError, in_one_line
from fastload.parameters.wire import SCHEMA, Encoded, Gathered, bytes_of, decode

_KEY = b"fastload.parameters"
_AGAIN_S = 10.0
"""Seconds before a save that failed is tried again. Each try writes until the disk is full."""
_log = logging.getLogger("fastload")


@dataclass(frozen=True)
class Found:
    """A complete checkpoint."""

    folder: str
    version: int
    of: int

    def read(self, number: int) -> dict[str, Any]:
        """Return the contents that server `number` saved. Raise ParametersError if the file is damaged."""
        return _read(_path(self.folder, self.version, number, self.of))


Last = dict[str, tuple[int, int]]
"""For each worker: the number of its last push that a server has applied, and the version after that push."""


class Saves:
    """The checkpoints to which one server has written its part, and which may not be complete yet.

    Args:
        every: save whenever the version is a multiple of this. 0: never.
        exact: the parts of a checkpoint must have one version, so a later version cannot replace one that failed.

    Attributes:
        last: the last pushes that were applied when the newest complete checkpoint was saved.
        newest: the version of the newest checkpoint that this server has loaded or written, or -1.
        unsaved: the reason of the last save that failed, or "" if a later one succeeded.
    """

    def __init__(
        self, folder: str, number: int, of: int, *, keep: int, every: int, exact: bool
    ) -> None:
        self._folder, self._number, self._of, self._keep = folder, number, of, keep
        self._every, self._exact = every, exact
        self._due: int | None = None  # the version to save
        self._try_at = 0.0
        self.unsaved = ""
        self._written: list[tuple[int, int, Last]] = []
        self.last: Last = {}
        self.newest = -1

    def load(self, *, rejoin: bool) -> list[dict[str, Any]]:
        """Return the parts of the newest complete checkpoint that this server needs.

        It needs its own part, or all parts if the number of servers has changed. Without `rejoin`, its parts of newer
        checkpoints are removed, because the job resumes from this one.
        """
        if not self._folder:
            return []
        os.makedirs(self._folder, exist_ok=True)
        found = newest(self._folder)
        if not rejoin:
            _remove_newer(self._folder, found.version if found else -1, self._number)
        if found is None:
            return []
        self.newest = found.version
        if found.of != self._of:
            return [{**found.read(number), "last": {}} for number in range(found.of)]
        contents = found.read(self._number)
        contents["last"] = {w: (int(s), int(v)) for w, (s, v) in contents["last"].items()}
        self.last = dict(contents["last"])
        return [contents]

    def save(self, version: int, contents: dict[str, Any]) -> None:
        """Write this server's part of a checkpoint, if it has a folder."""
        if self._folder:
            _write(self._folder, version, self._number, self._of, contents)
            self._written.append((version, contents["position"], dict(contents["last"])))
            self.newest = max(self.newest, version)

    def save_if_due(self, save: Callable[[int], None], version: int) -> None:
        """Call `save` for a version that is due, or that was due before and is not saved yet."""
        if self._every and version % self._every == 0:
            self._due, self._try_at = version, 0.0
        elif self._exact:
            self._due = None
        if self._due is not None and time.monotonic() >= self._try_at:
            self.try_to(save, self._due)

    def try_to(self, save: Callable[[int], None], version: int) -> None:
        """Call `save`. Log its OSError: the push that led to it has been applied, so it must not fail."""
        try:
            save(version)
            self._due, self.unsaved = None, ""
        except OSError as error:
            self._try_at = time.monotonic() + _AGAIN_S
            self.unsaved = error.strerror or str(error)
            _log.warning(
                "server %d of %d has not saved version %d: %s. If it is killed, it loses the pushes since its last "
                "checkpoint",
                *(self._number, self._of, version, in_one_line(error)),
            )

    def has(self, version: int, number: int) -> bool:
        """Return True if a server has written its part of a checkpoint."""
        return os.path.exists(_path(self._folder, version, number, self._of))

    def completed(self) -> int | None:
        """Return the position of the newest checkpoint that has become complete since the last call, or None."""
        for number, (version, position, last) in reversed(list(enumerate(self._written))):
            if _is_complete(self._folder, version, self._of):
                self.last = last
                del self._written[: number + 1]
                if self._number == 0:
                    _remove_older(self._folder, self._keep)
                return position
        return None


def _write(folder: str, version: int, number: int, of: int, contents: dict[str, Any]) -> None:
    """Write the part of one server, whole or not at all."""
    path = _path(folder, version, number, of)
    os.makedirs(os.path.dirname(path), exist_ok=True)
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


def newest(folder: str) -> Found | None:
    """Return the newest complete checkpoint, or None."""
    return next(_complete(folder), None)


def _is_complete(folder: str, version: int, of: int) -> bool:
    """Return True if all parts exist."""
    return all(os.path.exists(_path(folder, version, number, of)) for number in range(of))


def _remove_newer(folder: str, version: int, number: int) -> None:
    """Remove this server's parts of newer, incomplete checkpoints, because it continues from `version`."""
    for found in _versions(folder):
        for name in os.listdir(_folder(folder, found)) if found > version else ():
            if name.startswith(f"part-{number}-of-"):
                os.unlink(os.path.join(_folder(folder, found), name))


def _remove_older(folder: str, keep: int) -> None:
    """Remove all but the newest `keep` complete checkpoints, and older incomplete ones."""
    kept = [each.version for each in _complete(folder)][:keep]
    for found in _versions(folder):
        if kept and found < kept[-1]:
            shutil.rmtree(_folder(folder, found), ignore_errors=True)


def _complete(folder: str) -> Iterator[Found]:
    for version in _versions(folder):
        names = []
        with suppress(FileNotFoundError):
            names = os.listdir(_folder(folder, version))
        sizes = {
            int(found[1]) for n in names if (found := re.fullmatch(r"part-0-of-(\d+)\.arrow", n))
        }
        of = [size for size in sizes if _is_complete(folder, version, size)]
        if of:  # of several checkpoints of one version, take that with the newest files
            last = max(of, key=lambda size: os.stat(_path(folder, version, 0, size)).st_mtime_ns)
            yield Found(folder, version, last)


def _versions(folder: str) -> list[int]:
    """Return the versions that have a folder, the newest first."""
    found = (re.fullmatch(r"version-(\d+)", name) for name in os.listdir(folder))
    return sorted((int(name[1]) for name in found if name), reverse=True)


def _folder(folder: str, version: int) -> str:
    return os.path.join(folder, f"version-{version}")


def _path(folder: str, version: int, number: int, of: int) -> str:
    return os.path.join(_folder(folder, version), f"part-{number}-of-{of}.arrow")


def _read(path: str) -> dict[str, Any]:
    try:
        with pa.memory_map(path) as file, pa.ipc.open_file(file) as reader:
            about = reader.schema.metadata
            gathered = Gathered(int(about[b"bytes"]))
            crc = zlib.crc32(about[_KEY])
            for number in range(reader.num_record_batches):
                batch = reader.get_batch(number)
                crc = zlib.crc32(bytes_of(batch).data, crc)
                gathered.add(batch)
        if gathered.missing or crc != int(about[b"crc32"]):
            raise ValueError("its bytes have changed since it was written")
        contents: dict[str, Any] = decode(about[_KEY], gathered.content)
        return contents
    except (pa.ArrowException, OSError, LookupError, TypeError, ValueError, RuntimeError) as error:
        # Arrow's own errors have no number. An error with a number means that the file cannot be read.
        if isinstance(error, OSError) and error.errno:
            raise
        raise ParametersError(
            f"{path} is not part of a valid checkpoint: {error}. Remove its folder to resume from the checkpoint "
            "before it"
        ) from error
