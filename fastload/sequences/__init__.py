"""Orders and datasets for training on sequences.

`Mixture` mixes datasets by weight. Each order is a pure function of its arguments, the epoch and the step. So every rank
computes the same plan, and a loader resumes it exactly.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastload.sequences.mixture import Mixture

__all__ = ["Mixture"]


def __getattr__(name: str) -> Any:
    if name == "Mixture":
        from fastload.sequences.mixture import Mixture

        return Mixture
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
