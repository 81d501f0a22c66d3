"""A trial of the region decoder: `python -m fastload.image.libjpeg_check NAME`, the child process of `libjpeg`.

A library with other structs, or that fails on this machine, ends only this process and not the training.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator

import numpy as np
import simplejpeg

from fastload.image import kernels as compiled
from fastload.image.decode import Pixels
from fastload.image.kernels import Kernels, cache, tables
from fastload.image.libjpeg import CHECK_S, Decoder, library, verdict_name
from fastload.image.plans import Plan, RandomResizedCrop
from fastload.image.regions import Box, Region
from fastload.image.render import plan_table, result_size

KEYS = range(6)
SIZES = ((24, 24), (40, 64), (130, 90))  # sizes of results: images are decoded at several scales


class Trial:
    """Renders single images by the kernel."""

    def __init__(self, kernels: Kernels, decoder: Decoder, arena_bytes: int = 1 << 23) -> None:
        self.image = np.zeros(1, tables.IMAGE)  # the row of the last image
        self.decoder = decoder
        self.needed = 0
        self._kernels = kernels
        self._arena = np.empty(arena_bytes, np.uint8)

    def run(self, plan: Plan, key: int, **fields: int) -> tuple[int, Pixels]:
        """Return an image's state and its result, uint8[H, W, 3]. `fields` are fields of its row in the table.

        `source` is the address of `length` bytes in memory, unless `file` is given. With `named=1` it is the address of
        a file's name.
        """
        result = np.zeros((*result_size(plan), 3), np.uint8)
        state = self.run_into(result, self._arena, plan, key, **fields)
        for _ in range(2):  # the arena may have to grow for the file, then for its pixels
            if self.needed:
                self._arena = np.empty(self.needed, np.uint8)
                state = self.run_into(result, self._arena, plan, key, **fields)
        return state, result

    def run_into(
        self,
        result: Pixels,
        arena: Pixels,
        plan: Plan,
        key: int,
        *,
        named: int = 0,
        most_pixels: int = 0,
        **fields: int,
    ) -> int:
        """Return an image's state after one call. If the arena was too small, `needed` is the right size, else 0."""
        table = plan_table(plan, (1, 3 * result.shape[1], 3), most_pixels)
        self.image[:] = 0
        fields = {"key": key, "row": result.ctypes.data, "file": -1, "checksum": -1} | fields
        for name, value in fields.items():
            self.image[name] = value
        run = self._kernels.file_run if named else self._kernels.jpeg_run
        self.needed = run(
            self.image.ctypes.data,
            1,
            table.address,
            arena.ctypes.data,
            arena.nbytes,
            self.decoder.address,
        )
        return int(self.image["state"][0])

    def run_bytes(
        self, plan: Plan, key: int, encoded: bytes, most_pixels: int = 0
    ) -> tuple[int, Pixels]:
        """Call `run` for an image in memory."""
        payload = np.frombuffer(encoded, np.uint8)
        place = {"source": payload.ctypes.data, "length": len(encoded)}
        return self.run(plan, key, most_pixels=most_pixels, **place)

    def expected(self, plan: Plan, encoded: bytes) -> Pixels:
        """Return the pixels of the last box, decoded without the kernel, uint8[H, W, 3]. Raises DecodeError."""
        fields = self.image[["top", "left", "box_height", "box_width", "flip"]]
        top, left, rows, columns, flip = fields[0].item()
        region = Region(Box(top, left, rows, columns), result_size(plan), flip=bool(flip))
        whole, region = plan.decoded(encoded, lambda *_: region, name="trial")
        pixels: Pixels = plan.finished(whole, region).permute(1, 2, 0).contiguous().numpy()
        return pixels


def crop(size: tuple[int, int], *, scaled: bool = True) -> Plan:
    """Return a RandomResizedCrop that mirrors half of the images."""
    return RandomResizedCrop(size, flip=0.5, scaled_decode=scaled)


def main() -> None:
    """Store in the cache, under NAME, the objection to the region decoder, or nothing if there is none."""
    signal.alarm(CHECK_S)
    os.nice(10)
    (name,) = sys.argv[1:]
    if not compiled.wait():
        sys.exit(1)
    kernels, found = compiled.kernels(), library()
    assert kernels is not None
    if verdict_name(kernels, found) == name:
        cache.store(name, objection(Trial(kernels, Decoder(kernels, found))).encode())


def objection(trial: Trial) -> str:
    """Return what a trial finds wrong, or "" if all is well."""
    for encoded in _images():
        for damaged in _damaged(encoded):
            if trial.run_bytes(crop(SIZES[0]), 0, damaged)[0] != tables.DAMAGED:
                return "a damaged image was not noticed"
        for key in KEYS:
            for size in SIZES:
                for scaled in (False, True):
                    plan = crop(size, scaled=scaled)
                    state, result = trial.run_bytes(plan, key, encoded)
                    if state == tables.UNDECIDED:
                        continue
                    if state != tables.DONE:
                        return "an intact image was not decoded"
                    if not np.array_equal(result, trial.expected(plan, encoded)):
                        return "pixels differ from simplejpeg's"
    return ""


def _images() -> Iterator[bytes]:
    """Yield images of noise on a gradient, with all kinds of subsampling."""
    y, x = np.mgrid[0:203, 0:301]
    noise = np.random.default_rng(0).integers(0, 64, (*y.shape, 3))
    pixels = np.clip(np.stack([y, x // 2, 255 - y // 2], axis=2) + noise - 32, 0, 255)
    for subsampling in ("444", "422", "420", "440", "411"):
        yield simplejpeg.encode_jpeg(
            np.ascontiguousarray(pixels.astype(np.uint8)),
            quality=85,
            colorsubsampling=subsampling,
        )
    yield simplejpeg.encode_jpeg(
        np.ascontiguousarray(pixels[..., :1].astype(np.uint8)),
        colorspace="Gray",
        colorsubsampling="Gray",
    )


def _damaged(encoded: bytes) -> Iterator[bytes]:
    """Yield inputs for which libjpeg reports an error, in the header or in the scan, or warns."""
    yield encoded[:1] + b"\0" + encoded[2:]  # not the first marker
    tables_begin = encoded.index(b"\xff\xdb")
    # Quantization table 15.
    yield (encoded[: tables_begin + 4] + b"\x0f" + encoded[tables_begin + 5 :])
    yield encoded[: len(encoded) // 8] + b"\xff\xd9"  # too few rows
    yield encoded[: len(encoded) // 2]


if __name__ == "__main__":
    main()
