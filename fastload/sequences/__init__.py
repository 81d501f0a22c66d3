"""Orders for sequences of varying length.

`TokenBatchSampler` makes batches by a budget of tokens, frames or pixels. `lengths_of` finds the lengths.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastload.sequences.lengths import lengths_of
    from fastload.sequences.token_batches import TokenBatchSampler

__all__ = [
    "TokenBatchSampler",
    "lengths_of",
]


def __getattr__(name: str) -> Any:
    if name == "TokenBatchSampler":
        from fastload.sequences.token_batches import TokenBatchSampler

        return TokenBatchSampler
    if name == "lengths_of":
        from fastload.sequences.lengths import lengths_of

        return lengths_of
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
