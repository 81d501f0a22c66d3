"""Promises:
- An image file that cannot be read is an error that names the file.
- Many threads decode image files as Pillow does alone.

What is decoded: test_pixels.py.
"""

from __future__ import annotations

import errno
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fastload.image import encode_jpeg, open_rgb
from fastload.image.decode import read_file
from tests.image.photographs import encoded

RGB = Image.fromarray(np.random.default_rng(0).integers(0, 256, (37, 53, 3), dtype=np.uint8))


def test_many_threads_decode_files_as_pillow_does_alone(tmp_path: Path) -> None:
    paths = []
    for number, mode in enumerate(("RGB", "L", "CMYK", "P", "RGBA", "1")):
        paths.append(tmp_path / f"{number}.jpg")  # the content decides, not the name
        kind = "JPEG" if mode in ("RGB", "L", "CMYK") else "PNG"
        paths[-1].write_bytes(encoded(RGB.convert(mode), kind))
    alone = [np.asarray(Image.open(path).convert("RGB")) for path in paths]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda path: open_rgb(path.read_bytes(), name=""), paths * 8))
    assert {image.mode for image in together} == {"RGB"}
    assert all(map(np.array_equal, map(np.asarray, together), alone * 8))


@pytest.mark.parametrize(
    ("path", "number"),
    [
        ("none.jpg", errno.ENOENT),
        (".", errno.EISDIR),
        ("/proc/self/mem", errno.EIO),  # it opens, and its first page cannot be read
    ],
)
def test_a_file_that_cannot_be_read_is_an_oserror_with_its_name(
    path: str, number: int, tmp_path: Path
) -> None:
    with pytest.raises(OSError, match=path) as caught:
        read_file(str(tmp_path / path))
    assert (caught.value.errno, caught.value.filename) == (number, str(tmp_path / path))


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
