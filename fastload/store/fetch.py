"""Copy missing parts from elsewhere: a folder that nodes share, or servers of other nodes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Protocol

from fastload._kit.disk import locked_path, open_file
from fastload.datasets.manifest import INDEX, Index, Shard
from fastload.errors import PackedDataError
from fastload.store.parts import is_here, open_part
from fastload.store.root import index_at, seal, unsealed
from fastload.store.shard_bytes import PIECE_BYTES, copy_shards, partial_path, summed

Places = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

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
        path = self._path(name)
        index = index_at(path)
        return None if index is None else (index, set(os.listdir(path)))

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
    with locked_path(os.path.join(path, INDEX), needed=False):
        missing = [part for part in parts if not is_here(path, part)]
        if missing:
            there = [(source, _parts_at(source, path, index)) for source in sources]
            copy_shards(path, partial(_read, path, index, there), missing)


def _parts_at(source: Source, path: str, index: Index) -> set[str]:
    """Return the names of the parts that a source has of the set at `path`. Raise PackedDataError for another set."""
    found = source.find(os.path.basename(path))
    if found is None:
        return set()
    if found[0].id != index.id:
        raise PackedDataError(
            path,
            f"{source.where} has a different set with this name (id {found[0].id} there, id {index.id} here). Remove "
            "one of the two sets",
        )
    return found[1]


def _read(
    path: str, index: Index, there: Sequence[tuple[Source, set[str]]], part: Shard, _: object
) -> Iterator[memoryview]:
    """Yield the bytes of a part from the first source that has it. Then check the copy, which still has no name."""
    source = next((source for source, names in there if part.name in names), None)
    if source is None:
        node = f" of the node {part.node}" if part.node else ""
        where = _named([source for source, _ in there])
        raise PackedDataError(path, f"the part{node} is not at {where} either", shard=part.name)
    yield from summed(source.where, part, source.read(os.path.basename(path), part))
    try:
        # In full, whatever the checksum says: it comes from the source, too.
        copy = replace(part, name=os.path.basename(partial_path(path, part)))
        open_part(path, copy, index.schema, full=True)
    except PackedDataError as error:
        reason = f"the copy from {source.where}: {error.reason}"
        raise PackedDataError(path, reason, shard=part.name) from error
    # Parts in memory have no checksums, so only the id shows that another set has taken this name.
    _parts_at(source, path, index)


def _named(sources: Sequence[Source]) -> str:
    return ", ".join(source.where for source in sources)
