"""The kernel that decodes the box of a JPEG, with the libjpeg-turbo inside Pillow's wheel.

After an error or a warning of libjpeg it returns to `_guarded`, and Python decodes the image.

All state is in the decoder's memory (`DECODER`), so a jump loses nothing.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit, types

from fastload.image.kernels import jpeg_layout as library
from fastload.image.kernels import libjpeg_calls as libjpeg
from fastload.image.kernels.draws import draw, size_before_crop
from fastload.image.kernels.jpeg_layout import AT
from fastload.image.kernels.memory import (
    IMAGE_AT,
    IMAGE_BYTES,
    OPTIONS,
    PLAN_AT,
    add_time,
    function,
    load_i32,
    load_i64,
    load_u8,
    load_u32,
    nanoseconds,
    store_i32,
    store_i64,
)
from fastload.image.kernels.payload import read_file, read_payload
from fastload.image.kernels.resample import resample
from fastload.image.kernels.tables import DAMAGED, DONE, TOO_LARGE
from fastload.image.kernels.workspace import aligned, bytes_needed

EXTERNALS = ("memchr",)
"""The C function that only this kernel calls."""

_FIRST_RESTART, _END_OF_IMAGE = 0xD0, 0xD9  # second bytes of markers
_MOST_MEMORY = 1 << 28  # bytes that libjpeg may take for whole images; this kernel needs none
_MARGIN = 2  # columns
_LEAST_COLUMNS = 16

_find = function("memchr", types.int64, types.int64, types.int32, types.int64)


# ---- one image ----


@njit(**OPTIONS)
def _least(side: int, result: int, box: int) -> int:
    """Return the length to which a side of the image may shrink. See `Plan.least`."""
    return min(side, math.ceil(side * result / box))


@njit(**OPTIONS)
def _shrunk(side: int, eighths: int) -> int:
    """Return the length of a side of the image after decoding at a scale."""
    return (side * eighths + 7) // 8


@njit(**OPTIONS)
def _eighths(image: int, plan: int) -> int:
    """Return the scale of decoding, in eighths, that simplejpeg takes with min_factor=2.

    It asks for the size at the smallest of 1/8, 1/4, 3/8 and 1/2 that leaves enough pixels. TurboJPEG then takes the
    largest scale that gives at most this size. For images of a few pixels, that is another scale.
    """
    height, width = load_i64(image + IMAGE_AT.height), load_i64(image + IMAGE_AT.width)
    least_height, least_width = height, width
    if load_i64(plan + PLAN_AT.scaled):
        result_height, result_width = size_before_crop(image, plan)
        least_height = _least(height, result_height, load_i64(image + IMAGE_AT.box_height))
        least_width = _least(width, result_width, load_i64(image + IMAGE_AT.box_width))
    smallest = 1
    while smallest < 8 and (
        _shrunk(height, smallest) < least_height or _shrunk(width, smallest) < least_width
    ):
        smallest = smallest + 1 if smallest < 4 else 8
    largest = 8
    while _shrunk(height, largest) > _shrunk(height, smallest) or _shrunk(width, largest) > _shrunk(
        width, smallest
    ):
        largest -= 1
    return largest


@njit(**OPTIONS)
def _scaled(first: int, count: int, decoded: int, whole: int) -> tuple[int, int]:
    """Return the begin and the length of a side of the box in the decoded pixels. See `scaled` in regions.py."""
    if decoded == whole:
        return first, count
    begin = int(np.rint(first * decoded / whole))
    return begin, max(1, int(np.rint((first + count) * decoded / whole)) - begin)


@njit(**OPTIONS)
def _is_plain(decompressor: int) -> bool:
    """Return whether the image is of the kind that this kernel was tested with.

    That is: 8 bits, sequential, Huffman-coded, one scan, and grey, YCbCr or RGB. Only the first colour may have more
    samples than the others: twice as many in one direction or in both, or four times as many in one.
    """
    colours = load_i32(decompressor + library.COMPONENTS)
    space = load_i32(decompressor + library.COLOUR_SPACE)
    if colours == 1:
        if space != library.GREY:
            return False
    elif colours != 3 or (space != library.YCBCR and space != library.RGB):
        return False
    if (
        load_i32(decompressor + library.PRECISION) != 8
        or load_i32(decompressor + library.PROGRESSIVE)
        or load_i32(decompressor + library.ARITHMETIC)
        # A lossless image has other values here.
        or load_i32(decompressor + library.SPECTRAL_START) != 0
        or load_i32(decompressor + library.SPECTRAL_END) != 63
    ):
        return False
    component = load_i64(decompressor + library.COMPONENT_TABLE)
    across = load_i32(component + library.HORIZONTAL_SAMPLING)
    down = load_i32(component + library.VERTICAL_SAMPLING)
    if colours == 1:
        return across == 1 and down == 1
    for _ in range(2):
        component += library.COMPONENT_BYTES
        if (
            load_i32(component + library.HORIZONTAL_SAMPLING) != 1
            or load_i32(component + library.VERTICAL_SAMPLING) != 1
        ):
            return False
    if across == 1 or down == 1:
        return across + down in (2, 3, 5)
    return across == 2 and down == 2


@njit(**OPTIONS)
def _is_complete(scan: int, end: int, restarts: bool) -> bool:
    """Return whether the scan ends with the image, and has no markers inside but those of restarts, in their order.

    So an image that is cut off below the box is noticed too. This takes a few microseconds.
    """
    restart = 0
    while end - scan >= 2:
        marker = _find(scan, 0xFF, end - scan - 1)
        if marker == 0:
            return False
        code = load_u8(marker + 1)
        if code == _END_OF_IMAGE:
            return True
        if code != 0:
            if not restarts or code != _FIRST_RESTART + restart:
                return False
            restart = (restart + 1) & 7
        scan = marker + 2
    return False


@njit(**OPTIONS)
def _make(decoder: int) -> None:
    """Initialise the decompressor."""
    decompressor = decoder + AT.decompressor
    store_i64(decompressor + library.ERROR_MANAGER, decoder + AT.error_manager)
    store_i64(decompressor + library.CLIENT_DATA, decoder + AT.jump_buffer)
    libjpeg.create(
        decoder,
        decompressor,
        library.LIBRARY_VERSION,
        library.DECOMPRESSOR_BYTES,
    )
    manager = load_i64(decompressor + library.MEMORY_MANAGER)
    store_i64(manager + library.MOST_MEMORY, _MOST_MEMORY)


@njit(**OPTIONS)
def _header(image: int, plan: int, decoder: int, payload: int) -> int:
    """Read the header, and draw the box. Return a state."""
    decompressor = decoder + AT.decompressor
    length = load_i64(image + IMAGE_AT.length)
    if length < 1:
        return DAMAGED
    libjpeg.memory_source(decoder, decompressor, payload, length)
    libjpeg.read_header(decoder, decompressor, 1)
    store_i64(image + IMAGE_AT.height, load_u32(decompressor + library.IMAGE_HEIGHT))
    store_i64(image + IMAGE_AT.width, load_u32(decompressor + library.IMAGE_WIDTH))
    if not _is_plain(decompressor) or libjpeg.has_multiple_scans(decoder, decompressor):
        return DAMAGED
    scan = load_i64(load_i64(decompressor + library.SOURCE_MANAGER) + library.NEXT_BYTE)
    restarts = load_u32(decompressor + library.RESTART_INTERVAL) != 0
    if not _is_complete(scan, payload + length, restarts):
        return DAMAGED
    return draw(image, plan)


@njit(**OPTIONS)
def _begin(decoder: int, eighths: int) -> None:
    """Set the options that simplejpeg sets, and start to decompress."""
    decompressor = decoder + AT.decompressor
    store_i32(decompressor + library.OUTPUT_COLOUR_SPACE, library.INTERLEAVED_RGB)
    store_i32(decompressor + library.SCALE_NUMERATOR, eighths)
    store_i32(decompressor + library.SCALE_DENOMINATOR, 8)
    store_i32(decompressor + library.DCT_METHOD, library.ACCURATE_DCT)
    store_i32(decompressor + library.FANCY_UPSAMPLING, 1)
    libjpeg.start(decoder, decompressor)


@njit(**OPTIONS)
def _crop_columns(decoder: int, left: int, count: int) -> None:
    """Let libjpeg decode only `count` columns from `left` on, and those that their colours depend on.

    Colours are interpolated from the next sample on either side, two columns away. At the border of the decoded columns
    libjpeg uses another rule. It moves the left border to that of a block, and stores the borders in crop_left and
    crop_width.
    """
    decompressor = decoder + AT.decompressor
    width = load_u32(decompressor + library.OUTPUT_WIDTH)
    first, last = max(0, left - _MARGIN), min(width, left + count + _MARGIN)
    # Of too few columns, libjpeg would not interpolate the colours.
    if last - first < _LEAST_COLUMNS:
        last = min(width, first + _LEAST_COLUMNS)
        first = max(0, last - _LEAST_COLUMNS)
    store_i32(decoder + AT.crop_left, first)
    store_i32(decoder + AT.crop_width, last - first)
    libjpeg.crop(
        decoder,
        decompressor,
        decoder + AT.crop_left,
        decoder + AT.crop_width,
    )


@njit(**OPTIONS)
def _decode_rows(decoder: int, first: int, count: int, pixels: int, stride: int) -> bool:
    """Decode `count` rows to `pixels`. Return False if libjpeg gives fewer."""
    decompressor = decoder + AT.decompressor
    if first:
        libjpeg.skip_rows(decoder, decompressor, first)
    row = 0
    while row < count:
        asked = min(library.MOST_ROWS, count - row)
        for place in range(asked):
            store_i64(decoder + AT.row_addresses + 8 * place, pixels + (row + place) * stride)
        got = libjpeg.read_rows(decoder, decompressor, decoder + AT.row_addresses, asked)
        if got < 1:
            return False
        row += got
    if first + count == load_u32(decompressor + library.OUTPUT_HEIGHT):
        # No row is left below, so let libjpeg read the end too. It may warn of what it finds there.
        libjpeg.finish(decoder, decompressor)
    return True


@njit(**OPTIONS)
def _decode(
    image: int, plan: int, decoder: int, payload: int, pixels: int, pixels_bytes: int
) -> int:
    """Decode the box to `pixels`, and store its address and size in the decoder. Return a state."""
    decompressor = decoder + AT.decompressor
    _make(decoder)
    state = _header(image, plan, decoder, payload)
    if state != DONE:
        return state
    _begin(decoder, _eighths(image, plan))
    width = load_u32(decompressor + library.OUTPUT_WIDTH)
    height = load_u32(decompressor + library.OUTPUT_HEIGHT)
    left, box_width = _scaled(
        load_i64(image + IMAGE_AT.left),
        load_i64(image + IMAGE_AT.box_width),
        width,
        load_i64(image + IMAGE_AT.width),
    )
    top, box_height = _scaled(
        load_i64(image + IMAGE_AT.top),
        load_i64(image + IMAGE_AT.box_height),
        height,
        load_i64(image + IMAGE_AT.height),
    )
    if left + box_width > width or top + box_height > height:
        return DAMAGED  # never: at each scale the box has at least a row and a column
    _crop_columns(decoder, left, box_width)
    stride = 3 * load_u32(decoder + AT.crop_width)
    store_i64(decoder + AT.pixels, pixels + 3 * (left - load_u32(decoder + AT.crop_left)))
    store_i64(decoder + AT.stride, stride)
    store_i64(decoder + AT.box_height, box_height)
    store_i64(decoder + AT.box_width, box_width)
    store_i64(decoder + AT.bytes, box_height * stride)
    if box_height * stride > pixels_bytes:
        return TOO_LARGE
    return DONE if _decode_rows(decoder, top, box_height, pixels, stride) else DAMAGED


@njit(**OPTIONS)
def _guarded(
    image: int, plan: int, decoder: int, payload: int, pixels: int, pixels_bytes: int
) -> int:
    """Do as `_decode`. Return DAMAGED if libjpeg objects. Put nothing else in here, because a jump returns here."""
    if libjpeg.set_jump(decoder + AT.jump_buffer):
        return DAMAGED
    return _decode(image, plan, decoder, payload, pixels, pixels_bytes)


@njit(**OPTIONS)
def _decode_to_row(
    image: int, plan: int, payload: int, arena: int, arena_bytes: int, decoder: int
) -> int:
    """Decode a JPEG in memory, write its row and set its state. Return the bytes that are needed, or 0 if they fit."""
    began = nanoseconds()
    store_i64(decoder + AT.bytes, 0)
    state = _guarded(image, plan, decoder, payload, arena, arena_bytes)
    # libjpeg keeps its tables, and what an error leaves. Otherwise it would decode the next image by them.
    libjpeg.destroy(decoder, decoder + AT.decompressor)
    add_time(image + IMAGE_AT.decode_ns, began)
    store_i64(image + IMAGE_AT.state, state)
    taken = aligned(load_i64(decoder + AT.bytes))
    if state != DONE and not (state == TOO_LARGE and taken > 0):
        return 0
    # While it is resampled, the row of IMAGE has the box of the decoded pixels.
    source = load_i64(image + IMAGE_AT.source)
    height = load_i64(image + IMAGE_AT.box_height)
    width = load_i64(image + IMAGE_AT.box_width)
    store_i64(image + IMAGE_AT.source, load_i64(decoder + AT.pixels))
    store_i64(image + IMAGE_AT.stride, load_i64(decoder + AT.stride))
    store_i64(image + IMAGE_AT.box_height, load_i64(decoder + AT.box_height))
    store_i64(image + IMAGE_AT.box_width, load_i64(decoder + AT.box_width))
    if state == DONE:
        needed = resample(image, plan, arena + taken, max(0, arena_bytes - taken))
    else:
        needed = bytes_needed(image, plan)
    store_i64(image + IMAGE_AT.source, source)
    store_i64(image + IMAGE_AT.box_height, height)
    store_i64(image + IMAGE_AT.box_width, width)
    return taken + needed if needed > 0 else 0


# ---- entry points ----


@njit(**OPTIONS)
def _run_one(image: int, plan: int, arena: int, arena_bytes: int, decoder: int, named: int) -> int:
    """Read, decode and resample an image, and set its state. Return the bytes that are needed, or 0 if they fit."""
    payload, needed, taken = arena, 0, 0
    if named:
        needed = read_file(image, arena, arena_bytes)
        taken = load_i64(image + IMAGE_AT.length)
    else:
        length = load_i64(image + IMAGE_AT.length)
        taken = length if load_i64(image + IMAGE_AT.file) >= 0 else 0
        if taken > arena_bytes:
            store_i64(image + IMAGE_AT.state, TOO_LARGE)
            return taken
        payload = read_payload(image, load_i64(image + IMAGE_AT.source), length, arena)
    if load_i64(image + IMAGE_AT.state) != DONE:
        return needed
    taken = aligned(taken)
    rest = max(0, arena_bytes - taken)
    needed = _decode_to_row(image, plan, payload, arena + taken, rest, decoder)
    return taken + needed if needed > 0 else 0


@njit(**OPTIONS)
def _run(
    images: int, count: int, plan: int, arena: int, arena_bytes: int, decoder: int, named: int
) -> int:
    needed = 0
    for place in range(count):
        image = images + place * IMAGE_BYTES
        if load_i64(image + IMAGE_AT.state) == DONE:
            needed = max(needed, _run_one(image, plan, arena, arena_bytes, decoder, named))
    return needed


def jpeg_run(images: int, count: int, plan: int, arena: int, arena_bytes: int, decoder: int) -> int:
    """Decode the boxes of JPEGs in memory or in open files, and write the rows of those with state DONE.

    Return the bytes of the arena that the largest image would have needed, or 0 if all fitted.
    """
    return _run(images, count, plan, arena, arena_bytes, decoder, 0)


def file_run(images: int, count: int, plan: int, arena: int, arena_bytes: int, decoder: int) -> int:
    """Do as `jpeg_run`, with whole files: `source` is the address of a name that ends with a zero byte."""
    return _run(images, count, plan, arena, arena_bytes, decoder, 1)


ENTRY_POINTS = {
    "jpeg_run": (jpeg_run, 6),
    "file_run": (file_run, 6),
    "jpeg_error": (libjpeg.jpeg_error, 1),
    "jpeg_message": (libjpeg.jpeg_message, 2),
}
