"""Promise: The kernels' CRC-32 is zlib's."""

from __future__ import annotations

import zlib

import numpy as np
import pytest

from fastload.image import Resize
from fastload.image.kernels import Kernels
from fastload.image.kernels.tables import DAMAGED, DONE
from tests.image.kernel_runs import guarded_copy, make, noise


@pytest.mark.parametrize("fill", [None, 0, 255])
def test_lengths(kernels: Kernels, fill: int | None) -> None:
    for width in [*range(1, 70), 1365, 65_536]:
        pixels = guarded_copy(noise(1, width, width))
        if fill is not None:
            pixels[:] = np.uint8(fill)
        checksum = zlib.crc32(pixels.tobytes())
        for crc, state in ((checksum, DONE), (checksum ^ 1, DAMAGED)):
            assert make(kernels, Resize((1, 1)), pixels, checksum=crc).state == state
