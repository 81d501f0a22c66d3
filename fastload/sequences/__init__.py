"""Datasets of tokens. Each is a plain map-style dataset, and works with any DataLoader."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastload.sequences.packed import Packed
    from fastload.sequences.windows import TokenWindows

__all__ = ["Packed", "TokenWindows"]


def __getattr__(name: str) -> Any:
    if name == "Packed":
        from fastload.sequences.packed import Packed

        return Packed
    if name == "TokenWindows":
        from fastload.sequences.windows import TokenWindows

        return TokenWindows
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
