"""Promises:
- The kernels turn JPEGs by the EXIF orientation that Pillow finds, or leave the image to Python.
- An image that the kernels turned has the pixels of the ordinary way.
- The kernels decode no JPEG that Pillow refuses.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import pytest

from fastload.errors import DecodeError
from fastload.image import RandomResizedCrop
from fastload.image.decode import orientation, read_header
from fastload.image.kernels.tables import DAMAGED
from fastload.image.plans import Plan
from tests.image.jpeg_fuzz import (
    ASCII,
    LONG,
    ORIENTATION,
    SHORT,
    directory,
    exif_of,
    jpeg,
    with_segment,
)
from tests.image.kernel_runs import Trial
from tests.image.photographs import photographs

PHOTOGRAPH = next(iter(photographs().values()))[:121, :203]
JPEG = jpeg(PHOTOGRAPH)


def crop(size: tuple[int, int] = (40, 30), **options: Any) -> Plan:
    return RandomResizedCrop(size, flip=0.5, upright=True, **options)


# ---- pixels ----


@pytest.mark.parametrize("tag", range(1, 9))
def test_each_orientation(tag: int, trial: Trial) -> None:
    for number, subsampling in enumerate(("444", "422", "420", "440", "411")):
        exif = exif_of(tag, "<>"[number % 2])
        content = with_segment(jpeg(PHOTOGRAPH, subsampling), exif)
        assert orientation(read_header(content, name="a.jpg"), name="a.jpg") == tag
        for scaled in (True, False):
            for size in ((12, 40), (70, 50)):
                trial.check(crop(size, scaled_decode=scaled), content, range(number, number + 3))
    sides = trial.image[["height", "width"]][0].item()
    assert sides == ((121, 203) if tag < 5 else (203, 121))


# ---- segments ----


XMP = b'http://ns.adobe.com/xap/1.0/\0<x tiff:Orientation="6"/>'
KNOWN: dict[str, tuple[bytes, int]] = {
    "no orientation": (directory((0x0100, LONG, 1, 7)), 1),
    "no entries": (directory(), 1),
    "orientation 0": (directory((ORIENTATION, SHORT, 1, 0)), 1),
    "orientation 9": (directory((ORIENTATION, SHORT, 1, 9), order=">"), 1),
    "orientation 7": (directory((0x0100, LONG, 1, 7), (ORIENTATION, SHORT, 1, 7)), 7),
}
ODD: dict[str, Callable[[], bytes]] = {
    "XMP alone": lambda: with_segment(JPEG, XMP),
    "XMP, and EXIF without an orientation": lambda: with_segment(
        with_segment(JPEG, XMP), directory()
    ),
    "two segments of EXIF": lambda: with_segment(with_segment(JPEG, exif_of(3)), exif_of(6)),
    "an orientation of 4 bytes": lambda: with_segment(JPEG, directory((ORIENTATION, LONG, 1, 6))),
    "two orientations in one": lambda: with_segment(JPEG, directory((ORIENTATION, SHORT, 2, 6))),
    "orientation twice": lambda: with_segment(
        JPEG, directory((ORIENTATION, SHORT, 1, 6), (ORIENTATION, SHORT, 1, 3))
    ),
    "a value beyond the end": lambda: with_segment(
        JPEG, directory((0x010F, ASCII, 100, 8), (ORIENTATION, SHORT, 1, 6))
    ),
    "an unknown type": lambda: with_segment(JPEG, directory((0x010F, 99, 1, 8))),
    "a cut directory": lambda: with_segment(JPEG, exif_of(6)[:-8]),
    "a directory beyond the end": lambda: with_segment(
        JPEG, b"Exif\0\0II*\0" + struct.pack("<L", 2**32 - 2)
    ),
    "no TIFF": lambda: with_segment(JPEG, b"Exif\0\0not a TIFF"),
    "an empty segment": lambda: with_segment(JPEG, b""),
    "several pictures": lambda: with_segment(JPEG, b"MPF\0II*\0" + bytes(20), 0xE2),
}
TAKEN_IF_NOT_UPRIGHT = {"XMP alone", "XMP, and EXIF without an orientation", "several pictures"}
REFUSED: dict[str, Callable[[], bytes]] = {
    "a cut block of Photoshop": lambda: with_segment(
        JPEG, b"Photoshop 3.0\0" + b"8BIM\x04\x04", 0xED
    ),
    "a short profile": lambda: with_segment(JPEG, b"ICC_PROFILE\0", 0xE2),
    "a short Adobe segment": lambda: with_segment(JPEG, b"Adobe", 0xEE),
    "a resolution that is text": lambda: with_segment(
        JPEG.replace(b"JFIF", b"none"),
        directory((0x011A, ASCII, 1, ord("7")), (0x0128, SHORT, 1, 2)),
    ),
    "a marker without a meaning": lambda: JPEG[:2] + b"\xff\x01" + JPEG[2:],
}


@pytest.mark.parametrize("kind", KNOWN)
def test_exif_that_the_kernels_understand(kind: str, trial: Trial) -> None:
    exif, tag = KNOWN[kind]
    content = with_segment(JPEG, exif)
    assert orientation(read_header(content, name="a.jpg"), name="a.jpg") == tag
    trial.check(crop(), content, range(3))
    if kind.startswith("orientation"):  # then Pillow does not search the XMP
        trial.check(crop(), with_segment(content, XMP), range(3))


@pytest.mark.filterwarnings("ignore:Image appears to be a malformed MPO:UserWarning")
@pytest.mark.filterwarnings("ignore:Corrupt EXIF data:UserWarning")
@pytest.mark.parametrize("kind", ODD)
def test_odd_exif_is_left_to_python(kind: str, trial: Trial) -> None:
    """Pillow reads it in any case, and refuses some of it."""
    content = ODD[kind]()
    assert trial.run_bytes(crop(), 1, content)[0] == DAMAGED
    plan = RandomResizedCrop((40, 30))
    if kind in TAKEN_IF_NOT_UPRIGHT:
        trial.check(plan, content, range(1, 2))
    else:
        assert trial.run_bytes(plan, 1, content)[0] == DAMAGED


@pytest.mark.parametrize("kind", REFUSED)
def test_what_pillow_refuses_the_kernels_do_not_decode(kind: str, trial: Trial) -> None:
    content = REFUSED[kind]()
    for plan in (crop(), RandomResizedCrop((40, 30))):
        with pytest.raises(DecodeError, match="not an image in a format that Pillow can read"):
            plan.decode(content, name="a.jpg")
        assert trial.run_bytes(plan, 1, content)[0] == DAMAGED
