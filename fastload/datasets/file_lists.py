"""Text files that list images or classes: one name a line."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterator, Sequence

from fastload.errors import FileListError
from fastload.remote.files import apart, is_url, read_whole


def read_list(
    file_list: str, base: bytes, classes: Sequence[str] | None
) -> Iterator[tuple[bytes, bytes]]:
    """Yield (directory, file name) of every path in a list of images, one a line.

    Args:
        file_list: the list.
        base: the folder that relative paths start from.
        classes: all classes that may occur, or None for any.

    Raises FileListError if the list cannot be read, if a path's parent directory does not name a class, or if a label
    follows the first path.
    """
    known = None if classes is None else set(classes)
    joined: dict[bytes, bytes] = {}
    for line, path in _read_lines(file_list, "file list"):
        if not joined:  # the first line alone: each look for a file is a system call
            _refuse_label(f"{file_list}, line {line}", base, path)
        cut = path.rfind(b"/") + 1
        directory = path[:cut]
        if directory not in joined:
            is_whole = is_url(os.fsdecode(directory))
            joined[directory] = directory if is_whole else os.path.join(base, directory)
            name = os.fsdecode(os.path.basename(directory.rstrip(b"/")))
            if name in ("", ".", ".."):
                raise FileListError(
                    f"{file_list}, line {line}: {os.fsdecode(path)!r} has no parent directory to name its class. "
                    "Expected .../<class>/<image>"
                )
            if known is not None and name not in known:
                raise FileListError(
                    f"{file_list}, line {line}: the class {name!r} of {os.fsdecode(path)!r} "
                    f"is not among the {len(known)} given classes"
                )
        yield joined[directory], path[cut:]


def _refuse_label(where: str, base: bytes, path: bytes) -> None:
    """Raise FileListError if a line has a path and a label, as the lists of other tools do."""
    found = re.fullmatch(rb"(.+?)[\s,;]+([^\s,;/]+)", path)
    if found and not os.path.exists(os.path.join(base, path)):
        file, label = map(os.fsdecode, found.groups())
        if os.path.exists(os.path.join(os.fsdecode(base), file)):
            raise FileListError(
                f"{where}: found {file!r} and the label {label!r}. Expected one path a line, such as train/cat/1.jpg, "
                "whose folder names the class. For lists with labels, docs/from-dali.md has a dataset"
            )


def read_classes(classes: Sequence[str] | str | os.PathLike[str]) -> list[str]:
    """Return the class names of a sequence, or of a file with one a line. Raises FileListError if two are equal."""
    if isinstance(classes, str | os.PathLike):
        source = f"the class list {os.fspath(classes)}"
        names = [os.fsdecode(name) for _, name in _read_lines(os.fspath(classes), "class list")]
    else:
        source, names = "classes", list(classes)
    if not names:
        raise FileListError(f"{source}: expected at least one class name")
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise FileListError(f"{source}: {twice!r} occurs more than once")
    return names


def _read_lines(path: str, kind: str) -> Iterator[tuple[int, bytes]]:
    """Yield (line number from 1, line without white space around it) of every line that is not blank."""
    try:
        with _opened(path) as file:
            if file.peek(3).startswith(b"\xef\xbb\xbf"):  # a byte order mark
                file.seek(3)
            for number, line in enumerate(file, 1):
                if b"\0" in line:
                    raise FileListError(f"{path}, line {number}: the {kind} is not a text file")
                if text := line.strip():
                    yield number, text
    except OSError as error:
        reason = error.strerror or error
        raise FileListError(f"{path}: the {kind} cannot be read: {reason}") from error


def _opened(path: str) -> io.BufferedReader:
    if is_url(path):
        return io.BufferedReader(io.BytesIO(apart(read_whole, path)))
    return open(path, "rb")
