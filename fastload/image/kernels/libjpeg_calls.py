"""The calls between a kernel and the libjpeg-turbo inside Pillow's wheel.

libjpeg reports an error by calling a function that must not return. That function jumps out of libjpeg, back to the
call of `set_jump`. A warning is treated as an error.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from fastload.image.kernels import jpeg_layout as library
from fastload.image.kernels.jpeg_layout import AT
from fastload.image.kernels.memory import I32, I64, caller, function, load_i64

EXTERNALS = ("_setjmp", "longjmp")
"""The C functions that only this file calls."""


@intrinsic
def set_jump(typing_context: Any, buffer: Any) -> Any:
    """Return 0, and then 1 each time that `longjmp` returns here."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(I32, [I64])
        set_jump = cgutils.get_or_insert_function(builder.module, kind, "_setjmp")
        # Without these, LLVM keeps values in registers or stack slots that have changed at the second return.
        set_jump.attributes.add("returns_twice")
        builder.function.attributes.add("noinline")
        return builder.sext(builder.call(set_jump, [arguments[0]]), I64)

    return types.int64(types.int64), generate


_long_jump = function("longjmp", types.void, types.int64, types.int32)


def _of_libjpeg(name: str, result: Any, *arguments: Any) -> Any:
    """Return a function that calls one of libjpeg: `call(decoder, *arguments)`."""
    return caller(AT.functions + 8 * library.FUNCTIONS.index(name), result, *arguments)


create = _of_libjpeg("jpeg_CreateDecompress", None, I64, I32, I64)
memory_source = _of_libjpeg("jpeg_mem_src", None, I64, I64, I64)
read_header = _of_libjpeg("jpeg_read_header", I32, I64, I32)
has_multiple_scans = _of_libjpeg("jpeg_has_multiple_scans", I32, I64)
start = _of_libjpeg("jpeg_start_decompress", I32, I64)
crop = _of_libjpeg("jpeg_crop_scanline", None, I64, I64, I64)
skip_rows = _of_libjpeg("jpeg_skip_scanlines", I32, I64, I32)
read_rows = _of_libjpeg("jpeg_read_scanlines", I32, I64, I64, I32)
finish = _of_libjpeg("jpeg_finish_decompress", I32, I64)
destroy = _of_libjpeg("jpeg_destroy_decompress", None, I64)


# ---- what libjpeg calls ----


def jpeg_error(decompressor: int) -> int:
    """Leave libjpeg after an error (`error_exit`)."""
    _long_jump(load_i64(decompressor + library.CLIENT_DATA), 1)
    return 0


def jpeg_message(decompressor: int, level: int) -> int:
    """Leave libjpeg after a warning (`emit_message`). Ignore traces, whose level is 0 or more."""
    # The level is an int in C, so the upper half of the register is undefined.
    if level & 0x80000000:
        _long_jump(load_i64(decompressor + library.CLIENT_DATA), 1)
    return 0
