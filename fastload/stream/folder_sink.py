"""A folder of answers: files with the keys of the messages as names."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from fastload._kit.disk import write_file
from fastload.stream.message import Message, to_json

_LONGEST_NAME = 240
"""Bytes, out of 255. replace_file adds ten to a name, and the suffix has five."""
_DIGEST = 32


class FolderSink:
    """Answers as files KEY.json in a folder. Each is written whole or not at all.

    An answer that comes again replaces itself, so the effect is *exactly once*. In the name, special characters of a
    key are percent-encoded, and a name that is too long ends with a hash of the key.

    Args:
        path: the folder.

    Examples:
        >>> sink = fastload.stream.FolderSink("answers")
        >>> sink.write([(fastload.stream.Message("a", None), 0.5)])  # answers/a.json
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._path.mkdir(parents=True, exist_ok=True)

    def write(self, answers: Sequence[tuple[Message, Any]]) -> None:
        """Write the answers of a batch."""
        for message, answer in answers:
            path = self._path / f"{_name_of(str(message.key))}.json"
            write_file(path, to_json(message, answer).encode())

    def close(self) -> None:
        """Do nothing."""


def _name_of(key: str) -> str:
    """Return a file name for a key. Letters of all scripts are kept."""
    name = "".join(
        char if char > "~" and char.isprintable() else quote(os.fsencode(char), safe=" ")
        for char in key
    )
    if len(os.fsencode(name)) <= _LONGEST_NAME:
        return name
    digest = hashlib.sha256(os.fsencode(key)).hexdigest()[:_DIGEST]
    return f"{os.fsencode(name)[: _LONGEST_NAME - _DIGEST - 1].decode(errors='ignore')}-{digest}"
