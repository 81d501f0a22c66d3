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

from fastload._kit.disk import write_file
from fastload._kit.fingerprint import fingerprint
from fastload.datasets.manifest import REJECTED, Index, read_index
from fastload.datasets.packed.unfinished import content, rejected_lines
from fastload.errors import PrepareError
from fastload.store.root import in_memory, locate, preparing, remove, seal, this_node, unsealed
from fastload.store.work import Note, Work, shards_of
from fastload.store.write import index_of


@dataclass(frozen=True)
class Prepared:
    """The result of `prepare`.

    Attributes:
        path, id, rows: path, id and number of rows of the set.
        made, reused: number of parts that this call made, and number of parts that existed before.
        skipped: (source, reason) of each source that failed, with `on_error="skip"`.

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
    skipped: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        skipped = f", {len(self.skipped)} sources skipped" if self.skipped else ""
        return f"{self.path}: {self.rows:,} rows, {self.made} parts made, {self.reused} reused{skipped}"


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
    _old: _OldSet | None
    _is_there: bool

    def seal(self, reasons: Mapping[str, str] | None = None) -> Prepared:
        """Make the set from the parts. All must exist, except those of failed sources, which are in `reasons`.

        Only the process that called `preparation` may call this, and only once.
        """
        reasons, reused = reasons or {}, len(self.given) - len(self.missing)
        if self._is_there:
            assert self._old is not None
            shutil.rmtree(self.work.folder)
            index = self._old.index
            return Prepared(self._old.path, index.id, index.rows, 0, reused, self._old.skipped)
        skipped = tuple((shown(source), reasons[f]) for f, source in self.given if f in reasons)
        given = [(f, source) for f, source in self.given if f not in reasons]
        shards, schema = shards_of(_notes(self.work, given), PrepareError)
        index = index_of(shards, schema, classes=self._classes, made=self._made)
        with unsealed(self._root, self.name, free=self._old is None) as new:
            self.work.gather(shards, new)
            if skipped:
                name = os.path.join(new, REJECTED)
                write_file(name, rejected_lines(skipped), durable=self.work.durable)
            if self._old is not None:
                remove(self._root, self.name)
            place = seal(new, self._root, self.name, index)
        shutil.rmtree(self.work.folder)
        made = len(self.missing) - len(reasons)
        return Prepared(place, index.id, index.rows, made, reused, skipped)


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
    strict: bool = True,
    replace: bool = False,
    progress: bool = False,
) -> Iterator[Preparation]:
    """Yield what `prepare` needs to know of a set, to one process at a time.

    Args:
        base: the fingerprint of what makes a part of a source.
        strict: treat a set that was made without some sources as a different one.
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

    durable = not in_memory(path)
    with preparing(path, name, wait=waiting) as folder:
        old = _old_set(os.path.join(path, name))
        is_there = old is not None and old.is_made_of(whole, strict=strict)
        if old is not None and not is_there and not replace:
            raise old.refusal(given)
        work = Work(folder, durable if checksums is None else checksums, durable)
        missing = {}
        if not is_there:
            if old is not None:
                work.take(old.path, old.index.shards)
            there = work.notes()
            missing = {found: source for found, source in given if found not in there}
            if there and old is None and len(missing) == len(given):
                tqdm.write(
                    f"{path}: makes all {len(given)} parts of {name}. The {len(there)} parts of a stopped run are not "
                    "reused. It had another version or other arguments, or was of an earlier fastload",
                    file=sys.stderr,
                )
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


@dataclass(frozen=True)
class _OldSet:
    """A set that has the name already. `skipped` are the sources that it was made without."""

    path: str
    index: Index
    skipped: tuple[tuple[str, str], ...]

    def is_made_of(self, whole: str, *, strict: bool) -> bool:
        return self.index.made.get("fingerprint") == whole and not (strict and self.skipped)

    def refusal(self, given: list[tuple[str, Any]]) -> FileExistsError:
        known = {shard.fingerprint for shard in self.index.shards}
        new = [shown(source) for found, source in given if found not in known]
        reason = "made from more sources, or from these in another order"
        if known == {""}:
            reason = "which prepare did not make"
        elif self.skipped:
            reason = f"made without {len(self.skipped)} sources that failed, such as {self.skipped[0][0]}"
        elif new:
            reason = f"and {len(new)} of {len(given)} sources, such as {new[0]}, are new or changed, or the function is"
            if len(new) == len(given):
                reason += ", or an earlier fastload made it"
        return FileExistsError(
            17,
            f"a set of this name exists, {reason}. Pass replace=True, or choose another name",
            self.path,
        )


def _old_set(path: str) -> _OldSet | None:
    try:
        index = read_index(path)
    except FileNotFoundError:
        return None
    lines = os.fsdecode(content(os.path.join(path, REJECTED)) or b"").splitlines()
    pairs = (line.partition("\t") for line in lines)
    return _OldSet(path, index, tuple((source, reason) for source, _, reason in pairs))
