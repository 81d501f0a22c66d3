"""The CRC-32 of zlib, by carry-less multiplication.

Method: Gopal and others, "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ Instruction", Intel 2009. The
message is a polynomial over GF(2). 128 bits of it are multiplied by x^n modulo the polynomial of the checksum, and
added to the 128 bits that follow n bits later. The factors are computed here from that polynomial, and equal those that
the paper prints for bit-reflected data.
"""

from __future__ import annotations

from numba import njit

from fastload.image.kernels.memory import OPTIONS, load_u8, stack
from fastload.image.kernels.vectors import exclusive_or, fold, load_narrow, quads, store_narrow

_POLYNOMIAL = 0x1_04C1_1DB7
_REFLECTED = 0xEDB8_8320  # without x^32


def _factor(bits: int) -> int:
    """Return x^bits modulo the polynomial, reflected and shifted as a product of two reflected numbers needs it."""
    remainder = 1
    for _ in range(bits):
        remainder <<= 1
        if remainder >> 32:
            remainder ^= _POLYNOMIAL
    return int(f"{remainder:032b}"[::-1], 2) << 1


# The low half of 128 bits comes first, so it moves 64 bits farther. A product of reflected numbers is one bit off, and
# 32 more bits of the factor are in use: hence +32 and -32.
_BY_64_BYTES = _factor(512 + 32), _factor(512 - 32)
_BY_16_BYTES = _factor(128 + 32), _factor(128 - 32)


@njit(**OPTIONS)
def crc32(address: int, length: int, begin: int) -> int:
    """Return `zlib.crc32` of the bytes at an address. `begin` is the checksum of the bytes before them."""
    checksum = begin ^ 0xFFFFFFFF
    end = address + length
    if length >= 64:
        checksum = _folded(address, length & ~15, checksum)
        address += length & ~15
    return _by_bytes(address, end - address, checksum) ^ 0xFFFFFFFF


@njit(**OPTIONS)
def _by_bytes(address: int, length: int, checksum: int) -> int:
    for place in range(length):
        checksum ^= load_u8(address + place)
        for _ in range(8):
            checksum = (checksum >> 1) ^ (_REFLECTED & -(checksum & 1))
    return checksum


@njit(**OPTIONS)
def _folded(address: int, length: int, checksum: int) -> int:
    """Update a checksum with a multiple of 16 bytes, at least 64."""
    end = address + length
    first = exclusive_or(load_narrow(address), quads(checksum, 0))
    second, third = load_narrow(address + 16), load_narrow(address + 32)
    fourth = load_narrow(address + 48)
    address += 64
    factors = quads(_BY_64_BYTES[0], _BY_64_BYTES[1])
    while address + 64 <= end:
        first = fold(first, factors, load_narrow(address))
        second = fold(second, factors, load_narrow(address + 16))
        third = fold(third, factors, load_narrow(address + 32))
        fourth = fold(fourth, factors, load_narrow(address + 48))
        address += 64
    factors = quads(_BY_16_BYTES[0], _BY_16_BYTES[1])
    first = fold(fold(fold(first, factors, second), factors, third), factors, fourth)
    while address < end:
        first = fold(first, factors, load_narrow(address))
        address += 16
    # These 16 bytes have the same remainder as all the bytes folded into them.
    remainder = stack(16)
    store_narrow(first, remainder)
    return _by_bytes(remainder, 16, 0)
