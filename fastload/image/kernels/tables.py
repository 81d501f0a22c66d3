"""The tables that Python fills and the kernels read: a row for each image, and a row for the plan.

Every number has 8 bytes. kernels.h has the same fields in the same order.
"""

from __future__ import annotations

import numpy as np

IMAGE = np.dtype(
    [
        ("key", np.uint64),  # of the sample's random stream
        ("file", np.int64),  # an open file, to be read at `source`; -1: `source` is an address
        ("source", np.int64),  # where the payload begins
        ("length", np.int64),  # bytes of the payload
        ("checksum", np.int64),  # CRC-32 that the payload must have; -1: do not check it
        ("height", np.int64),  # of the image, in pixels; a decoder sets it
        ("width", np.int64),
        ("top", np.int64),  # the box in the image, set by the draw
        ("left", np.int64),
        ("box_height", np.int64),
        ("box_width", np.int64),
        ("flip", np.int64),  # 0 or 1
        ("row", np.int64),  # address of the first element of the result
        ("state", np.int64),  # one of the states below
        ("read_ns", np.int64),  # the time of each stage
        ("decode_ns", np.int64),
        ("transform_ns", np.int64),
    ]
)

PLAN = np.dtype(
    [
        ("kind", np.int64),  # one of the kinds below
        # Size of the result, in pixels.
        ("height", np.int64),
        ("width", np.int64),
        # RandomResizedCrop: float32 values, as doubles. A draw is `base + unit * span`, rounded once.
        ("area_base", np.float64),
        ("area_span", np.float64),
        ("log_ratio_base", np.float64),
        ("log_ratio_span", np.float64),
        ("ratio_low", np.float64),  # as given, in double precision
        ("ratio_high", np.float64),
        ("flip", np.float64),  # the probability, rounded to float32; 0: draw nothing for it
        # ResizeCenterCrop: the size before the crop. With resize_width -1, resize_height is that of the shorter side.
        ("resize_height", np.int64),
        ("resize_width", np.int64),
        ("scaled", np.int64),  # 1: a decoder may decode at 1/2, 1/4, 1/8
        # Distances in the result, in elements: from a colour, a row, a pixel to the next.
        ("colour_step", np.int64),
        ("row_step", np.int64),
        ("pixel_step", np.int64),
        ("floats", np.int64),  # 1: the results are float32, `byte * factor - shift`, 0: uint8
        ("factors", np.float64, (3,)),  # float32 values, as doubles, of red, green and blue
        ("shifts", np.float64, (3,)),
        ("most_pixels", np.int64),  # a larger image is refused; 0: no limit
    ]
)

RANDOM_RESIZED_CROP, RESIZE, RESIZE_CENTER_CROP = range(3)

# States. If it is not DONE, the content of the row is undefined, and Python reads the sample again.
DONE = 0
UNDECIDED = 1  # the last bit of exp decides the length of a side of the box
UNREADABLE = 2  # a read failed, or the file ends too soon
DAMAGED = 3  # a wrong checksum, or an image that the decoder refuses or warns of
TOO_LARGE = 4  # more than `most_pixels`, or than the arena holds
