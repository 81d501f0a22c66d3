"""The layout of a decoder's memory, which `libjpeg.py` fills and the kernel in `jpeg.py` reads. It needs no Numba."""

from __future__ import annotations

import numpy as np

from fastload.image.kernels.tables import offsets

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
"""The functions that the kernel calls, in the order of the field `functions`."""

MOST_ROWS = 4
"""Rows to ask for at once. libjpeg gives one row group per call, which has at most four."""

DECODER = np.dtype(
    [
        ("functions", np.int64, len(FUNCTIONS)),  # addresses
        # The pixels of a box, as the kernel has decoded them.
        ("pixels", np.int64),  # address of the first one
        ("stride", np.int64),
        ("box_height", np.int64),
        ("box_width", np.int64),
        ("bytes", np.int64),  # of its rows
        # Memory that libjpeg reads and writes.
        ("row_addresses", np.int64, MOST_ROWS),
        ("crop_left", np.uint32),
        ("crop_width", np.uint32),
        ("jump_buffer", np.uint8, 512),  # of _setjmp: glibc takes 200 bytes on x86-64
        ("error_manager", np.uint8, 256),  # struct jpeg_error_mgr: 168 bytes
        ("decompressor", np.uint8, 640),  # struct jpeg_decompress_struct: 632 bytes
    ]
)
AT = offsets(DECODER)
assert AT.jump_buffer % 16 == 0

# struct jpeg_decompress_struct of ABI 62, if int has 4 bytes and long 8. jpeg_CreateDecompress checks its size.
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
