"""Gradients averaged by hand, in buckets: what DistributedDataParallel does, for loops without it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

BUCKET_BYTES = 25 * 2**20  # as in DistributedDataParallel


def average_gradients(
    parameters: Iterable[torch.Tensor] | torch.nn.Module,
    *,
    comm: Any = None,
    bucket_bytes: int = BUCKET_BYTES,
) -> None:
    """Replace the gradient of each parameter by its mean over all ranks. All ranks call it, after `backward()`.

    Args:
        parameters: or a module, whose parameters they are. They have the same shapes and order on all ranks. One whose
            gradient is None on all ranks is left out.
        comm: an mpi4py communicator, such as `MPI.COMM_WORLD`, for gradients in the processor's memory; None: torch's
            default process group.
        bucket_bytes: gradients are sent together until they have this size. Memory: one bucket.

    The mean is the sum over the number of ranks, so it is that of the global batch if all ranks have equal batches.
    """
    if isinstance(parameters, torch.nn.Module):
        parameters = parameters.parameters()
    size = dist.get_world_size() if comm is None else comm.Get_size()
    if size == 1:
        return
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    for bucket in _buckets(gradients, bucket_bytes):
        flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
        if comm is None:
            dist.all_reduce(flat)
        else:
            from mpi4py import MPI

            comm.Allreduce(MPI.IN_PLACE, flat.numpy())
        flat /= size
        pieces = torch.split(flat, [gradient.numel() for gradient in bucket])
        for gradient, piece in zip(bucket, pieces, strict=True):
            gradient.copy_(piece.view_as(gradient))


def _buckets(gradients: list[torch.Tensor], size: int) -> Iterator[list[torch.Tensor]]:
    """Yield neighbours of one dtype and device, of about `size` bytes."""
    bucket: list[torch.Tensor] = []
    held = 0
    for gradient in gradients:
        alike = bucket and (bucket[0].dtype, bucket[0].device) == (gradient.dtype, gradient.device)
        if bucket and (not alike or held + gradient.nbytes > size):
            yield bucket
            bucket, held = [], 0
        bucket.append(gradient)
        held += gradient.nbytes
    if bucket:
        yield bucket
