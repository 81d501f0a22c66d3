"""Which server has what, and gradients of rows added up: pure functions."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor


def string_to_id(name: str, number: int) -> int:
    """Return which of `number` servers has the dense parameter `name`: ElasticDL's rule, a hash that ignores sizes."""
    return int(hashlib.sha256(name.encode()).hexdigest(), 32) % number


def owners(ids: Tensor, number: int) -> Tensor:
    """Return which of `number` servers has each row."""
    return ids.remainder(number)


def merged(ids: Tensor, gradients: Tensor) -> tuple[Tensor, Tensor]:
    """Return the distinct ids, ascending, and of each the sum of its gradients. The arguments stay unchanged."""
    distinct, places = torch.unique(ids, return_inverse=True)
    sums = gradients.new_zeros((len(distinct), *gradients.shape[1:]))
    return distinct, sums.index_add_(0, places, gradients)
