"""Promise: The kernels' CRC-32 is zlib's."""

from __future__ import annotations

import re
import zlib
from pathlib import Path

import numpy as np

from fastload.image import kernels as package
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


def test_the_factors_follow_from_the_polynomial() -> None:
    source = Path(package.__file__).with_name("checksum.c").read_text()
    for bytes_ in (64, 16):
        for name, bits in (("LOW", 8 * bytes_ + 32), ("HIGH", 8 * bytes_ - 32)):
            factor = re.search(rf"#define {name}_BY_{8 * bytes_}_BITS (\w+)", source)
            assert factor is not None
            assert int(factor[1], 16) == power(bits)


def power(bits: int) -> int:
    """Return x^bits modulo the polynomial, reflected in 32 bits and shifted left by one."""
    remainder = 1
    for _ in range(bits):
        remainder <<= 1
        if remainder >> 32:
            remainder ^= 0x1_04C1_1DB7
    return int(f"{remainder:032b}"[::-1], 2) << 1
