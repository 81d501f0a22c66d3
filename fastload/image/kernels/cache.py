"""Files that one process writes and later ones use: machine code, and the results of checks.

They are in `$FASTLOAD_CACHE`, else `$XDG_CACHE_HOME/fastload`, else `~/.cache/fastload`. If that folder cannot be
used, they are in `fastload-<uid>` in the temporary folder. Processes run the code in these files. So a folder or file
that another user (except root) owns or may write is never used. Each file begins with a hash of its content, so a
truncated or damaged one counts as absent.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

_MAGIC = b"fastload 1 "


def find(name: str) -> tuple[Path, bytes] | None:
    """Return the path and the content of the valid file of this name, or None."""
    for folder in _candidates():
        if not objection(folder) and (content := _content(folder / name)) is not None:
            return folder / name, content
    return None


def store(name: str, content: bytes) -> Path:
    """Write a file whole or not at all, and return its path.

    Raise OSError if no folder can hold it.
    """
    sealed = _MAGIC + sha256(content).hexdigest().encode() + b"\n" + content

    def write(folder: Path) -> Path:
        # With a umask such as 002, `open` would let other users write code that is run.
        file, unfinished = tempfile.mkstemp(prefix=f"{name}.", suffix=".tmp", dir=folder)
        try:
            with open(file, "wb") as opened:
                opened.write(sealed)
            return Path(unfinished).replace(folder / name)
        except BaseException:
            with suppress(OSError):
                os.unlink(unfinished)
            raise

    return _in_first_folder(write)


def open_file(name: str, flags: int) -> int:
    """Open a file that holds no code, and return its descriptor. Create it if it is missing.

    Raise OSError if no folder can hold it.
    """

    def opened(folder: Path) -> int:
        return os.open(folder / name, flags | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)

    return _in_first_folder(opened)


def _in_first_folder(write: Callable[[Path], T]) -> T:
    """Return `write(folder)` for the first folder in which it succeeds. Raise OSError if there is none."""
    failures = []
    for folder in _candidates():
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not (failure := objection(folder)):
                return write(folder)
        except OSError as error:
            failure = error.strerror or str(error)
        failures.append(f"{folder}: {failure}")
    raise OSError(f"no folder can hold the cache ({'; '.join(failures)})")


def objection(folder: Path) -> str:
    """Return why no file in a folder is used, or "" if they are."""
    try:
        # In the temporary folder, any user may create a link of this name.
        return _distrust(folder.lstat() if folder == _temporary() else folder.stat())
    except OSError as error:
        return error.strerror or str(error)


def _candidates() -> Iterator[Path]:
    """Yield the folder that the environment names, then a private one in the temporary folder."""
    chosen, caches = os.environ.get("FASTLOAD_CACHE"), os.environ.get("XDG_CACHE_HOME", "")
    if chosen:
        yield Path(chosen).absolute()
    elif caches.startswith("/"):  # the XDG standard ignores other paths
        yield Path(caches) / "fastload"
    else:
        with suppress(RuntimeError):  # neither $HOME nor an entry in the user database
            yield Path.home() / ".cache" / "fastload"
    if temporary := _temporary():
        yield temporary


def _temporary() -> Path | None:
    try:
        return Path(tempfile.gettempdir()) / f"fastload-{os.geteuid()}"
    except OSError:  # no temporary folder is writable
        return None


def _distrust(status: os.stat_result) -> str:
    """Return why code in a folder or file must not run, or "" if it may."""
    if status.st_uid not in (os.geteuid(), 0):
        return f"user {status.st_uid} owns it"
    if stat.S_ISLNK(status.st_mode):
        return "it is a symbolic link"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"other users may write it (mode {stat.S_IMODE(status.st_mode):04o})"
    return ""


def _content(path: Path) -> bytes | None:
    """Return the content after the hash, or None if the file is absent, untrusted or damaged."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode) or _distrust(status):
            return None
        with open(file, "rb", closefd=False) as opened:
            head, _, content = opened.read().partition(b"\n")
    except OSError:
        return None
    finally:
        os.close(file)
    return content if head == _MAGIC + sha256(content).hexdigest().encode() else None
