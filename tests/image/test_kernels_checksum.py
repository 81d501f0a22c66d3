"""Promise: The kernels' CRC-32 is zlib's."""

from __future__ import annotations

import zlib

import numpy as np

from fastload.image.kernels import Kernels
from tests.image.kernel_runs import guarded


def crc32(kernels: Kernels, data: bytes, begin: int = 0) -> int:
    memory = guarded(len(data))
    memory[:] = np.frombuffer(data, np.uint8)
    return kernels.crc32(memory.ctypes.data, len(data), begin)


def test_lengths(kernels: Kernels) -> None:
    for length in [*range(200), 4095, 196_608]:
        for data in (bytes(length), b"\xff" * length, np.random.default_rng(length).bytes(length)):
            assert crc32(kernels, data, length) == zlib.crc32(data, length)


def test_in_parts(kernels: Kernels) -> None:
    data = np.random.default_rng(0).bytes(1_000)
    for cut in range(0, 1_001, 13):
        assert crc32(kernels, data[cut:], crc32(kernels, data[:cut])) == zlib.crc32(data)
