"""Packed sets: many records in few Arrow files. They need the extra `arrow`; images need `images` too.

`format` knows the bytes on disk. `reader` is the dataset. `writer` writes all sets. `sources` are the inputs of
packing. `packing`, `verifying` and `staging` are the commands.
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
