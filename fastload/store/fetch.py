"""Copy missing parts from elsewhere: a folder that nodes share, or servers of other nodes."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Protocol

from fastload._kit.disk import locked_path, open_file, own_folder, replace_file, write_all
from fastload.datasets.manifest import INDEX, Index, Shard, read_index
from fastload.errors import PackedDataError
from fastload.store.parts import is_here, open_part
from fastload.store.pieces import PIECE_BYTES
from fastload.store.room import expect_room, room_for
from fastload.store.root import in_memory, seal, unsealed

Places = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
STAGING = ".staging"
"""The folder in a set, in which a part is written until it is complete."""

_SCHEMES = ("grpc://", "grpc+tcp://", "grpc+tls://")


class Source(Protocol):
    """A source from which parts can be copied. Errors name it by its attribute `where`."""

    where: str

    def find(self, name: str) -> tuple[Index, set[str]] | None:
        """Return the index of a set and the names of the parts that lie there, or None if there is no such set."""

    def read(self, name: str, part: Shard) -> Iterator[memoryview]:
        """Yield the bytes of a part's file."""


def open_sources(places: Places) -> list[Source]:
    """Return the sources that paths and URLs name."""
    if isinstance(places, str | os.PathLike):
        places = [places]
    return [_opened(os.fspath(place)) for place in places]


def _opened(place: str) -> Source:
    if "://" not in place:
        return FolderSource(os.path.abspath(place))
    if not place.startswith(_SCHEMES):
        raise ValueError(
            f"a source must be a path, or the URL of `fastload set serve`, grpc://HOST:PORT or "
            f"grpc+tls://HOST:PORT, got {place!r}"
        )
    from fastload.store.flight import ServerSource

    return ServerSource(place)


class FolderSource:
    """A root, or the folder of one set."""

    def __init__(self, where: str) -> None:
        self.where = where

    def find(self, name: str) -> tuple[Index, set[str]] | None:
        """Return the index of a set and the names of the parts that lie there, or None if there is no such set."""
        try:
            return read_index(self._path(name)), set(os.listdir(self._path(name)))
        except FileNotFoundError:
            return None

    def read(self, name: str, part: Shard) -> Iterator[memoryview]:
        """Yield the bytes of a part's file."""
        with open_file(os.path.join(self._path(name), part.name)) as file:
            while piece := file.read(PIECE_BYTES):
                yield memoryview(piece)

    def _path(self, name: str) -> str:
        is_set = os.path.exists(os.path.join(self.where, INDEX))
        return self.where if is_set else os.path.join(self.where, name)


def fetch_index(root: str, name: str, sources: Sequence[Source]) -> None:
    """Create the set here, with only its index, unless it exists. Raise FileNotFoundError if no source has it."""
    path = os.path.join(root, name)
    if os.path.exists(os.path.join(path, INDEX)):
        return
    for source in sources:
        if found := source.find(name):
            # Another process may be here first.
            with unsealed(root, name, free=False) as folder, suppress(FileExistsError):
                seal(folder, root, name, found[0])
            return
    raise FileNotFoundError(2, f"the set {name!r} is neither here nor at {_named(sources)}", root)


def fetch_parts(path: str, index: Index, parts: Sequence[Shard], sources: Sequence[Source]) -> None:
    """Copy the missing ones of `parts` into the set at `path`, and check them.

    If several processes call this at the same time, one copies, and the others wait. Raise StoreFullError before a byte
    is written. Raise PackedDataError if no source has a part, or if a source has another set or cannot be read.
    """
    with locked_path(os.path.join(own_folder(path, STAGING), "lock"), needed=False):
        missing = [part for part in parts if not is_here(path, part)]
        if not missing:
            return
        expect_room(path, sum(part.bytes for part in missing))
        there = {}
        for source in sources:
            if found := source.find(os.path.basename(path)):
                _expect_same(path, index, found[0], source)
                there[source.where] = found[1]
        for part in missing:
            having = next((s for s in sources if part.name in there.get(s.where, ())), None)
            if having is None:
                node = f" of the node {part.node}" if part.node else ""
                raise PackedDataError(
                    path, f"the part{node} is not at {_named(sources)} either", shard=part.name
                )
            _copy(path, index, part, having)


def _expect_same(path: str, index: Index, found: Index, source: Source) -> None:
    if found.id != index.id:
        raise PackedDataError(
            path,
            f"{source.where} has a different set with this name (id {found.id} there, id {index.id} here). Remove one "
            "of the two sets",
        )


def _copy(path: str, index: Index, part: Shard, source: Source) -> None:
    """Copy one part. It gets its name when it is complete and checked."""
    staging, checksum, name = os.path.join(path, STAGING), 0, os.path.basename(path)
    partial = os.path.join(staging, part.name)
    whole = replace_file(
        os.path.join(path, part.name), partial=partial, durable=not in_memory(path)
    )
    with room_for(path, part.bytes), whole as file:
        for piece in source.read(name, part):
            checksum = zlib.crc32(piece, checksum)
            write_all(file.fileno(), partial, piece)
            if file.tell() > part.bytes:
                break
        reason = "has a wrong checksum" if part.checksum not in (None, checksum) else ""
        try:
            # In full, whatever the checksum says: it comes from the source, too.
            open_part(staging, part, index.schema, full=True)
        except PackedDataError as error:
            reason = error.reason
        if reason:
            raise PackedDataError(path, f"the copy from {source.where}: {reason}", shard=part.name)
        # Parts in memory have no checksums, so only the id shows that another set has taken this name.
        if found := source.find(name):
            _expect_same(path, index, found[0], source)


def _named(sources: Sequence[Source]) -> str:
    return ", ".join(source.where for source in sources)
