"""Promise: the kernels' CRC-32 is zlib's."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastload.image.kernels import Kernels
from tests.image.kernel_runs import guarded


def crc32(kernels: Kernels, data: bytes, begin: int = 0) -> int:
    memory = guarded(len(data))
    memory[:] = np.frombuffer(data, np.uint8)
    return kernels.crc32(memory.ctypes.data, len(data), begin)


@settings(max_examples=300, deadline=None)
@given(data=st.binary(max_size=400), begin=st.integers(0, 2**32 - 1))
def test_any_bytes(kernels: Kernels, data: bytes, begin: int) -> None:
    assert crc32(kernels, data, begin) == zlib.crc32(data, begin)


@pytest.mark.parametrize("length", [*range(20), *range(60, 70), *range(124, 132), 4095, 196_608])
def test_lengths(kernels: Kernels, length: int) -> None:
    for data in (bytes(length), b"\xff" * length, np.random.default_rng(length).bytes(length)):
        assert crc32(kernels, data) == zlib.crc32(data)


def test_in_parts(kernels: Kernels) -> None:
    data = np.random.default_rng(0).bytes(1_000)
    for cut in range(0, 1_001, 13):
        assert crc32(kernels, data[cut:], crc32(kernels, data[:cut])) == zlib.crc32(data)


def test_the_factors_are_those_of_the_paper() -> None:
    pytest.importorskip("numba")
    from fastload.image.kernels.checksum import _BY_16_BYTES, _BY_64_BYTES

    assert _BY_64_BYTES == (0x1_5444_2BD4, 0x1_C6E4_1596)
    assert _BY_16_BYTES == (0x1_7519_97D0, 0x0_CCAA_009E)
