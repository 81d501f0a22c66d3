"""A watched folder: each file is a message."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue

from fastload._kit.disk import identity
from fastload.errors import needs
from fastload.stream.message import Message, Poison

try:
    from watchdog.events import FileClosedEvent, FileMovedEvent, FileSystemEvent
    from watchdog.events import FileSystemEventHandler as Handler
    from watchdog.observers.inotify import InotifyObserver
except ModuleNotFoundError as error:
    raise needs("fastload.stream.Folder", "watchdog", "stream", error) from error


class Folder:
    """Messages from the files of a folder: first the existing files, sorted by name, then new ones as they arrive.

    The key is the file's name. The value is its path, so that `decode` reads the file on a worker thread. A new file
    becomes a message when its writer closes it, or when it is moved into the folder. Names that begin with a dot or end
    in .tmp are ignored. Write a file under such a name and rename it when it is complete. Then it is never read too
    early, even if the watch begins during the writing. A new link in the folder is seen only at the next start. Make it
    under such a name and rename it, too.

    An answered file is moved to the folder `done`, and a failed one to the folder `failed`. A file that has no answer
    when the process ends becomes a message again at the next start. So does a file that is rewritten before the sink
    has its answer.

    Args:
        path: the folder, on a local disk. The kernel does not report what other machines write to a network disk.

    Examples:
        >>> _ = open("a.json", "w").close()
        >>> folder = fastload.stream.Folder(".")
        >>> next(iter(folder)).key
        'a.json'
        >>> folder.close()
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        if not self._path.is_dir():
            raise NotADirectoryError(20, "the folder to watch does not exist", str(path))
        self._done, self._failed = self._path / "done", self._path / "failed"
        for folder in (self._done, self._failed):
            folder.mkdir(exist_ok=True)
        # It has no limit, because names are small and the files wait on the disk in any case.
        self._names: SimpleQueue[str | None] = SimpleQueue()
        # The state of each unacknowledged file when it was read.
        self._given: dict[str, tuple[int, ...]] = {}
        self._stopped = False
        self._observer = InotifyObserver(generate_full_events=True)
        complete = [FileClosedEvent, FileMovedEvent]
        self._observer.schedule(_Names(self._names), str(self._path), event_filter=complete)
        self._observer.start()  # before listing, so that a file that arrives meanwhile is found twice, not missed

    def __iter__(self) -> Iterator[Message]:
        for name in sorted(entry.name for entry in os.scandir(self._path) if entry.is_file()):
            yield from self._message(name)
        while (name_or_end := self._names.get()) is not None:
            yield from self._message(name_or_end)

    def _message(self, name: str) -> Iterator[Message]:
        hidden = not name or name.startswith(".") or name.endswith(".tmp")
        if self._stopped or hidden or name in self._given:
            return
        path = self._path / name
        if (found := _as_it_is(path)) is not None:
            self._given[name] = found
            yield Message(name, path)

    def acknowledge(self, messages: Sequence[Message]) -> None:
        """Move the files to `done` or `failed`. A file that has changed stays, and becomes a message again."""
        for message in messages:
            name = str(message.key)
            folder = self._failed if isinstance(message.value, Poison) else self._done
            with suppress(FileNotFoundError):
                self._move(name, folder / name)
            del self._given[name]  # after the move, so that a late event does not yield it again
            if (self._path / name).exists():
                self._names.put(name)

    def _move(self, name: str, to: Path) -> None:
        """Move a file, unless it has changed. Move it back if it changed between the check and the move."""
        path, had = self._path / name, self._given[name]
        if _as_it_is(path) != had:
            return
        os.replace(path, to)
        if _as_it_is(to) != had:
            with suppress(FileExistsError):  # a newer file has come, and is the message
                os.link(to, path, follow_symlinks=False)
            to.unlink()

    def stop(self) -> None:
        """End the iteration."""
        self._stopped = True
        self._names.put(None)

    def close(self) -> None:
        """Stop watching."""
        self.stop()
        self._observer.stop()
        self._observer.join()


class _Names(Handler):
    """Puts the names of complete files into a queue."""

    def __init__(self, names: SimpleQueue[str | None]) -> None:
        self._names = names

    def on_closed(self, event: FileSystemEvent) -> None:
        self._names.put(os.path.basename(os.fsdecode(event.src_path)))

    def on_moved(self, event: FileSystemEvent) -> None:
        self._names.put(os.path.basename(os.fsdecode(event.dest_path)))  # "": moved away


def _as_it_is(path: Path) -> tuple[int, ...] | None:
    """Return values that change if the file changes, or None if it does not exist."""
    with suppress(FileNotFoundError):
        return identity(path)
    return None
