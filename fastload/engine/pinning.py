"""Copies of batches in pinned memory, from which an accelerator fetches them while the loop works."""

from __future__ import annotations

import warnings
from time import perf_counter

import torch

from fastload._kit.torch_private import pin
from fastload.memory.batch import Batch
from fastload.settings import Settings
from fastload.telemetry import span

COLLECTOR, LOOP = -2, -1
"""The indices of a batch's recorders that belong to no worker."""


def pins(settings: Settings) -> bool:
    """Return whether batches are pinned: the loader asks for it, and an accelerator needs it."""
    accelerator = _accelerator() if settings.pin_memory else None
    return accelerator not in (None, "mps")


def warn_of_pinning(settings: Settings, *, stacklevel: int) -> None:
    """Warn in torch's words of a device that is ignored, and if nothing can be pinned. 1 is the caller."""
    if not settings.pin_memory:
        return
    if device := settings.pin_memory_device:
        warnings.warn(
            "pin_memory_device is deprecated, the current accelerator will be used as the device,"
            f"ignore pin_memory_device='{device}'.",
            stacklevel=stacklevel + 1,
        )
    if not pins(settings):
        why = "not supported on MPS now" if _accelerator() else "no accelerator is found"
        then = "" if _accelerator() else "then "
        warnings.warn(
            f"'pin_memory' argument is set as true but {why}, {then}device pinned memory won't be used.",
            stacklevel=stacklevel + 1,
        )


def _accelerator() -> str | None:
    if not torch.accelerator.is_available():
        return None
    found = torch.accelerator.current_accelerator()
    return None if found is None else found.type


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
