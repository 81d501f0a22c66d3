"""Packed sets: many records in few Arrow files. Needs the extra `arrow`; images need `images` too.

`format` is all that is known of the bytes on disk, `reader` the dataset, `writer` the only way that
a set comes into being, `sources` what is packed; `packing`, `verifying` and `staging` are the commands.
"""

try:
    import pyarrow  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "fastload reads and writes packed sets with pyarrow, which is not installed: "
        'pip install "fastload[arrow]"',
        name=error.name,
    ) from error

from fastload.datasets.packed.reader import PackedDataset
from fastload.datasets.packed.writer import PackedWriter

__all__ = ["PackedDataset", "PackedWriter"]
