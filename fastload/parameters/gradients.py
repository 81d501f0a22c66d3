"""`Gradients`: the part of a push that is for one server. A client creates it, and sends its `vars()`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fastload.errors import ParametersError
from fastload.parameters.optimizer import checked_rate
from fastload.parameters.partition import merged

NEWEST = 2**62
"""A version that is newer than any."""
Rows = tuple[Tensor, Tensor]
"""Distinct ids, and a gradient for each."""


@dataclass(frozen=True, kw_only=True)
class Gradients:
    """The gradients of a push for one server.

    Attributes:
        version: the version of the parameters with which they were computed.
        lr: learning rate. None: that of the server.
    """

    version: int = -1
    lr: float | None = None
    dense: Mapping[str, Tensor] = field(default_factory=dict)
    rows: Mapping[str, Rows] = field(default_factory=dict)

    @classmethod
    def read(cls, found: Mapping[str, Any]) -> Gradients:
        """Return the gradients that a client has sent. Raise ParametersError if they cannot be read."""
        try:
            rows = {name: (ids, values) for name, (ids, values) in found["rows"].items()}
            dense, lr = dict(found["dense"]), checked_rate(found["lr"])
            tensors = [*dense.values(), *(tensor for pair in rows.values() for tensor in pair)]
            if not all(isinstance(each, Tensor) for each in tensors):
                raise TypeError("its gradients are not tensors")
            return cls(version=checked_version(found["version"]), lr=lr, dense=dense, rows=rows)
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
            raise ParametersError(
                f"a push cannot be read: {type(error).__name__}: {error}. Use the same version of fastload on workers "
                "and servers"
            ) from error


def checked_version(version: Any) -> int:
    """Return a version, or -1 for none. Raise TypeError if it is not a whole number in range."""
    if type(version) is not int or not -1 <= version <= NEWEST:
        raise TypeError(f"a version must be a whole number, got {version!r}")
    return version


def expect_finite(name: str, gradient: Tensor) -> None:
    """Raise ParametersError if a gradient has NaN or infinite numbers, which would spoil the parameters for all."""
    if not torch.isfinite(gradient).all():
        raise ParametersError(
            f"the gradient of {name!r} has NaN or infinite numbers. Skip this batch, or lower the learning rate"
        )


def mean(pushes: Sequence[Gradients]) -> Gradients:
    """Return the mean of pushes. A missing gradient counts as zero. The learning rate is that of the last push."""
    share = 1 / len(pushes)
    dense: dict[str, Tensor] = {}
    rows: dict[str, list[Rows]] = {}
    for push in pushes:
        for name, gradient in push.dense.items():
            scaled = gradient * share
            dense[name] = dense[name].add_(scaled) if name in dense else scaled
        for name, named in push.rows.items():
            rows.setdefault(name, []).append(named)
    together = {}
    for name, all_rows in rows.items():
        distinct, sums = merged(*map(torch.cat, zip(*all_rows, strict=True)))
        together[name] = distinct, sums.mul_(share)
    return Gradients(version=pushes[-1].version, lr=pushes[-1].lr, dense=dense, rows=together)
