"""Copies of batches in pinned memory, from which an accelerator fetches them while the loop works."""

from __future__ import annotations

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
    return settings.pin_memory and _accelerator() not in (None, "mps")


def _accelerator() -> str | None:
    found = torch.accelerator.current_accelerator(check_available=True)
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
