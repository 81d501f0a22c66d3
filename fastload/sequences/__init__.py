"""Orders and datasets for training on sequences.

`Mixture` mixes datasets by weight. `TokenBatchSampler` makes batches by a budget of tokens, frames or pixels, from what
`lengths_of` finds. `Packed` packs samples into rows, and `TokenWindows` cuts a long stream into windows. Each is a pure
function of its arguments, the epoch and the step. So every rank has the same plan, and a loader resumes it exactly.
"""

from fastload.sequences.lengths import lengths_of
from fastload.sequences.mixture import Mixture
from fastload.sequences.packed import Packed
from fastload.sequences.token_batches import TokenBatchSampler
from fastload.sequences.windows import TokenWindows

__all__ = ["Mixture", "Packed", "TokenBatchSampler", "TokenWindows", "lengths_of"]
