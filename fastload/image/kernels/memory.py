"""Loads and stores at integer addresses, and calls of C functions, for kernels that hold no Python object.

An address is an int64. Nothing checks it, so it must follow from sizes that were checked.
"""

from __future__ import annotations

from inspect import Parameter, Signature
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from fastload.image.kernels.tables import IMAGE, PLAN, offsets

OPTIONS = {"nogil": True, "error_model": "numpy", "fastmath": False, "boundscheck": False}
"""Options of every compiled function: no kernel raises, and floats are rounded as written."""

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
F32, F64 = ir.FloatType(), ir.DoubleType()


def operation(result: Any, *arguments: Any) -> Any:
    """Decorate `body(builder, *values)`, which builds the LLVM IR of a function of these Numba types.

    `body` returns the result's value, or None if `result` is void.
    """

    def decorate(body: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            value = body(builder, *values)
            return context.get_dummy_value() if value is None else value

        def define(typing_context: Any, *given: Any) -> Any:
            return result(*arguments), generate

        # Numba asks for the number of parameters.
        names = ["typing_context", *(f"argument{k}" for k in range(len(arguments)))]
        parameters = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in names]
        define.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        define.__name__ = body.__name__
        define.__doc__ = body.__doc__
        return intrinsic(define)

    return decorate


# ---- loads and stores ----


def _load(stored: Any, loaded: Any, *, signed: bool = False) -> Any:
    """Return a function that loads a value of type `stored`, and returns it as a `loaded`."""

    @operation(loaded, types.int64)
    def load(builder: Any, address: Any) -> Any:
        value = builder.load(builder.inttoptr(address, stored.as_pointer()))
        value.align = 1
        if stored is F32:
            return builder.fpext(value, F64)
        if stored in (I64, F64):
            return value
        return builder.sext(value, I64) if signed else builder.zext(value, I64)

    return load


def _store(stored: Any, given: Any) -> Any:
    """Return a function that stores a value of type `given` as a `stored`."""

    @operation(types.void, types.int64, given)
    def store(builder: Any, address: Any, value: Any) -> None:
        if stored is F32:
            value = builder.fptrunc(value, F32)
        elif stored not in (I64, F64):
            value = builder.trunc(value, stored)
        written = builder.store(value, builder.inttoptr(address, stored.as_pointer()))
        written.align = 1

    return store


# In the kernels all integers are int64 and all floats float64, whatever their types in memory.
load_u8 = _load(I8, types.int64)
load_u32 = _load(I32, types.int64)
load_i32 = _load(I32, types.int64, signed=True)
load_i64 = _load(I64, types.int64)
load_f32 = _load(F32, types.float64)
load_f64 = _load(F64, types.float64)

store_i16 = _store(I16, types.int64)
store_i32 = _store(I32, types.int64)
store_i64 = _store(I64, types.int64)
store_f32 = _store(F32, types.float64)
store_f64 = _store(F64, types.float64)


# ---- rows of the tables ----

IMAGE_BYTES = IMAGE.itemsize
IMAGE_AT, PLAN_AT = offsets(IMAGE), offsets(PLAN)
"""Offsets of the fields in a row of IMAGE, and of PLAN: `load_i64(image + IMAGE_AT.height)`."""


# ---- C functions ----


def function(name: str, result: Any, *arguments: Any) -> Any:
    """Declare a C function that the linker finds by its name. Pointers are int64."""
    return types.ExternalFunction(name, result(*arguments))


EXTERNALS = ("__errno_location", "clock_gettime", "exp", "memcpy", "memset", "pread")
"""The C functions that these kernels call, by name or because LLVM makes calls of their operations."""

_pread = function("pread", types.int64, types.int32, types.int64, types.int64, types.int64)
_errno_location = function("__errno_location", types.int64)
_clock_gettime = function("clock_gettime", types.int32, types.int32, types.int64)

_EINTR = 4
_CLOCK_MONOTONIC = 1


@operation(types.void, types.int64, types.int64, types.int64)
def copy(builder: Any, to: Any, source: Any, count: Any) -> None:
    """Copy bytes that do not overlap: `copy(to, source, count)`."""
    pointer = I8.as_pointer()
    call = builder.module.declare_intrinsic("llvm.memcpy", [pointer, pointer, I64])
    ends = builder.inttoptr(to, pointer), builder.inttoptr(source, pointer)
    builder.call(call, [*ends, count, ir.Constant(ir.IntType(1), 0)])


@operation(types.void, types.int64, types.int64, types.int64)
def fill(builder: Any, to: Any, byte: Any, count: Any) -> None:
    """Set bytes: `fill(to, byte, count)`."""
    pointer = I8.as_pointer()
    call = builder.module.declare_intrinsic("llvm.memset", [pointer, I64])
    operands = [builder.inttoptr(to, pointer), builder.trunc(byte, I8), count]
    builder.call(call, [*operands, ir.Constant(ir.IntType(1), 0)])


@intrinsic(prefer_literal=True)
def stack(typing_context: Any, count: Any) -> Any:
    """Return the address of `count` bytes on the caller's stack, aligned to 16. `count` is a literal."""
    size = count.literal_value

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = cgutils.alloca_once(builder, ir.ArrayType(I64, (size + 7) // 8))
        place.align = 16
        return builder.ptrtoint(place, I64)

    return types.int64(count), generate


@njit(**OPTIONS)
def nanoseconds() -> int:
    """Return the time of the monotonic clock."""
    time = stack(16)
    _clock_gettime(_CLOCK_MONOTONIC, time)
    return load_i64(time) * 1_000_000_000 + load_i64(time + 8)


@njit(**OPTIONS)
def read_all(file: int, to: int, count: int, offset: int) -> bool:
    """Read `count` bytes of an open file from `offset` on. Return False if it has fewer, or cannot be read."""
    done = 0
    while done < count:
        got = _pread(file, to + done, count - done, offset + done)
        if got > 0:
            done += got
        elif got == 0 or load_i32(_errno_location()) != _EINTR:
            return False
    return True


@njit(**OPTIONS)
def add_time(field: int, began: int) -> None:
    """Add the nanoseconds since `began` to the number at `field`."""
    store_i64(field, load_i64(field) + nanoseconds() - began)


def caller(offset: int, result: Any, *arguments: Any) -> Any:
    """Return a function that calls the C function whose address is at `table + offset`: `call(table, *arguments)`.

    `result` and `arguments` are LLVM types: I32 for int, I64 for size_t and pointers, None for void. In the kernels all
    are int64, and an int result keeps its sign.
    """
    returns = ir.VoidType() if result is None else result
    kind = types.void if result is None else types.int64

    @operation(kind, types.int64, *[types.int64] * len(arguments))
    def call(builder: Any, table: Any, *values: Any) -> Any:
        place = builder.add(table, ir.Constant(I64, offset))
        address = builder.load(builder.inttoptr(place, I64.as_pointer()))
        operands = [
            builder.trunc(value, type_) if type_.width < 64 else value
            for value, type_ in zip(values, arguments, strict=True)
        ]
        pointer = ir.FunctionType(returns, arguments).as_pointer()
        value = builder.call(builder.inttoptr(address, pointer), operands)
        if result is None:
            return None
        return builder.sext(value, I64) if result.width < 64 else value

    return call
