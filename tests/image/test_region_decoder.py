"""Promises:
- The region decoder gives the pixels of the whole decode, or leaves the image to the ordinary decoder.
- The region decoder decodes no JPEG with a segment that Pillow refuses.
- No damaged input crashes the region decoder. See also `scripts/fuzz-jpeg`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fastload.errors import DecodeError
from fastload.image import RandomResizedCrop, Resize, ResizeCenterCrop
from fastload.image.kernels import Kernels, tables
from fastload.image.plan_tables import plan_table
from fastload.image.plans import Plan
from tests.children import run_python
from tests.image.jpeg_fuzz import jpeg, segments
from tests.image.kernel_runs import GuardedMemory, Trial
from tests.image.photographs import Pixels, encoded, photographs

RNG = np.random.default_rng(0)
NOISE: Pixels = RNG.integers(0, 256, (139, 173, 3), dtype=np.uint8)
PHOTOGRAPH = next(iter(photographs().values()))
DONE, UNDECIDED, UNREADABLE, DAMAGED, TOO_LARGE = (
    tables.DONE,
    tables.UNDECIDED,
    tables.UNREADABLE,
    tables.DAMAGED,
    tables.TOO_LARGE,
)


JPEG = jpeg(NOISE)
EXIF = Image.Exif()
EXIF[0x0112] = 6  # an orientation
KINDS: dict[str, Callable[[Pixels], bytes]] = {
    "4:4:4": lambda pixels: jpeg(pixels, "444"),
    "4:2:2": lambda pixels: jpeg(pixels, "422"),
    "4:2:0": lambda pixels: jpeg(pixels, "420"),
    "4:4:0": lambda pixels: jpeg(pixels, "440"),
    "4:1:1": lambda pixels: jpeg(pixels, "411"),
    "grey": lambda pixels: encoded(pixels[..., 0]),
    "RGB": lambda pixels: encoded(pixels, keep_rgb=True, quality=90),
    "restart markers": lambda pixels: encoded(pixels, restart_marker_blocks=3),
    "restart markers by row": lambda pixels: encoded(
        pixels, restart_marker_rows=1, subsampling="4:4:4"
    ),
    "optimized": lambda pixels: encoded(pixels, optimize=True, quality=75),
    "EXIF": lambda pixels: encoded(pixels, exif=EXIF),
}


def crop(size: tuple[int, int], **options: Any) -> Plan:
    return RandomResizedCrop(size, flip=0.5, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_pixels_are_those_of_the_ordinary_way(kind: str, trial: Trial) -> None:
    for pixels in (NOISE, PHOTOGRAPH[:301, :403]):
        content = KINDS[kind](pixels)
        for number, size in enumerate([(16, 16), (40, 25), (100, 130), (224, 224)]):
            for scaled in (True, False):
                plan = crop(size, scaled_decode=scaled)
                trial.check(plan, content, range(3 * number, 3 * number + 3))


def test_boxes_at_each_border_and_at_each_scale(trial: Trial) -> None:
    content = jpeg(np.tile(PHOTOGRAPH, (3, 3, 1))[:301, :403])  # a generated image may be smaller
    seen = set()
    for key in range(400):
        side = (6, 12, 24, 48, 96)[key % 5]
        plan = crop((side, side), scale=(0.03, 1.0))
        state, result = trial.run_bytes(plan, key, content)
        if state == UNDECIDED:
            continue
        assert np.array_equal(result, trial.expected(plan, content))
        row = trial.image[0]
        borders = {
            "top": row["top"] == 0,
            "left": row["left"] == 0,
            "bottom": row["top"] + row["box_height"] == 301,
            "right": row["left"] + row["box_width"] == 403,
        }
        seen |= {border for border, touched in borders.items() if touched} | {round(trial.scale, 1)}
    assert seen >= {"top", "left", "bottom", "right", 1.0, 2.0, 4.0, 8.0}


def test_plans_of_the_whole_image(trial: Trial) -> None:
    content = jpeg(PHOTOGRAPH[:203, :310])
    for side in (20, 45, 64, 120):
        size = (side, side + 9)
        for scaled in (True, False):
            for plan in (
                Resize(size, scaled_decode=scaled),
                ResizeCenterCrop(side + 12, size, scaled_decode=scaled),
            ):
                state, result = trial.run_bytes(plan, 0, content)
                assert state == DONE
                wanted = plan.decode(content, name="a.jpg")
                assert np.array_equal(result, wanted.permute(1, 2, 0))


# ---- what is left to Python ----


def with_marker(content: bytes, marker: int) -> bytes:
    """`content` with another marker at its frame header."""
    at = content.index(b"\xff\xc0")
    return content[: at + 1] + bytes([marker]) + content[at + 2 :]


def with_sampling(content: bytes, sampling: int) -> bytes:
    """`content` with other sampling factors of the first colour."""
    at = content.index(b"\xff\xc0") + 11
    return content[:at] + bytes([sampling]) + content[at + 1 :]


IMAGE = Image.fromarray(NOISE)
UNFIT: dict[str, Callable[[], bytes]] = {
    "nothing": lambda: b"",
    "two bytes": lambda: JPEG[:2],
    "text": lambda: b"not an image at all",
    "png": lambda: encoded(NOISE, "PNG"),
    "progressive": lambda: encoded(NOISE, progressive=True),
    "cmyk": lambda: encoded(IMAGE.convert("CMYK")),
    "arithmetic": lambda: with_marker(JPEG, 0xC9),
    "lossless": lambda: with_marker(JPEG, 0xC3),
    "12 bits": lambda: JPEG.replace(b"\xff\xc0\x00\x11\x08", b"\xff\xc0\x00\x11\x0c"),
    "a rare sampling": lambda: with_sampling(JPEG, 0x31),
    "cut": lambda: JPEG[: len(JPEG) // 2],
    "cut and closed": lambda: JPEG[: len(JPEG) // 8] + b"\xff\xd9",
    "zeros at the end": lambda: JPEG[:-4096] + bytes(4096),
    "a marker in the last rows": lambda: JPEG[:-40] + b"\xff\x40" + JPEG[-40:],
    "a restart marker too many": lambda: JPEG[:-40] + b"\xff\xd0" + JPEG[-40:],
    "two ends": lambda: JPEG[: len(JPEG) // 8] + b"\xff\xd9" + JPEG[len(JPEG) // 8 :],
    "no quantization table": lambda: JPEG.replace(b"\xff\xdb", b"\xff\xef"),
    "a wrong length": lambda: JPEG.replace(b"\xff\xdb\x00\x43", b"\xff\xdb\x00\x3f"),
}


@pytest.mark.parametrize("kind", UNFIT)
def test_what_is_not_plain_is_left_to_python(kind: str, trial: Trial) -> None:
    plan = crop((64, 64), scale=(0.9, 1.0))
    content = UNFIT[kind]()
    assert content != JPEG
    for key in range(3):
        assert trial.run_bytes(plan, key, content or b"\0")[0] == DAMAGED
        trial.check(plan, JPEG, range(key, key + 1))  # and the next one is as ever


REFUSED: dict[str, tuple[int, bytes]] = {
    "a cut block of Photoshop": (0xED, b"Photoshop 3.0\0" + b"8BIM\x04\x04"),
    "a short profile": (0xE2, b"ICC_PROFILE\0"),
    "a short Adobe segment": (0xEE, b"Adobe"),
}


@pytest.mark.parametrize("kind", [*REFUSED, "a marker without a meaning"])
def test_what_pillow_refuses_the_kernels_do_not_decode(kind: str, trial: Trial) -> None:
    added = b"\xff\x01"
    if kind in REFUSED:
        marker, segment = REFUSED[kind]
        added = bytes([0xFF, marker]) + (len(segment) + 2).to_bytes(2, "big") + segment
    content, plan = JPEG[:2] + added + JPEG[2:], crop((40, 30))
    with pytest.raises(DecodeError, match="not an image in a format that Pillow can read"):
        plan.decode(content, name="a.jpg")
    assert trial.run_bytes(plan, 1, content)[0] == DAMAGED


def test_an_image_finds_no_tables_of_the_one_before(trial: Trial) -> None:
    """libjpeg keeps them for "abbreviated" files; the ordinary way begins anew each time."""
    own_tables = encoded(NOISE, optimize=True, quality=30)
    parts = segments(JPEG)
    none = b"".join(
        [JPEG[:2]]
        + [JPEG[begin:end] for begin, end in parts if JPEG[begin + 1] != 0xC4]
        + [JPEG[parts[-1][1] :]]
    )
    plan = crop((64, 64), scale=(0.2, 1.0))
    trial.check(plan, own_tables, range(2))
    trial.check(plan, none, range(2))


def test_a_small_arena_says_what_it_lacks(trial: Trial, tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(JPEG)
    plan = crop((32, 32), scale=(1.0, 1.0), scaled_decode=False)
    name = np.frombuffer(os.fsencode(tmp_path / "a.jpg") + b"\0", np.uint8)
    result = np.zeros((32, 32, 3), np.uint8)
    sizes = [0]
    while True:
        arena = GuardedMemory(max(1, sizes[-1])).last(sizes[-1])
        state = trial.run_into(result, arena, plan, 1, named=1, source=name.ctypes.data)
        if not trial.needed:
            break
        assert state == TOO_LARGE
        assert trial.needed > sizes[-1]
        sizes.append(trial.needed)
    assert state == DONE
    assert len(sizes) <= 3  # the file, then all
    assert np.array_equal(result, trial.expected(plan, JPEG))


# ---- reading ----


def run_file(trial: Trial, path: Path | str) -> tuple[int, Pixels]:
    name = np.frombuffer(os.fsencode(path) + b"\0", np.uint8)
    return trial.run(crop((40, 40)), 3, named=1, source=name.ctypes.data)


def test_files_by_name(trial: Trial, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = crop((40, 40))
    wanted = trial.run_bytes(plan, 3, JPEG)[1]
    monkeypatch.chdir(tmp_path)
    for name in ("a.jpg", "Größe.jpg", "with space.jpg"):
        (tmp_path / name).write_bytes(JPEG)
        for path in (tmp_path / name, name):
            state, result = run_file(trial, path)
            assert state == DONE
            assert np.array_equal(result, wanted)
    assert trial.image["length"][0] == len(JPEG)
    assert trial.image["read_ns"][0] > 0
    assert trial.image["decode_ns"][0] > 0
    assert trial.image["transform_ns"][0] > 0


def test_a_run_of_several_images_leaves_out_what_is_not_to_be_done(
    trial: Trial, kernels: Kernels
) -> None:
    plan, arena = crop((20, 20)), np.empty(1 << 22, np.uint8)
    payload, rows = np.frombuffer(JPEG, np.uint8), np.zeros((4, 20, 20, 3), np.uint8)
    images = np.zeros(4, tables.IMAGE)
    images["file"], images["checksum"] = -1, [-1, -1, 7, -1]
    images["source"], images["length"] = payload.ctypes.data, len(JPEG)
    images["row"] = rows.ctypes.data + rows[0].nbytes * np.arange(4)
    images["state"][1] = UNREADABLE
    assert not kernels.jpeg_run(
        images.ctypes.data,
        4,
        plan_table(plan, (1, 3 * 20, 3), 0).address,
        arena.ctypes.data,
        arena.nbytes,
    )
    assert images["state"].tolist() == [DONE, UNREADABLE, DAMAGED, DONE]
    assert np.array_equal(rows[0], rows[3])
    assert rows[0].any()
    assert not rows[1].any()


# ---- damage, threads, memory ----


@pytest.mark.slow
def test_damaged_images_end_no_process_and_change_no_pixels(trial: Trial) -> None:
    """Ten seconds of `scripts/fuzz-jpeg`; inputs, scratch memory and results end at pages without access."""
    child = run_python("-m", "tests.image.jpeg_fuzz", "--seconds", "10")
    assert child.returncode == 0, child.stderr
    counts = json.loads(child.stdout)
    assert counts["inputs"] > 200
    assert counts[f"state {DONE}"] > 50
    assert counts[f"state {DAMAGED}"] > 50
    assert not [what for what in counts if what.startswith(("DIFFERENT", "REFUSED"))], counts
