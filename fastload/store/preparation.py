"""A set that is being prepared: which of its parts are missing, and how its parts become the set."""

from __future__ import annotations

import os
import reprlib
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from fastload._kit.fingerprint import fingerprint
from fastload._kit.texts import counted
from fastload.datasets.manifest import Index
from fastload.datasets.packed.unfinished import preparing
from fastload.errors import PrepareError
from fastload.store.root import index_at, locate, remove, seal, this_node, unsealed
from fastload.store.work import Note, Work, shards_of
from fastload.store.write import index_of


@dataclass(frozen=True)
class Prepared:
    """The result of `prepare`.

    Attributes:
        path, id, rows: path, id and number of rows of the set.
        made, reused: number of parts that this call made, and number of parts that existed before.

    Examples:
        >>> np.savez("a.npz", x=np.arange(3))
        >>> prepared = fastload.store.prepare(np.load, ["a.npz"], "numbers", workers=0)
        >>> prepared.rows, prepared.made
        (3, 1)
    """

    path: str
    id: str
    rows: int
    made: int
    reused: int

    def __str__(self) -> str:
        return f"{self.path}: {counted(self.rows, 'row')}, {counted(self.made, 'part')} made, {self.reused} reused"


@dataclass(frozen=True)
class Preparation:
    """A set that is being prepared. Other processes may get a copy of this, and write parts into `work`.

    Attributes:
        name: name of the set.
        work: the folder in which parts are written.
        given: fingerprint and source of each part, in the order of the set.
        missing: sources whose parts do not exist, by fingerprint. Empty if the set itself exists.
    """

    name: str
    work: Work
    given: list[tuple[str, Any]]
    missing: dict[str, Any]
    _root: str
    _classes: tuple[str, ...]
    _made: dict[str, Any]
    _old: Index | None
    _is_there: bool

    def seal(self) -> Prepared:
        """Make the set from the parts. All must exist.

        Only the process that called `preparation` may call this, and only once.
        """
        reused = len(self.given) - len(self.missing)
        if self._is_there:
            assert self._old is not None
            shutil.rmtree(self.work.folder)
            place = os.path.join(self._root, self.name)
            return Prepared(place, self._old.id, self._old.rows, 0, reused)
        shards, schema = shards_of(_notes(self.work, self.given), PrepareError)
        index = index_of(shards, schema, classes=self._classes, made=self._made)
        with unsealed(self._root, self.name, free=self._old is None) as new:
            self.work.gather(shards, new)
            if self._old is not None:
                remove(self._root, self.name)
            place = seal(new, self._root, self.name, index)
        shutil.rmtree(self.work.folder)
        return Prepared(place, index.id, index.rows, len(self.missing), reused)


@contextmanager
def preparation(
    base: str,
    sources: Iterable[Any],
    out: str | os.PathLike[str],
    *,
    root: str | os.PathLike[str] | None = None,
    checksums: bool | None = None,
    classes: Iterable[str] = (),
    made: Mapping[str, Any] | None = None,
    replace: bool = False,
    progress: bool = False,
) -> Iterator[Preparation]:
    """Yield what `prepare` needs to know of a set, to one process at a time.

    Args:
        base: the fingerprint of what makes a part of a source.
        out, root, checksums, classes, made, replace, progress: see `prepare`.

    Raises FileExistsError if there is another set of this name, ValueError if there are no sources.
    """
    path, name = locate(out, root)
    given = [(fingerprint(base, source, paths=True), source) for source in sources]
    if not given:
        raise ValueError(f"{name}: the list of sources is empty. Give at least one")
    whole = fingerprint(*(found for found, _ in given))

    def waiting() -> None:
        if progress:
            tqdm.write(f"{path}: waiting for another process that prepares {name}", file=sys.stderr)

    with preparing(path, name, wait=waiting) as folder:
        place = os.path.join(path, name)
        old = index_at(place)
        is_there = old is not None and old.made.get("fingerprint") == whole
        if old is not None and not is_there and not replace:
            raise _refusal(place, old, given)
        work = Work(folder, checksums)
        missing = {}
        if not is_there:
            if old is not None:
                work.take(place, old.shards)
            there = work.notes()
            missing = {found: source for found, source in given if found not in there}
        about = {**(made or {}), "fingerprint": whole}
        yield Preparation(name, work, given, missing, path, tuple(classes), about, old, is_there)


def _notes(work: Work, given: list[tuple[str, Any]]) -> Iterator[tuple[str, Note]]:
    """Yield the note of each part, with its source. Raises PrepareError if a part is not there."""
    for found, source in given:
        note = work.note(found)
        if note is None:
            raise PrepareError(
                f"the part of {shown(source)} was made, but is not in {work.folder} on {this_node()}. All workers "
                "must see that folder. Name one that all nodes share, and copy the set to each with fastload set stage"
            )
        yield f"the source {shown(source)}", note


def shown(source: Any) -> str:
    """Return a source as errors name it."""
    return os.fspath(source) if isinstance(source, str | os.PathLike) else reprlib.repr(source)


def _refusal(path: str, old: Index, given: list[tuple[str, Any]]) -> FileExistsError:
    """Return the error for a set of this name that was made from others."""
    known = {shard.fingerprint for shard in old.shards}
    new = [shown(source) for found, source in given if found not in known]
    reason = "made from more sources, or from these in another order"
    if known == {""}:
        reason = "which prepare did not make"
    elif new:
        reason = f"and {len(new)} of {len(given)} sources, such as {new[0]}, are new or changed, or the function is"
    return FileExistsError(
        17,
        f"a set of this name exists, {reason}. Pass replace=True, or choose another name",
        path,
    )
