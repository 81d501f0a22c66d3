"""Vectors of 256 and 128 bits for kernels: shuffles in LLVM IR, arithmetic by the instructions of AVX2 and PCLMULQDQ.

A `WIDE` has two lanes of 128 bits. Most instructions of AVX2 treat each lane separately, and so do the kernels: they
put two rows of an image into the two lanes, or two halves of one row.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core.datamodel import models
from numba.extending import register_model

from fastload.image.kernels.memory import F32, I8, I16, I32, I64, operation


class _Vector(types.Type):  # type: ignore[misc]
    pass


class _Wide(_Vector):
    pass


class _Narrow(_Vector):
    pass


WIDE, NARROW = _Wide(name="WIDE"), _Narrow(name="NARROW")
_BYTES, _WORDS, _LONGS = (ir.VectorType(kind, 256 // kind.width) for kind in (I8, I16, I32))
_FLOATS = ir.VectorType(F32, 8)
_HALF, _QUADS = ir.VectorType(I8, 16), ir.VectorType(I64, 2)
_ZERO = 32  # the index of a byte 0 in a shuffle


@register_model(_Wide)
class _WideModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, frontend: Any) -> None:
        super().__init__(manager, frontend, _LONGS)


@register_model(_Narrow)
class _NarrowModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, frontend: Any) -> None:
        super().__init__(manager, frontend, _QUADS)


def _indices(places: Any) -> Any:
    return ir.Constant(ir.VectorType(I32, len(places)), [ir.Constant(I32, k) for k in places])


def _load(builder: Any, address: Any, kind: Any) -> Any:
    value = builder.load(builder.inttoptr(address, kind.as_pointer()))
    value.align = 1
    return value


def _store(builder: Any, value: Any, address: Any) -> None:
    written = builder.store(value, builder.inttoptr(address, value.type.as_pointer()))
    written.align = 1


def _call(builder: Any, name: str, result: Any, *operands: Any) -> Any:
    """Call an intrinsic of LLVM, which is one instruction of the processor."""
    kind = ir.FunctionType(result, [operand.type for operand in operands])
    called = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
    return builder.call(called, operands)


def _splat(builder: Any, value: Any) -> Any:
    first = builder.insert_element(ir.Constant(_LONGS, ir.Undefined), value, ir.Constant(I32, 0))
    return builder.shuffle_vector(first, ir.Constant(_LONGS, ir.Undefined), _indices([0] * 8))


# ---- 256 bits ----


@operation(WIDE)
def zeros(builder: Any) -> Any:
    """Return 32 bytes of 0."""
    return ir.Constant(_LONGS, None)


@operation(WIDE, types.int64)
def splat(builder: Any, value: Any) -> Any:
    """Return eight copies of the low 32 bits of a number."""
    return _splat(builder, builder.trunc(value, I32))


@operation(WIDE, types.int64)
def splat_at(builder: Any, address: Any) -> Any:
    """Return eight copies of the 32 bits at an address: a pair of int16 weights."""
    return _splat(builder, _load(builder, address, I32))


@operation(WIDE, types.int64)
def load_wide(builder: Any, address: Any) -> Any:
    """Load 32 bytes."""
    return _load(builder, address, _LONGS)


@operation(WIDE, types.int64, types.int64)
def load_halves(builder: Any, low: Any, high: Any) -> Any:
    """Load 16 bytes into each lane, from two addresses."""
    halves = [_load(builder, address, _HALF) for address in (low, high)]
    return builder.bitcast(builder.shuffle_vector(*halves, _indices(range(32))), _LONGS)


@operation(types.void, WIDE, types.int64)
def store_wide(builder: Any, vector: Any, address: Any) -> None:
    """Store 32 bytes."""
    _store(builder, vector, address)


@operation(types.void, WIDE, types.int64)
def store_past_caches(builder: Any, vector: Any, address: Any) -> None:
    """Store 32 bytes at a multiple of 32, past the caches. Call `fence` after the last one."""
    written = builder.store(vector, builder.inttoptr(address, _LONGS.as_pointer()))
    written.align = 32
    note = builder.module.add_metadata([ir.Constant(I32, 1)])
    written.set_metadata("nontemporal", note)


@operation(types.void)
def fence(builder: Any) -> None:
    """Make stores past the caches visible to other threads before any later store."""
    _call(builder, "llvm.x86.sse.sfence", ir.VoidType())


@operation(WIDE, types.int64, types.int64, types.int64)
def to_floats(builder: Any, bytes_: Any, factors: Any, shifts: Any) -> Any:
    """Return `byte * factor - shift` for 8 bytes, as float32, each operation rounded. All three are addresses."""
    values = builder.zext(_load(builder, bytes_, ir.VectorType(I8, 8)), _LONGS)
    product = builder.fmul(builder.sitofp(values, _FLOATS), _load(builder, factors, _FLOATS))
    return builder.bitcast(builder.fsub(product, _load(builder, shifts, _FLOATS)), _LONGS)


@operation(WIDE, WIDE, WIDE, WIDE)
def differing(builder: Any, before: Any, left: Any, right: Any) -> Any:
    """Return the bits of `before`, and those in which two vectors differ."""
    return builder.or_(before, builder.xor(left, right))


@operation(types.boolean, WIDE)
def is_zero(builder: Any, vector: Any) -> Any:
    """Return whether all bits are 0."""
    whole = builder.bitcast(vector, ir.IntType(256))
    return builder.icmp_unsigned("==", whole, ir.Constant(ir.IntType(256), 0))


def lane_shuffle(*table: int) -> Any:
    """Return a function that rearranges the 16 bytes of each lane by `table`, in which -1 is a byte 0."""
    places = [
        _ZERO if place < 0 else place + lane
        for lane in (0, 16)
        for place in (*table, *[-1] * 16)[:16]
    ]

    @operation(WIDE, WIDE)
    def shuffle(builder: Any, vector: Any) -> Any:
        operands = builder.bitcast(vector, _BYTES), ir.Constant(_BYTES, None)
        return builder.bitcast(builder.shuffle_vector(*operands, _indices(places)), _LONGS)

    return shuffle


def _interleave(begin: int) -> Any:
    """Return a function that interleaves 8 bytes of each lane of two vectors, from byte `begin` on."""
    places = [
        place
        for lane in (0, 16)
        for k in range(8)
        for place in (lane + begin + k, 32 + lane + begin + k)
    ]

    @operation(WIDE, WIDE, WIDE)
    def interleave(builder: Any, even: Any, odd: Any) -> Any:
        operands = builder.bitcast(even, _BYTES), builder.bitcast(odd, _BYTES)
        return builder.bitcast(builder.shuffle_vector(*operands, _indices(places)), _LONGS)

    return interleave


interleave_low = _interleave(0)
interleave_high = _interleave(8)


@operation(WIDE, WIDE, WIDE, WIDE)
def multiply_add(builder: Any, total: Any, values: Any, weights: Any) -> Any:
    """Return `total` after adding to each of its int32 the sum of two products of int16."""
    operands = builder.bitcast(values, _WORDS), builder.bitcast(weights, _WORDS)
    products = _call(builder, "llvm.x86.avx2.pmadd.wd", _LONGS, *operands)
    return builder.add(total, products)


@operation(WIDE, WIDE, WIDE, WIDE, WIDE, types.int64)
def narrow(builder: Any, first: Any, second: Any, third: Any, fourth: Any, bits: Any) -> Any:
    """Shift int32 right by `bits`, and clamp them to 0..255. Each lane gets its 4 of each vector, in order."""
    count = _splat(builder, builder.trunc(bits, I32))
    shifted = [builder.ashr(vector, count) for vector in (first, second, third, fourth)]
    pack = "llvm.x86.avx2.packssdw"
    words = [_call(builder, pack, _WORDS, *shifted[k : k + 2]) for k in (0, 2)]
    return builder.bitcast(_call(builder, "llvm.x86.avx2.packuswb", _BYTES, *words), _LONGS)


@operation(types.void, WIDE, types.int64, types.int64)
def store_12_bytes(builder: Any, vector: Any, low: Any, high: Any) -> None:
    """Store the first 12 bytes of each lane, each lane at its own address."""
    for lane, address in ((0, low), (4, high)):
        pair = builder.shuffle_vector(vector, vector, _indices([lane, lane + 1]))
        _store(builder, pair, address)
        last = builder.extract_element(vector, ir.Constant(I32, lane + 2))
        _store(builder, last, builder.add(address, ir.Constant(I64, 8)))


@operation(types.void, WIDE, types.int64, types.int64, types.int64)
def store_3_longs(builder: Any, vector: Any, low: Any, high: Any, step: Any) -> None:
    """Store the first three groups of 4 bytes of each lane, `step` bytes apart."""
    for lane, address in ((0, low), (4, high)):
        for k in range(3):
            value = builder.extract_element(vector, ir.Constant(I32, lane + k))
            offset = builder.mul(step, ir.Constant(I64, k))
            _store(builder, value, builder.add(address, offset))


# ---- 128 bits ----


@operation(NARROW, types.int64)
def load_narrow(builder: Any, address: Any) -> Any:
    """Load 16 bytes."""
    return _load(builder, address, _QUADS)


@operation(types.void, NARROW, types.int64)
def store_narrow(builder: Any, vector: Any, address: Any) -> None:
    """Store 16 bytes."""
    _store(builder, vector, address)


@operation(NARROW, types.int64, types.int64)
def quads(builder: Any, low: Any, high: Any) -> Any:
    """Return a vector of two int64."""
    vector = builder.insert_element(ir.Constant(_QUADS, ir.Undefined), low, ir.Constant(I32, 0))
    return builder.insert_element(vector, high, ir.Constant(I32, 1))


@operation(NARROW, NARROW, NARROW)
def exclusive_or(builder: Any, left: Any, right: Any) -> Any:
    """Return left ^ right."""
    return builder.xor(left, right)


@operation(NARROW, NARROW, NARROW, NARROW)
def fold(builder: Any, remainder: Any, factors: Any, data: Any) -> Any:
    """Return low * low ^ high * high ^ data, with products of polynomials over GF(2)."""
    low, high = (
        _call(builder, "llvm.x86.pclmulqdq", _QUADS, remainder, factors, ir.Constant(I8, halves))
        for halves in (0x00, 0x11)
    )
    return builder.xor(builder.xor(low, high), data)
