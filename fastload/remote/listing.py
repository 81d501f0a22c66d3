"""Names of all objects below a URL: listed once for all ranks of a job, and kept in a file if that is asked for."""

from __future__ import annotations

import gzip
import json
import os
import weakref
import zlib
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from typing import Any, NamedTuple, Self

import torch.distributed as dist

from fastload._kit.disk import write_file
from fastload._kit.torch_private import default_store
from fastload.errors import FileListError
from fastload.remote.files import apart, is_url, list_below, read_whole, write_whole

Path = str | os.PathLike[str]

FORMAT = "fastload listing 1"
VALUE = 4 << 20
"""Bytes of a value in the store of the ranks. Torch's takes 8 MiB."""

_shared = Counter[str]()
"""How often this process has asked the other ranks for something, by its name."""

_inherited: Any = None
"""Returns the group of the process that this one is a fork of, whose connection to the store is not ours."""


class Listing(NamedTuple):
    """The names of all objects below a URL, as they follow it, and when they were listed."""

    url: str
    at: str
    names: list[str]

    def packed(self) -> bytes:
        """Return it as the content of a file."""
        text = json.dumps({"format": FORMAT, **self._asdict()}, ensure_ascii=False, indent=0)
        return gzip.compress(text.encode("utf-8", "surrogateescape"), 3, mtime=0)

    @classmethod
    def unpacked(cls, content: bytes) -> Self:
        """Return what `packed` has made. Raise ValueError for anything else: gzip has a checksum."""
        try:
            found = json.loads(gzip.decompress(content).decode("utf-8", "surrogateescape"))
            if found.pop("format") != FORMAT:
                raise ValueError("the format is another")
            return cls(**found)
        except (OSError, EOFError, zlib.error, LookupError, TypeError, AttributeError) as error:
            raise ValueError(str(error)) from error


def listing_of(url: str, kept: Path | None, refresh: bool) -> Listing:
    """Return what is below a URL. Of the ranks of a process group, the first that asks lists it, and tells the others.

    Args:
        url: the folder.
        kept: a file, or its URL, that keeps the listing. If it exists, it is read, and nothing is listed.
        refresh: list anew, and replace the file.
    """
    return Listing.unpacked(_once(f"fastload/listing/{url}", partial(_found, url, kept, refresh)))


def _found(url: str, kept: Path | None, refresh: bool) -> bytes:
    content = None if kept is None or refresh else _read(kept)
    if content is None:
        at = datetime.now(UTC).isoformat(sep=" ", timespec="seconds")
        content = Listing(url, at, apart(list_below, url)).packed()
        if is_url(kept):
            apart(partial(write_whole, data=content), kept)
        elif kept is not None:
            write_file(kept, content)
        return content
    remedy = "Give another file for the listing, or refresh=True"
    try:
        found = Listing.unpacked(content)
    except ValueError as error:
        raise FileListError(f"{kept}: is no listing, or is damaged: {error}. {remedy}") from error
    if found.url != url:
        raise FileListError(f"{kept}: is a listing of {found.url}, not of {url}. {remedy}")
    return content


def _read(kept: Path) -> bytes | None:
    try:
        if is_url(kept):
            return apart(read_whole, kept)
        with open(kept, "rb") as file:
            return file.read()
    except FileNotFoundError:
        return None


def _once(name: str, make: Callable[[], bytes]) -> bytes:
    """Return what `make` returns on the first rank that comes here with this name.

    No rank must come: a collective call would wait for one that needs no such dataset.
    """
    store = _store_of_ranks()
    if store is None:
        return make()
    name = f"{name}/{_shared[name]}"
    _shared[name.rpartition("/")[0]] += 1
    if store.add(f"{name}/ranks", 1) > 1:
        try:
            count = int(store.get(f"{name}/count"))  # waits
            if count:
                return b"".join(store.get(f"{name}/{k}") for k in range(count))
        except (RuntimeError, OSError):
            pass  # the first rank hangs, or is gone
        return make()
    count = 0
    try:
        content = make()
        for k, begin in enumerate(range(0, len(content), VALUE)):
            store.set(f"{name}/{k}", content[begin : begin + VALUE])
            count = k + 1
        return content
    except BaseException:
        count = 0  # each of the others tries itself
        raise
    finally:
        store.set(f"{name}/count", str(count))


def _store_of_ranks() -> Any:
    """Return a connection to the store of the ranks, or None without other ranks."""
    group = dist.group.WORLD if dist.is_available() else None
    if group is None or dist.get_world_size() == 1:
        return None
    if _inherited is not None and _inherited() is group:
        return None
    store = default_store()
    # Else other threads of this rank could not use theirs while this one waits.
    return store.clone() if hasattr(store, "clone") else store


def _after_fork_in_child() -> None:
    global _inherited
    group = dist.group.WORLD if dist.is_available() else None
    _inherited = None if group is None else weakref.ref(group)


os.register_at_fork(after_in_child=_after_fork_in_child)
