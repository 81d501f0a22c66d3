"""The images of a folder, here or at a URL, in torchvision's order."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

from fastload.remote.listing import Listing

EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".pgm", ".bmp", ".tif", ".tiff", ".webp")


def found_in(root: str) -> tuple[list[str], Iterator[tuple[bytes, bytes]]]:
    """Return the classes of a folder, and (directory, file name) of every image in order."""
    if not os.path.isdir(root):
        there = os.path.exists(root)
        raise (NotADirectoryError if there else FileNotFoundError)(
            f"{root}: {'this is not a directory' if there else 'this directory does not exist'}. "
            f"Expected one with {root}/<class>/<image>"
        )
    with os.scandir(root) as entries:
        classes = sorted(entry.name for entry in entries if entry.is_dir())
    return classes, _walk(root, classes)


def found_at(listing: Listing) -> tuple[list[str], Iterator[tuple[bytes, bytes]]]:
    """Return the same of a folder at a URL, by the listing of all that is below it."""
    root, objects = listing.url, [name.rpartition("/")[::2] for name in listing.names]
    classes = sorted({at.partition("/")[0] for at, _ in objects} - {""})
    found = [(at.partition("/")[0], at, name) for at, name in objects if _is_image(at, name)]
    directories = {at: os.fsencode(os.path.join(root, at, "")) for _, at, _ in found}
    return classes, ((directories[at], os.fsencode(name)) for _, at, name in sorted(found))


def _is_image(directory: str, name: str) -> bool:
    return bool(directory) and name.lower().endswith(EXTENSIONS)


def _walk(root: str, classes: Iterable[str]) -> Iterator[tuple[bytes, bytes]]:
    """Yield (directory, file name) of every image, by class, directory and name. Sort them as str, as torchvision does.

    Bytes would sort differently for names that are not UTF-8, or that have characters beyond U+FFFF.
    """
    for name in classes:
        top = os.path.join(root, name)
        for directory, _, found in sorted(os.walk(top, onerror=_raise, followlinks=True)):
            for file in sorted(found):
                if file.lower().endswith(EXTENSIONS):
                    yield os.fsencode(os.path.join(directory, "")), os.fsencode(file)


def _raise(error: OSError) -> None:
    raise error
