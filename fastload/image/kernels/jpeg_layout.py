"""Where things lie in a decoder's memory: what `libjpeg.py` fills, and the kernel in `jpeg.py` reads. No Numba here."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import numpy as np

LIBRARY_VERSION = 62  # JPEG_LIB_VERSION of the ABI below

FUNCTIONS = (
    "jpeg_CreateDecompress",
    "jpeg_mem_src",
    "jpeg_read_header",
    "jpeg_has_multiple_scans",
    "jpeg_start_decompress",
    "jpeg_crop_scanline",
    "jpeg_skip_scanlines",
    "jpeg_read_scanlines",
    "jpeg_finish_decompress",
    "jpeg_destroy_decompress",
)
"""What the kernel calls, in the order of the field `functions`."""

MOST_ROWS = 4
"""The rows asked for at once. libjpeg gives one row group a call, which has four at most."""

DECODER = np.dtype(
    [
        ("functions", np.int64, len(FUNCTIONS)),  # addresses
        # What the decoder says of the pixels of a box.
        ("pixels", np.int64),  # address of the first one
        ("stride", np.int64),
        ("box_height", np.int64),
        ("box_width", np.int64),
        ("bytes", np.int64),  # what its rows take
        # What libjpeg is given and writes to.
        ("row_addresses", np.int64, MOST_ROWS),
        ("crop_left", np.uint32),
        ("crop_width", np.uint32),
        ("jump_buffer", np.uint8, 512),  # of _setjmp: glibc takes 200 bytes on x86-64
        ("error_manager", np.uint8, 256),  # struct jpeg_error_mgr: 168 bytes
        ("decompressor", np.uint8, 640),  # struct jpeg_decompress_struct: 632 bytes
    ]
)


def _offsets(dtype: np.dtype[Any]) -> Any:
    """Return where the fields of `dtype` lie, bytes, as a named tuple: Numba knows none of a dict's items."""
    fields: Any = dtype.fields
    return namedtuple("Offsets", fields)(*(field[1] for field in fields.values()))


AT = _offsets(DECODER)
assert AT.jump_buffer % 16 == 0

# struct jpeg_decompress_struct of ABI 62 where int has 4 and long 8 bytes. jpeg_CreateDecompress checks its size.
DECOMPRESSOR_BYTES = 632
ERROR_MANAGER = 0
CLIENT_DATA = 24
MEMORY_MANAGER = 8
SOURCE_MANAGER = 40
IMAGE_WIDTH = 48
IMAGE_HEIGHT = 52
COMPONENTS = 56
COLOUR_SPACE = 60
OUTPUT_COLOUR_SPACE = 64
SCALE_NUMERATOR = 68
SCALE_DENOMINATOR = 72
DCT_METHOD = 96
FANCY_UPSAMPLING = 100
OUTPUT_WIDTH = 136
OUTPUT_HEIGHT = 140
PRECISION = 296
COMPONENT_TABLE = 304
PROGRESSIVE = 312
ARITHMETIC = 316
RESTART_INTERVAL = 368
SPECTRAL_START = 524
SPECTRAL_END = 528

# jpeg_component_info.
COMPONENT_BYTES = 96
HORIZONTAL_SAMPLING = 8
VERTICAL_SAMPLING = 12

# struct jpeg_source_mgr.
NEXT_BYTE = 0

# struct jpeg_memory_mgr.
MOST_MEMORY = 88

# struct jpeg_error_mgr.
ERROR_EXIT = 0
EMIT_MESSAGE = 8

# J_COLOR_SPACE, J_DCT_METHOD.
GREY, RGB, YCBCR, INTERLEAVED_RGB = 1, 2, 3, 6
ACCURATE_DCT = 0
