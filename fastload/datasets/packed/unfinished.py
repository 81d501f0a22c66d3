"""The folder in which a set is made. It lies beside the set to come, and becomes that by a rename.

    ROOT/.unsealed/NAME        the folder, while a process makes the set ROOT/NAME
    ROOT/.unsealed/NAME.lock   the lock that this process holds

In a ROOT of another user, such as /tmp, each user has a folder .unsealed-UID.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from fastload._kit.disk import locked_path, open_file, own_folder, sync_folder, write_file
from fastload.datasets.manifest import INDEX, Index, dump_index


def unsealed_folder(root: str) -> str:
    """Return the path of the folder in which this user makes the sets of `root`. Raise OSError if it is a link."""
    user = os.getuid()
    mine = not os.path.exists(root) or os.stat(root).st_uid == user
    return own_folder(root, ".unsealed" if mine else f".unsealed-{user}")


@contextmanager
def preparing(root: str, name: str, *, wait: bool | Callable[[], object]) -> Iterator[str]:
    """Yield the folder in which a set is made, to one process at a time. It stays, unless the block deletes it.

    Args:
        wait: what to do while another process has the folder; see `fastload._kit.disk.lock`.
    """
    folder = own_folder(unsealed_folder(root), name)
    with locked_path(lock_path(folder), wait=wait, needed=False):
        os.makedirs(folder, exist_ok=True)
        yield folder


def lock_path(folder: str) -> str:
    """Return the path of the lock file of such a folder."""
    return f"{folder}.lock"


def expect_free(path: str) -> None:
    """Raise FileExistsError if there is a set, or another file, at `path`. An empty folder is free."""
    if os.path.lexists(path) and not (os.path.isdir(path) and not os.listdir(path)):
        found = "a set" if os.path.exists(os.path.join(path, INDEX)) else "another file or folder"
        raise FileExistsError(
            17,
            f"{found} of this name exists. Remove it, or choose another name",
            path,
        )


def seal(folder: str, path: str, index: Index, *, durable: bool) -> None:
    """Write the index, and give the set its name.

    Args:
        durable: sync both, so that they survive a power loss.

    Raises FileExistsError if the name is taken, OSError.
    """
    # One name: what a killed process leaves, the next one writes again.
    partial = os.path.join(folder, "partial")
    write_file(os.path.join(folder, INDEX), dump_index(index), partial=partial, durable=durable)
    try:
        os.rename(folder, path)  # fails if `path` is a folder with files
    except OSError:
        expect_free(path)
        raise
    if durable:
        sync_folder(os.path.dirname(path))


def content(path: str) -> bytes | None:
    """Return the content of a file, or None if there is none."""
    try:
        with open_file(path) as file:
            return file.read()
    except FileNotFoundError:
        return None
