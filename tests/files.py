"""What tests do with the files of a set."""

from __future__ import annotations

from pathlib import Path


def files(folder: Path, pattern: str = "*") -> dict[str, bytes]:
    """Return the content of each file in a folder, by name."""
    return {file.name: file.read_bytes() for file in folder.glob(pattern) if file.is_file()}


def arrow_files(folder: Path) -> dict[str, bytes]:
    """Return the content of each part of a set, by name."""
    return files(folder, "*.arrow")


def flip(path: Path, at: int) -> None:
    """Flip a bit of the byte at `at`."""
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)
