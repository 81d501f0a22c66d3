"""Copies of batches in pinned memory, from which an accelerator fetches them while the loop works."""

from __future__ import annotations

import warnings
from time import perf_counter

import torch

from fastload._kit.torch_private import pin
from fastload.memory.batch import Batch
from fastload.telemetry import span

COLLECTOR, LOOP = -2, -1
"""The indices of a batch's recorders that belong to no worker."""


def can_pin(device: str, *, stacklevel: int) -> bool:
    """Return whether an accelerator needs pinned memory; if not, warn in torch's words."""
    if device:
        warnings.warn(
            "pin_memory_device is deprecated, the current accelerator will be used as the device,"
            f"ignore pin_memory_device='{device}'.",
            stacklevel=stacklevel + 1,
        )
    accelerator = (
        torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    )
    if accelerator is None:
        warnings.warn(
            "'pin_memory' argument is set as true but no accelerator is found, "
            "then device pinned memory won't be used.",
            stacklevel=stacklevel + 1,
        )
    elif accelerator.type == "mps":
        warnings.warn(
            "'pin_memory' argument is set as true but not supported on MPS now, device pinned memory won't be used.",
            stacklevel=stacklevel + 1,
        )
    return accelerator is not None and accelerator.type != "mps"


def pin_batch(batch: Batch) -> None:
    """Replace the data of `batch` by a pinned copy, or by the error that pinning raised. Skip a failed batch."""
    if batch.error is not None:
        return
    started = perf_counter()
    try:
        with span("pin"):
            batch.data = pin(batch.data)
    except Exception as exc:
        batch.data, batch.error, batch.where = None, exc, f"{batch}; stage: pin"
    batch.recorders[COLLECTOR].add("pin", perf_counter() - started)
