"""Orders and datasets for training on sequences.

`Mixture` mixes datasets by weight. `TokenBatchSampler` makes batches by a budget of tokens, frames or pixels, from what
`lengths_of` finds. `Packed` packs samples into rows, and `TokenWindows` cuts a long stream into windows. Each is a pure
function of its arguments, the epoch and the step. So every rank has the same plan, and a loader resumes it exactly.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastload.sequences.lengths import lengths_of
    from fastload.sequences.mixture import Mixture
    from fastload.sequences.packed import Packed
    from fastload.sequences.token_batches import TokenBatchSampler
    from fastload.sequences.windows import TokenWindows

__all__ = ["Mixture", "Packed", "TokenBatchSampler", "TokenWindows", "lengths_of"]


def __getattr__(name: str) -> Any:
    if name == "Mixture":
        from fastload.sequences.mixture import Mixture

        return Mixture
    if name == "TokenBatchSampler":
        from fastload.sequences.token_batches import TokenBatchSampler

        return TokenBatchSampler
    if name == "Packed":
        from fastload.sequences.packed import Packed

        return Packed
    if name == "TokenWindows":
        from fastload.sequences.windows import TokenWindows

        return TokenWindows
    if name == "lengths_of":
        from fastload.sequences.lengths import lengths_of

        return lengths_of
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
