"""The tables that Python fills and the kernels read: one row a picture, one row for the plan.

Every field has 8 bytes, so that a kernel finds it at `address + OFFSET`.
"""

from __future__ import annotations

import numpy as np

PICTURE = np.dtype(
    [
        ("key", np.uint64),  # of the sample's random stream
        ("file", np.int64),  # an open file, to be read at `source`; -1: `source` is an address
        ("source", np.int64),  # where the payload begins
        ("length", np.int64),  # bytes of the payload
        ("checksum", np.int64),  # CRC-32 that the payload must have; -1: not to be checked
        ("height", np.int64),  # of the picture, pixels; a decoder fills it in
        ("width", np.int64),
        ("top", np.int64),  # the box in the picture, filled in by the draw
        ("left", np.int64),
        ("box_height", np.int64),
        ("box_width", np.int64),
        ("flip", np.int64),  # 0 or 1
        ("stride", np.int64),  # bytes from one row of decoded pixels to the next
        ("row", np.int64),  # address of the first element of the result
        ("state", np.int64),  # one of the states below
        ("read_ns", np.int64),  # what each stage took
        ("decode_ns", np.int64),
        ("transform_ns", np.int64),
    ]
)

PLAN = np.dtype(
    [
        ("kind", np.int64),  # one of the kinds below
        # The result, pixels.
        ("height", np.int64),
        ("width", np.int64),
        # RandomResizedCrop: float32 values, as doubles. A draw is `base + unit * span`.
        ("area_base", np.float64),
        ("area_span", np.float64),
        ("log_ratio_base", np.float64),
        ("log_ratio_span", np.float64),
        ("ratio_low", np.float64),  # as given, in double precision
        ("ratio_high", np.float64),
        ("flip", np.float64),  # the probability, rounded to float32; 0: nothing is drawn for it
        ("fused", np.int64),  # 1: torch rounds `unit * span + base` once, 0: after each step
        # ResizeCenterCrop: the size before the crop. With resize_width -1, resize_height is that of the shorter side.
        ("resize_height", np.int64),
        ("resize_width", np.int64),
        ("scaled", np.int64),  # 1: a decoder may decode at 1/2, 3/8, 1/4, 1/8
        # Distances in the result, elements: from one colour, row, pixel to the next.
        ("colour_step", np.int64),
        ("row_step", np.int64),
        ("pixel_step", np.int64),
        # Address of float32[3, 256], what becomes of a pixel; 0: the results are uint8.
        ("levels", np.int64),
        ("most_pixels", np.int64),  # a larger picture is refused; 0: no limit
    ]
)

RANDOM_RESIZED_CROP, RESIZE, RESIZE_CENTER_CROP = range(3)

# States. All but DONE: the row has undefined contents, and the sample is read again in Python.
DONE = 0
UNDECIDED = 1  # the last bit of exp decides on a side of the box
UNREADABLE = 2  # a read failed, or the file ends too soon
DAMAGED = 3  # another checksum, or nothing that the decoder takes without a word
TOO_LARGE = 4  # beyond `most_pixels`, or of what the arena holds
