"""The folder of a set that is being made: complete shards have their names, and the index comes last."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from fastload._kit.disk import locked_path, open_file, own_folder, write_file
from fastload.datasets.manifest import INDEX, REJECTED, Index, dump_index

_TAB = "\t"


class Unfinished:
    """A folder that becomes a set. One process at a time makes it.

    Args:
        path: the folder.
        work: folder in it with the lock, notes on what is made, and all files that are not complete.
        durable: sync what is published, so that it survives a power loss.
    """

    def __init__(self, path: str, work: str, *, durable: bool = True) -> None:
        self.path, self.work, self.durable = path, work, durable

    def name(self, *names: str) -> str:
        """Return the path of a file of the set."""
        return os.path.join(self.path, *names)

    def note(self, *names: str) -> str:
        """Return the path of a file of the work."""
        return os.path.join(self.path, self.work, *names)

    @contextmanager
    def locked(self, wait: bool | Callable[[], object]) -> Iterator[None]:
        """Hold the lock in the block. The kernel frees it if the process dies. Raises BlockingIOError unless `wait`."""
        try:
            with locked_path(os.path.join(own_folder(self.path, self.work), "lock"), wait=wait):
                yield
        except OSError as error:
            error.filename = error.filename or self.path  # neither flock nor fsync names the file
            raise

    def shards(self, begin: str = "") -> list[str]:
        """Return the names of the complete shards, which begin with `begin`."""
        return [n for n in os.listdir(self.path) if n.startswith(begin) and n.endswith(".arrow")]

    def publish(self, path: str, content: bytes) -> None:
        """Write a file of the set, or a note, that exists completely or not at all."""
        write_file(path, content, partial=self.note("partial"), durable=self.durable)

    def finish(self, index: Index, rejected: bytes | None) -> None:
        """Write the index: now the folder is a set."""
        if rejected:
            self.publish(self.name(REJECTED), rejected)
        self.publish(self.name(INDEX), dump_index(index))


def content(path: str, *, follow: bool = True) -> bytes | None:
    """Return the content of a file, or None if there is none. See `open_file` for `follow`."""
    try:
        with open_file(path, follow=follow) as file:
            return file.read()
    except FileNotFoundError:
        return None


def rejected_lines(rejected: Iterable[tuple[str, str]]) -> bytes:
    """Return the content of `rejected.txt`: a line for each input that was left out, with the reason."""
    lines = (
        f"{' '.join(name.replace(_TAB, ' ').splitlines())}{_TAB}{' '.join(reason.split())}\n"
        for name, reason in rejected
    )
    return os.fsencode("".join(lines))
