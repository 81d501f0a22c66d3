"""Averaging of gradients in buckets, for loops without DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from fastload.distributed.detect import check_world

BUCKET_BYTES = 25 * 2**20  # as in DistributedDataParallel


_NONE, _DENSE, _SPARSE = range(3)


def average_gradients(
    parameters: torch.Tensor | Iterable[torch.Tensor] | torch.nn.Module,
    *,
    comm: Any = None,
    bucket_bytes: int = BUCKET_BYTES,
) -> None:
    """Replace the gradient of each parameter by its mean over all ranks. All ranks call it, after `backward()`.

    Args:
        parameters: one parameter, several, or a module. They have the same shapes and order on all ranks. A gradient
            that is None on some ranks counts as zeros there. If it is None on all, it stays None.
        comm: an mpi4py communicator, such as `MPI.COMM_WORLD`, for gradients on the CPU. None: torch's default process
            group.
        bucket_bytes: size of a bucket of gradients that are sent together. Memory: one bucket.

    The mean is the sum divided by the number of ranks. If all ranks have equal batches, it is the mean of the global
    batch.

    Raises:
        ValueError: a gradient is sparse on one rank. All ranks raise it.
        RankError: `comm` is given, and MPI does not know the ranks that the launcher has started.

    Examples:
        >>> if fastload.distributed.init("gloo").world_size > 1:
        ...     fastload.distributed.average_gradients(model)
    """
    if comm is not None:
        from mpi4py import MPI

        check_world(MPI)
    if isinstance(parameters, torch.nn.Module):
        parameters = parameters.parameters()
    parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    size = dist.get_world_size() if comm is None else comm.Get_size()
    if size == 1 or not parameters:
        return
    gradients = _of_any_rank(parameters, comm)
    for bucket in _buckets(gradients, bucket_bytes):
        flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
        if comm is not None and flat.dtype in (torch.float16, torch.bfloat16):
            flat = flat.float()  # MPI does not know the dtype
        _all_reduce(flat, comm, "SUM")
        flat /= size
        pieces = torch.split(flat, [gradient.numel() for gradient in bucket])
        for gradient, piece in zip(bucket, pieces, strict=True):
            gradient.copy_(piece.view_as(gradient))


def _of_any_rank(parameters: list[torch.Tensor], comm: Any) -> list[torch.Tensor]:
    """Return the gradients that at least one rank has, in the order of the parameters, the same on all ranks."""
    own = [
        _NONE if one.grad is None else _DENSE if one.grad.layout is torch.strided else _SPARSE
        for one in parameters
    ]
    found = torch.tensor(own, dtype=torch.int32, device=parameters[0].device)
    _all_reduce(found, comm, "MAX")
    gradients = []
    for number, (parameter, kind) in enumerate(zip(parameters, found.tolist(), strict=True)):
        if kind == _SPARSE:
            raise ValueError(
                f"average_gradients: parameter {number}, of shape {tuple(parameter.shape)}, has a sparse gradient. "
                "Create its layer with sparse=False"
            )
        if kind == _DENSE:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
    return gradients


def _all_reduce(tensor: torch.Tensor, comm: Any, operation: str) -> None:
    """Replace a tensor by its sum or maximum over all ranks."""
    if comm is None:
        dist.all_reduce(tensor, getattr(dist.ReduceOp, operation))
    else:
        from mpi4py import MPI

        comm.Allreduce(MPI.IN_PLACE, tensor.numpy(), getattr(MPI, operation))


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
