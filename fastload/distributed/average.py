"""Averaging of gradients, for loops without DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from fastload.distributed.detect import check_world

_NONE, _DENSE, _SPARSE = range(3)


def average_gradients(
    parameters: torch.Tensor | Iterable[torch.Tensor] | torch.nn.Module, *, comm: Any = None
) -> None:
    """Replace the gradient of each parameter by its mean over all ranks. All ranks call it, after `backward()`.

    Args:
        parameters: one parameter, several, or a module. They have the same shapes and order on all ranks. A gradient
            that is None on some ranks counts as zeros there. If it is None on all, it stays None.
        comm: an mpi4py communicator, such as `MPI.COMM_WORLD`, for gradients on the CPU. None: torch's default process
            group.

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
    for gradient in _of_any_rank(parameters, comm):
        unknown = comm is not None and gradient.dtype in (torch.float16, torch.bfloat16)  # to MPI
        total = gradient.float() if unknown else gradient.contiguous()
        _all_reduce(total, comm, "SUM")
        gradient.copy_(total.div_(size))


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
