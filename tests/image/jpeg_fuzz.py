"""Damaged JPEGs through the region decoder: `python -m tests.image.jpeg_fuzz`, or `scripts/fuzz-jpeg` for hours.

Every input ends at a page that cannot be read, and so do the scratch memory and the result. A crash ends this process,
and its parent finds the input in the file `--input`.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFile

from fastload.errors import DecodeError
from fastload.image import kernels as compiled
from fastload.image.kernels import tables
from fastload.image.plan_tables import result_size
from fastload.image.plans import Plan, RandomResizedCrop
from tests.image.kernel_runs import GuardedMemory, Trial
from tests.image.photographs import encoded, photographs

Pixels = NDArray[np.uint8]
Random = np.random.Generator
ImageFile.MAXBLOCK = 1 << 22  # Pillow's encoder fails for noise in smaller buffers


# ---- inputs ----


def jpeg(pixels: Pixels, subsampling: str = "420", quality: int = 90) -> bytes:
    """Return a JPEG of `pixels`. Of 4:4:0 and 4:1:1, which Pillow does not write, the blocks lie in another order.

    A unit of 4:4:0 has the blocks of one of 4:2:2, and a unit of 4:1:1 has those of one of 4:2:0.
    """
    if subsampling in ("444", "422", "420"):
        return encoded(pixels, quality=quality, subsampling=":".join(subsampling))
    height, width = pixels.shape[:2]
    if subsampling == "440":
        written, sampling, rows, columns = "422", 0x12, -(-height // 16) * 8, -(-width // 8) * 16
    else:
        written, sampling, rows, columns = "420", 0x41, -(-height // 8) * 16, -(-width // 32) * 16
    resized = np.asarray(Image.fromarray(pixels).resize((columns, rows)))
    content = bytearray(jpeg(resized, written, quality))
    at = content.index(b"\xff\xc0") + 5
    content[at : at + 4] = height.to_bytes(2, "big") + width.to_bytes(2, "big")
    content[at + 6] = sampling
    return bytes(content)


def intact(random: Random) -> bytes:
    """Return a JPEG of a random kind, some thousand pixels of noise or of a photograph."""
    height, width = random.integers(1, 160, 2)
    photograph = list(photographs().values())[random.integers(0, 3)]
    if random.random() < 0.6:
        top = random.integers(0, photograph.shape[0] - height)
        left = random.integers(0, photograph.shape[1] - width)
        pixels = np.ascontiguousarray(photograph[top : top + height, left : left + width])
    else:
        pixels = random.integers(0, 256, (height, width, 3), dtype=np.uint8)
    quality = int(random.integers(5, 101))
    kind = random.integers(0, 12)
    if kind < 5:
        return jpeg(pixels, ("444", "422", "420", "440", "411")[kind], quality)
    options: dict[str, Any] = {"quality": quality, "subsampling": int(random.integers(0, 3))}
    if kind == 5:
        return encoded(pixels[..., 0], quality=quality)
    if kind == 6:
        options |= {"restart_marker_blocks": int(random.integers(1, 9))}
    elif kind == 7:
        options |= {"restart_marker_rows": 1, "optimize": True}
    elif kind == 8:
        options |= {"keep_rgb": True, "subsampling": 0}
    elif kind == 9:
        options |= {"progressive": True}
    elif kind == 10:
        return encoded(Image.fromarray(pixels).convert("CMYK"), quality=quality)
    return encoded(pixels, **options)


def segments(content: bytes) -> list[tuple[int, int]]:
    """Return begin and end of each marker segment up to the first scan, the start of image left out."""
    found, at = [], 2
    while at + 4 <= len(content) and content[at] == 0xFF:
        end = at + 2 + int.from_bytes(content[at + 2 : at + 4], "big")
        found.append((at, end))
        if content[at + 1] == 0xDA:
            break
        at = end
    return found


def damaged(content: bytes, random: Random) -> tuple[bytes, str]:
    """Return a damaged copy, and what was done to it."""
    parts = segments(content)
    scan = min(parts[-1][1], len(content) - 3)
    changed = bytearray(content)
    kind = str(random.choice(KINDS))
    if kind == "bits":
        for at in random.integers(scan, len(content) - 2, random.integers(1, 4)):
            changed[at] ^= 1 << random.integers(0, 8)
    elif kind == "bytes":
        for at in random.integers(2, len(content), random.integers(1, 21)):
            changed[at] = random.integers(0, 256)
    elif kind == "header":
        for at in random.integers(2, scan, random.integers(1, 4)):
            changed[at] = random.integers(0, 256)
    elif kind == "cut":
        del changed[random.integers(1, len(content)) :]
    elif kind == "cut and closed":
        del changed[random.integers(1, len(content)) :]
        changed += b"\xff\xd9"
    elif kind == "hole":
        begin = int(random.integers(scan, len(content) - 2))
        del changed[begin : begin + int(random.integers(1, 200))]
        changed += b"\xff\xd9"
    elif kind == "zeros":
        begin = int(random.integers(scan, len(content) - 2))
        count = min(int(random.integers(1, 600)), len(content) - 2 - begin)
        changed[begin : begin + count] = bytes(count)
    elif kind == "marker in scan":
        at = int(random.integers(scan, len(content) - 1))
        changed[at:at] = bytes([0xFF, random.integers(0, 256)])
    elif kind == "segment removed":
        begin, end = parts[random.integers(0, len(parts))]
        del changed[begin:end]
    elif kind == "segment repeated":
        (begin, end), (to, _) = (parts[k] for k in random.integers(0, len(parts), 2))
        changed[to:to] = content[begin:end]
    elif kind == "marker changed":
        changed[parts[random.integers(0, len(parts))][0] + 1] = random.integers(0xC0, 0x100)
    elif kind == "length changed":
        at = parts[random.integers(0, len(parts))][0] + 2
        changed[at : at + 2] = int(random.integers(0, 600)).to_bytes(2, "big")
    elif kind in ("size", "sampling"):
        frames = [begin for begin, _ in parts if content[begin + 1] in (0xC0, 0xC1, 0xC2)]
        if kind == "size":
            at = frames[0] + 5 + 2 * int(random.integers(0, 2))
            most = 65536 if random.random() < 0.05 else 400
            changed[at : at + 2] = int(random.integers(0, most)).to_bytes(2, "big")
        else:
            at = frames[0] + 11 + 3 * int(random.integers(0, content[frames[0] + 9]))
            changed[at] = int(random.choice([0x11, 0x12, 0x21, 0x22, 0x14, 0x41, 0x44, 0x31, 0x01]))
    elif kind == "appended":
        changed += random.bytes(int(random.integers(1, 40))) + b"\xff\xd9"
    return bytes(changed), kind


KINDS = (
    "intact, bits, bytes, header, cut, cut and closed, hole, zeros, marker in scan, segment removed, segment repeated, "
    "marker changed, length changed, size, sampling, appended"
).split(", ")


# ---- one process ----


class Fuzz:
    """Decodes damaged images, and counts what becomes of them."""

    def __init__(self, seed: int, note: Path | None = None) -> None:
        kernels = compiled.kernels()
        assert kernels is not None, compiled.state()
        assert kernels.libjpeg, compiled.decoder_state()
        self.random = np.random.default_rng(seed)
        self.trial = Trial(kernels)
        self.counts: Counter[str] = Counter()
        self.failures: list[bytes] = []
        self._input = GuardedMemory(1 << 20)
        self._result = GuardedMemory(1 << 20)
        self._scratch = GuardedMemory(1 << 26)
        self._note = None if note is None else note.open("wb", buffering=0)

    def run(self, seconds: float) -> None:
        """Go on for so long."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            content = intact(self.random)
            for _ in range(40):
                self.one(*damaged(content, self.random))

    def one(self, content: bytes, kind: str) -> None:
        """Decode one image, and compare what comes out."""
        self.counts["inputs"] += 1
        if self._note is not None:
            self._note.seek(0)
            self._note.truncate()
            self._note.write(content)
        size = tuple(self.random.integers(1, 100, 2).tolist())
        ratio = (0.3, 3.0) if self.random.random() < 0.5 else (3 / 4, 4 / 3)
        plan = RandomResizedCrop(
            size,
            scale=(0.02, 1.0),
            ratio=ratio,
            flip=0.5,
            scaled_decode=bool(self.random.random() < 0.6),
        )
        state, result = self._by_kernel(plan, content)
        self.counts[f"state {state}"] += 1
        if state == tables.DONE:
            self._compare(plan, content, kind, result)

    def _by_kernel(self, plan: Plan, content: bytes) -> tuple[int, Pixels]:
        payload = self._input.last(len(content))
        payload[:] = np.frombuffer(content, np.uint8)
        height, width = result_size(plan)
        result = self._result.last(3 * height * width).reshape(height, width, 3)
        # Sometimes too little, for a bound that is off by a few bytes.
        arena = self._scratch.last(int(self.random.choice([1 << 26, 1 << 22, 1 << 18, 150_000])))
        fields = {"source": payload.ctypes.data, "length": len(content)}
        key = int(self.random.integers(0, 2**63))
        state = self.trial.run_into(result, arena, plan, key, most_pixels=1 << 24, **fields)
        return state, result

    def _compare(self, plan: Plan, content: bytes, kind: str, result: Pixels) -> None:
        """Compare with Pillow, which goes on after warnings."""
        try:
            wanted: Pixels | None = self.trial.expected(plan, content)
        except DecodeError:
            wanted = None
        if wanted is None or not np.array_equal(result, wanted):
            self.counts[
                f"{'DIFFERENT PIXELS' if wanted is not None else 'REFUSED BY PILLOW'}: {kind}"
            ] += 1
            self.failures.append(content)


def main() -> None:
    """Fuzz, and print what was counted as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--input", type=Path, help="holds each input while it is decoded")
    parser.add_argument("--failures", type=Path, help="a folder for inputs with other pixels")
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # Pillow warns of damaged EXIF
    fuzz = Fuzz(options.seed, options.input)
    fuzz.run(options.seconds)
    for number, content in enumerate(fuzz.failures):
        if options.failures is not None:
            options.failures.mkdir(parents=True, exist_ok=True)
            (options.failures / f"{options.seed}-{number}.jpg").write_bytes(content)
    print(json.dumps(dict(fuzz.counts.most_common()), indent=1))


if __name__ == "__main__":
    main()
