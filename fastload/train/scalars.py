"""Figures of a run over its steps, for TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastload.measure.run_stats import less
from fastload.telemetry import Stats


def add_scalars(writer: Any, step: int, values: Mapping[str, float]) -> None:
    """Write the figures of a step, which counts from 1, with a `SummaryWriter` of `torch.utils.tensorboard`.

    Names are paths, such as `rank0/images_per_s` and `train/loss`. TensorBoard groups them by the first part.
    """
    for name, value in values.items():
        writer.add_scalar(name, value, step)


def loader_scalars(now: Stats, before: Stats | None = None) -> dict[str, float]:
    """Return the work of a loader between two snapshots of one epoch, or since the epoch began if `before` is None.

        loader/samples_per_s     samples delivered to the loop
        loader/wait_share        0 to 1: the loop's time in which it waited for a batch
        loader/queue_occupancy   0 to 1: mean share of the batches in flight that were ready, over the epoch so far
        stage_s/NAME             thread-seconds in each stage: sampler, sample, read, decode, collate, pin ...

    A snapshot of another epoch counts as None. The result is empty if no time has passed.
    """
    since = less(now, before) if before is not None and before.epoch == now.epoch else now
    if since.elapsed_s <= 0.0:
        return {}
    return {
        "loader/samples_per_s": since.samples / since.elapsed_s,
        "loader/wait_share": min(1.0, since.consumer_wait_s / since.elapsed_s),
        "loader/queue_occupancy": now.occupancy,
        **{f"stage_s/{name}": stage.seconds for name, stage in since.stages.items()},
    }
