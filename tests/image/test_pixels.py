"""Promises:
- Every kind of file is decoded as by Pillow: JPEG of every colour space, palettes, alpha, 1 and 16 bits, orientations.
- The content of a file decides how it is decoded, not its name.
- An image file that is cut off anywhere gives the right image or a `DecodeError`.
- Flipped and random bytes give an image of the right shape or a `DecodeError`. A forged size takes no memory.
- A decoded image never changes when its thread decodes again. Many threads: see `test_decode.py`.
"""

from __future__ import annotations

import io
import os
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from fastload.errors import DecodeError
from fastload.image import RandomResizedCrop, Resize, decode_pixels, encode_rgb, open_rgb
from tests.children import run_python
from tests.image.photographs import Pixels, encoded

RNG = np.random.default_rng(0)
NOISE: Pixels = RNG.integers(0, 256, (37, 53, 3), dtype=np.uint8)
RGB = Image.fromarray(NOISE)
SMOOTH: Pixels = np.stack(np.broadcast_arrays(*np.ogrid[0:37, 0:53], 90), axis=2).astype(np.uint8)

JPEG = encoded(SMOOTH, quality=90)
PNG = encoded(RGB, "PNG")


def png(header: bytes, *chunks: bytes) -> bytes:
    """A PNG of the IHDR `header` and further chunks, each its name and then what is in it."""
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        len(chunk[4:]).to_bytes(4, "big") + chunk + zlib.crc32(chunk).to_bytes(4, "big")
        for chunk in (b"IHDR" + header, *chunks, b"IEND")
    )


def sized(height: int, width: int) -> bytes:
    return width.to_bytes(4, "big") + height.to_bytes(4, "big")


def deep_png(values: np.ndarray) -> bytes:
    """uint16[H, W, 3] as a PNG of 16 bits a channel, which Pillow reads and does not write."""
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    return png(sized(*values.shape[:2]) + bytes([16, 2, 0, 0, 0]), b"IDAT" + zlib.compress(rows, 1))


def forged_jpeg(height: int, width: int, content: bytes = JPEG) -> bytes:
    """`content` with another size in its header."""
    at = content.index(b"\xff\xc0") + 5
    size = height.to_bytes(2, "big") + width.to_bytes(2, "big")
    return content[:at] + size + content[at + 4 :]


def ycck() -> bytes:
    """A CMYK JPEG whose Adobe marker says that it is YCCK."""
    content = bytearray(encoded(RGB.convert("CMYK")))
    transform = content.index(b"Adobe") + 11
    assert content[transform] == 0
    content[transform] = 2
    return bytes(content)


DEEP = RNG.integers(0, 2**16, (37, 53, 3), dtype=np.uint16)

KINDS: dict[str, Callable[[], bytes]] = {
    "jpeg": lambda: JPEG,
    "jpeg, noise": lambda: encoded(RGB, quality=95),
    "jpeg 4:4:4": lambda: encoded(RGB, subsampling=0),
    "jpeg 4:2:2": lambda: encoded(RGB, subsampling=1),
    "jpeg, progressive": lambda: encoded(RGB, progressive=True),
    "jpeg, restart markers": lambda: encoded(RGB, restart_marker_blocks=1),
    "jpeg, optimized": lambda: encoded(RGB, optimize=True, quality=30),
    "jpeg, comment and profile": lambda: encoded(RGB, comment=b"c" * 999, icc_profile=b"p" * 99),
    "grey jpeg": lambda: encoded(RGB.convert("L")),
    "Adobe RGB jpeg": lambda: encoded(RGB, keep_rgb=True),
    "CMYK jpeg": lambda: encoded(RGB.convert("CMYK")),
    "YCCK jpeg": ycck,
    "jpeg of our encoder": lambda: encode_rgb(NOISE, quality=90),
    "jpeg of one pixel": lambda: encoded(RGB.crop((0, 0, 1, 1))),
    "jpeg of one row": lambda: encoded(RGB.crop((0, 0, 53, 1))),
    "jpeg and garbage": lambda: JPEG + b"\0garbage\xff\xd8\xff\xff" * 9,
    "jpeg, stray bytes": lambda: JPEG.replace(b"\xff\xc0", b"\x55\x55\xff\xc0", 1),
    "png": lambda: PNG,
    "png, interlaced or not": lambda: encoded(RGB, "PNG", optimize=True),
    "png and garbage": lambda: PNG + b"garbage" * 99,
    "grey png": lambda: encoded(RGB.convert("L"), "PNG"),
    "palette": lambda: encoded(RGB.convert("P"), "PNG"),
    "palette, one colour transparent": lambda: encoded(RGB.convert("P"), "PNG", transparency=3),
    "palette of 2 bits": lambda: encoded(RGB.quantize(4), "PNG", bits=2),
    "RGB, one colour transparent": lambda: encoded(RGB, "PNG", transparency=(1, 2, 3)),
    "alpha": lambda: encoded(Image.fromarray(np.dstack([NOISE, NOISE[..., 0]])), "PNG"),
    "grey and alpha": lambda: encoded(RGB.convert("LA"), "PNG"),
    "one bit": lambda: encoded(RGB.convert("1"), "PNG"),
    "16 bits RGB": lambda: deep_png(DEEP),
    "png of one pixel": lambda: encoded(RGB.crop((0, 0, 1, 1)), "PNG"),
    "gif": lambda: encoded(RGB.convert("P"), "GIF"),
    "gif, moving": lambda: encoded(
        RGB.convert("P"), "GIF", save_all=True, append_images=[RGB.convert("L")]
    ),
    "webp": lambda: encoded(RGB, "WEBP"),
    "webp, lossless, alpha": lambda: encoded(RGB.convert("RGBA"), "WEBP", lossless=True),
    "bmp": lambda: encoded(RGB, "BMP"),
    "ppm": lambda: encoded(RGB, "PPM"),
    "tiff": lambda: encoded(RGB, "TIFF"),
    "tiff, packed": lambda: encoded(RGB, "TIFF", compression="tiff_lzw"),
    "tiff of CMYK": lambda: encoded(RGB.convert("CMYK"), "TIFF"),
}


def by_pillow(content: bytes) -> Pixels:
    with Image.open(io.BytesIO(content)) as file:
        return np.asarray(file.convert("RGB"))


def by_plan(content: bytes, **options: bool) -> Pixels:
    """The pixels of a file by a plan that leaves its size alone."""
    size = Image.open(io.BytesIO(content)).size
    if options.get("upright"):
        size = ImageOps.exif_transpose(Image.open(io.BytesIO(content))).size
    return Resize(size[::-1], **options).decode(content, name="a").permute(1, 2, 0).numpy()


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_decoded_as_by_pillow(kind: str) -> None:
    """JPEGs by another build of libjpeg, which may round otherwise."""
    content = KINDS[kind]()
    expected = by_pillow(content)
    tolerance = 1 if "jpeg" in kind else 0
    for pixels in (by_plan(content), decode_pixels(content, name="a")):
        assert pixels.shape == expected.shape
        assert np.abs(pixels.astype(int) - expected).max() <= tolerance
    if kind != "16 bits RGB":  # of which Pillow drops the lower halves before it rounds
        assert np.array_equal(open_rgb(content, name="a"), expected)


def test_of_16_bits_the_upper_8_are_taken() -> None:
    grey = DEEP[..., 0].copy()
    for content, values in ((deep_png(DEEP), DEEP), (encoded(grey, "PNG"), grey[..., None])):
        assert np.array_equal(by_plan(content), np.broadcast_to(values >> 8, DEEP.shape))


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF", "CMYK"])
@pytest.mark.parametrize("tag", range(10))
def test_orientation_is_applied_where_it_is_asked_for(tag: int, kind: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = tag
    options = {"lossless": True} if kind == "WEBP" else {}
    source = RGB.convert("CMYK") if kind == "CMYK" else RGB
    content = encoded(source, "JPEG" if kind == "CMYK" else kind, exif=exif, **options)
    assert np.array_equal(by_plan(content), by_pillow(content))
    assert np.array_equal(open_rgb(content, name="a"), by_pillow(content))
    with Image.open(io.BytesIO(content)) as file:
        turned = np.asarray(ImageOps.exif_transpose(file).convert("RGB"))
    assert np.array_equal(by_plan(content, upright=True), turned)
    if kind != "TIFF":  # Pillow turns those in any case
        assert by_plan(content).shape == (37, 53, 3)
        assert (turned.shape == (53, 37, 3)) == (tag in range(5, 9))


@pytest.mark.parametrize(("name", "content"), [("a.JPEG", PNG), ("a.png", JPEG), ("a", PNG)])
def test_the_content_decides_and_not_the_name(name: str, content: bytes) -> None:
    tensor = Resize((37, 53)).decode(content, name=name)
    assert np.array_equal(tensor.permute(1, 2, 0).numpy(), by_pillow(content))


# ---- damage ----

BAD: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "the file is empty"),
    "text": (b"not an image", "not an image in a format that Pillow can read"),
    "a jpeg's magic": (JPEG[:3], "not an image|cannot be decoded"),
    "a png's magic": (PNG[:8], "not an image|cannot be decoded"),
    "a jpeg's header": (JPEG[: JPEG.index(b"\xff\xda")], "not an image|cannot be decoded"),
    "a jpeg's header and scan": (JPEG[: JPEG.index(b"\xff\xda") + 14], "cannot be decoded: "),
    "a png's header": (PNG[:33], "cannot be decoded|not an image"),
    "garbage before a jpeg": (b"garbage" + JPEG, "not an image"),
    "garbage before a png": (b"\r\n" + PNG, "not an image"),
    "half a jpeg": (JPEG[: len(JPEG) // 2], "cannot be decoded: "),
    "half a png": (PNG[: len(PNG) // 2], "cannot be decoded: "),
    "no rows": (forged_jpeg(0, 53), "not an image|cannot be decoded"),
    "no columns": (forged_jpeg(37, 0), "not an image|cannot be decoded"),
    "zeros": (bytes(5000), "not an image"),
}


@pytest.mark.parametrize(
    "decode", [RandomResizedCrop(16).decode, Resize(16, upright=True).decode, open_rgb]
)
@pytest.mark.parametrize("kind", BAD)
def test_what_is_no_image_is_named_with_the_reason(kind: str, decode: Any) -> None:
    content, reason = BAD[kind]
    with pytest.raises(DecodeError, match=f"^some/file.jpg: ({reason})") as caught:
        decode(content, name="some/file.jpg")
    assert caught.value.path == "some/file.jpg"


@pytest.mark.parametrize(
    "kind", ["jpeg", "jpeg, progressive", "grey jpeg", "CMYK jpeg", "png", "bmp", "tiff", "webp"]
)
def test_cut_off_anywhere_it_is_right_or_a_decode_error(kind: str) -> None:
    content = KINDS[kind]()
    whole = by_plan(content)
    # Every length near both ends, where the headers and the end marks are, and some between.
    lengths = {*range(0, 40), *range(len(content) - 40, len(content))}
    lengths |= set(range(40, len(content), max(1, len(content) // 150)))
    errors = 0
    plan = Resize(whole.shape[:2])
    for length in sorted(lengths):
        try:
            pixels = plan.decode(content[:length], name="a").permute(1, 2, 0).numpy()
        except DecodeError:
            errors += 1
        else:
            assert np.array_equal(pixels, whole), f"cut off at {length} of {len(content)}"
    assert errors > len(lengths) // 2


def test_flipped_and_random_bytes_give_an_image_of_the_right_shape_or_a_decode_error() -> None:
    """Other bytes each time, except in CI: a failure prints what it was."""
    drawn = np.random.SeedSequence().generate_state(1).tobytes()
    seed = 0 if "CI" in os.environ else int.from_bytes(drawn, "little")
    rng = np.random.default_rng(seed)
    names = [name for name in KINDS if name != "webp, lossless, alpha"]
    contents = {name: KINDS[name]() for name in names}
    ways: list[tuple[Callable[..., Any], tuple[int, ...] | None]] = [
        (RandomResizedCrop(16, flip=0.5).decode, (3, 16, 16)),
        (Resize((9, 11), upright=True).decode, (3, 9, 11)),
        (open_rgb, None),
    ]
    outcomes = {"image": 0, "error": 0}
    for number in range(1_500):
        name = names[number % len(names)]
        damaged = bytearray(contents[name])
        reach = len(damaged) if number % 2 else min(len(damaged), 400)  # headers, half of the time
        for _ in range(rng.integers(1, 5)):
            damaged[rng.integers(reach)] ^= int(rng.integers(1, 256))
        if number % 7 == 0:
            del damaged[rng.integers(len(damaged)) :]
        if number % 5 == 0:
            damaged[rng.integers(len(damaged) + 1) :] = rng.bytes(200)
        decode, shape = ways[number % 3]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow's, of odd metadata
            try:
                result = decode(bytes(damaged), name="a")
            except DecodeError:
                outcomes["error"] += 1
                continue
            except BaseException as error:
                error.add_note(f"{name}, number {number} of seed {seed}: {bytes(damaged).hex()}")
                raise
        outcomes["image"] += 1
        if shape is None:
            assert result.mode == "RGB"
        else:
            assert (result.shape, result.dtype) == (shape, torch.uint8)
    assert min(outcomes.values()) > 10, outcomes


# ---- bombs ----

BOMBS: dict[str, bytes] = {
    "jpeg": forged_jpeg(65_500, 65_500),
    "jpeg, just above": forged_jpeg(13_500, 13_500),
    "progressive jpeg": forged_jpeg(
        65_500, 65_500, encoded(RGB, progressive=True).replace(b"\xff\xc2", b"\xff\xc0", 1)
    ).replace(b"\xff\xc0", b"\xff\xc2", 1),
    "CMYK jpeg": forged_jpeg(65_500, 65_500, encoded(RGB.convert("CMYK"))),
    "png": png(sized(100_000, 100_000) + bytes([8, 2, 0, 0, 0]), b"IDAT" + zlib.compress(b"")),
    "png, as large as can be": png(
        sized(2**31 - 1, 2**31 - 1) + bytes([16, 6, 0, 0, 0]), b"IDAT" + zlib.compress(b"")
    ),
    "bmp": encoded(RGB, "BMP")[:18] + (60_000).to_bytes(4, "little") * 2 + encoded(RGB, "BMP")[26:],
    "ppm": b"P6 99999 99999 255\n" + bytes(99),
    "narrow": encoded(Image.new("RGB", (1, 60_000)), "PNG"),
}


def test_a_header_that_asks_for_gigabytes_gets_none(tmp_path: Path) -> None:
    """The limit of memory counts what libjpeg, Pillow, NumPy and torch take."""
    paths = []
    for number, bomb in enumerate(BOMBS.values()):
        paths.append(tmp_path / str(number))
        paths[-1].write_bytes(bomb)
    (tmp_path / "good").write_bytes(JPEG)
    script = """
import re, resource, sys, torch
torch.set_num_threads(1)
from fastload.errors import DecodeError
from fastload.image import Resize
def decode(path):
    return Resize(224).decode(open(path, "rb").read(), name=path)
good, *bombs = sys.argv[1:]
decode(good)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 128 * 2**20,) * 2)
for bomb in bombs:
    try:
        decode(bomb)
    except DecodeError as error:
        print(bool(re.search("MAX_IMAGE_PIXELS|decompression bomb", str(error))))
decode(good)
print("well")
"""
    output = run_python("-c", script, tmp_path / "good", *paths, check=True).stdout
    assert output.split() == ["True"] * len(paths) + ["well"]


# ---- results, threads ----


@pytest.mark.parametrize(
    "decode",
    [
        Resize((37, 53)).decode,
        Resize((37, 53), channels_last=True).decode,
        Resize((20, 30)).decode,
        lambda content, name: torch.from_numpy(decode_pixels(content, name=name)),
        lambda content, name: torch.from_numpy(decode_pixels(content, name=name, max_size=30)),
    ],
    ids=["whole", "channels last", "resized", "decode_pixels", "decode_pixels, reduced"],
)
def test_a_result_does_not_change_when_the_thread_decodes_again(
    decode: Callable[..., torch.Tensor],
) -> None:
    first, second = encoded(NOISE), encoded(255 - NOISE)
    result = decode(first, name="a")
    kept = result.clone()
    other = decode(second, name="b")
    assert not torch.equal(result, other)
    assert torch.equal(result, kept)
    assert result.untyped_storage().data_ptr() != other.untyped_storage().data_ptr()
