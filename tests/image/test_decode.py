"""Promise: a picture decodes to RGB as Pillow decodes it, or the error says which file and why."""

from __future__ import annotations

import errno
import io
import os
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from fastload.errors import DecodeError
from fastload.image.decode import decode_rgb
from fastload.image.encode import encode_jpeg

RNG = np.random.default_rng(0)
RGB = Image.fromarray(RNG.integers(0, 256, (37, 53, 3), dtype=np.uint8))


def encoded(picture: Image.Image, kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, kind, **options)
    return buffer.getvalue()


JPEG = encoded(RGB, "JPEG", quality=90)
PNG = encoded(RGB, "PNG")

KINDS: dict[str, Callable[[], bytes]] = {
    "jpeg": lambda: JPEG,
    "progressive": lambda: encoded(RGB, "JPEG", progressive=True),
    "png": lambda: PNG,
    "webp": lambda: encoded(RGB, "WEBP"),
    "bmp": lambda: encoded(RGB, "BMP"),
    "grey jpeg": lambda: encoded(RGB.convert("L"), "JPEG"),
    "cmyk jpeg": lambda: encoded(RGB.convert("CMYK"), "JPEG"),
    "palette": lambda: encoded(RGB.convert("P"), "PNG"),
    "alpha": lambda: encoded(RGB.convert("RGBA"), "PNG"),
    "grey alpha": lambda: encoded(RGB.convert("LA"), "PNG"),
    "one bit": lambda: encoded(RGB.convert("1"), "PNG"),
    "one pixel": lambda: encoded(RGB.crop((0, 0, 1, 1)), "JPEG"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_becomes_rgb_as_with_pillow_alone(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "picture.JPEG"  # the content decides, not the name
    path.write_bytes(KINDS[kind]())
    picture = decode_rgb(path)
    assert picture.mode == "RGB"
    with Image.open(path) as file:
        assert np.array_equal(picture, file.convert("RGB"))


def test_of_16_bits_the_upper_8_are_taken(tmp_path: Path) -> None:
    """Pillow's own conversion makes every value above 255 white."""
    grey = np.arange(0, 65536, 101, dtype=np.uint16)[None]
    (tmp_path / "grey.png").write_bytes(encoded(Image.fromarray(grey), "PNG"))
    picture = np.asarray(decode_rgb(tmp_path / "grey.png"))
    assert np.array_equal(picture, np.repeat((grey >> 8)[..., None], 3, axis=2))


def test_an_exif_orientation_is_not_applied(tmp_path: Path) -> None:
    turned = Image.Exif()
    turned[0x0112] = 6  # to be shown turned by a quarter
    (tmp_path / "a.jpg").write_bytes(encoded(RGB, "JPEG", quality=90, exif=turned))
    (tmp_path / "b.jpg").write_bytes(JPEG)
    assert np.array_equal(decode_rgb(tmp_path / "a.jpg"), decode_rgb(str(tmp_path / "b.jpg")))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "the file is empty"),
        (b"not a picture at all", "not a picture in a format that Pillow can read"),
        (JPEG[: len(JPEG) // 2], "cannot be decoded: image file is truncated"),
        (JPEG[:3], "not a picture|cannot be decoded"),
        (PNG[: len(PNG) // 2], "cannot be decoded: "),
        (PNG[:-30] + b"\0" * 30, "cannot be decoded: "),
    ],
    ids=["empty", "text", "half a jpeg", "a jpeg's magic", "half a png", "damaged png"],
)
def test_what_is_no_picture_is_named_with_the_reason(
    content: bytes, reason: str, tmp_path: Path
) -> None:
    path = tmp_path / "bad.jpg"
    path.write_bytes(content)
    with pytest.raises(DecodeError, match=reason) as caught:
        decode_rgb(path)
    assert caught.value.path == str(path)
    assert str(caught.value).startswith(f"{path}: ")


def test_a_picture_beyond_the_limit_of_pixels_is_refused(tmp_path: Path) -> None:
    forged = bytearray(encoded(RGB.convert("L"), "BMP"))
    forged[18:26] = (60_000).to_bytes(4, "little") * 2
    path = tmp_path / "bomb.bmp"
    path.write_bytes(forged)
    with pytest.raises(DecodeError, match="decompression bomb"):
        decode_rgb(path)


def test_a_file_that_cannot_be_read_is_an_oserror_with_its_name(tmp_path: Path) -> None:
    for path, kind in ((tmp_path / "none.jpg", FileNotFoundError), (tmp_path, IsADirectoryError)):
        with pytest.raises(kind) as caught:
            decode_rgb(path)
        assert caught.value.filename == str(path)


def test_an_error_in_the_middle_of_reading_is_an_oserror_with_the_name() -> None:
    unreadable = "/proc/self/mem"  # opens, and its first page gives an input/output error
    if not os.path.exists(unreadable):
        pytest.skip("needs a file whose reading fails")
    with pytest.raises(OSError, match=unreadable) as caught:
        decode_rgb(unreadable)
    assert (caught.value.errno, caught.value.filename) == (errno.EIO, unreadable)


@settings(max_examples=150)
@given(
    content=st.sampled_from([JPEG, PNG]),
    keep=st.floats(0, 1),
    flips=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(1, 255)), max_size=4),
)
def test_damaged_bytes_give_a_picture_or_a_decode_error_and_nothing_else(
    content: bytes, keep: float, flips: list[tuple[float, int]]
) -> None:
    damaged = bytearray(content)
    for place, mask in flips:
        damaged[int(place * len(damaged))] ^= mask
    with tempfile.NamedTemporaryFile(suffix=".jpg") as file:
        file.write(damaged[: round(keep * len(damaged))])
        file.flush()
        try:
            outcome = decode_rgb(file.name).mode
        except DecodeError as error:
            outcome = error.path
        assert outcome in ("RGB", file.name)


def test_many_threads_decode_as_one_does(tmp_path: Path) -> None:
    paths = []
    for number, make in enumerate(KINDS.values()):
        paths.append(tmp_path / f"{number}.jpg")
        paths[-1].write_bytes(make())
    alone = [np.asarray(decode_rgb(path)) for path in paths]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda path: np.asarray(decode_rgb(path)), paths * 8))
    assert all(map(np.array_equal, together, alone * 8))


def test_planes_survive_encoding_up_to_what_jpeg_loses(tmp_path: Path) -> None:
    y, x = np.mgrid[0:64, 0:96].astype(np.uint8)
    planes = np.stack([64 + y + x, 100 + y // 2, 150 - x // 2])
    path = tmp_path / "planes.jpg"
    path.write_bytes(encode_jpeg(planes, quality=95))
    with Image.open(path) as file:
        assert (file.format, file.size) == ("JPEG", (96, 64))
        file.draft("YCbCr", None)
        loss = np.abs(np.moveaxis(np.asarray(file), -1, 0).astype(int) - planes)
    assert loss.mean() < 1.5
    assert encode_jpeg(planes, quality=95) == path.read_bytes()
    assert len(encode_jpeg(planes, quality=50)) < len(path.read_bytes())
