"""Packed sets: many records in few Arrow files. They need the extra `arrow`; images need `images` too.

`format` knows the bytes on disk. `reader` is the dataset. `writer` writes all sets. `sources` are the inputs of
`packing`. `fastload.store` verifies, describes and copies sets of both kinds.
"""

from typing import TYPE_CHECKING, Any

from fastload.errors import needs

try:
    import pyarrow  # noqa: F401
except ModuleNotFoundError as error:
    raise needs("a packed set", "pyarrow", "arrow", error) from error

if TYPE_CHECKING:
    from fastload.datasets.packed.reader import PackedDataset
    from fastload.datasets.packed.writer import PackedWriter

__all__ = ["PackedDataset", "PackedWriter"]


def __getattr__(name: str) -> Any:
    """Load a public name at its first use: `fastload set inspect` needs no torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from fastload.datasets.packed import reader, writer

    return getattr(reader if name == "PackedDataset" else writer, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
