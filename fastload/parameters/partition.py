"""Pure functions: which server has which parameter, and sums of the gradients of rows."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor


def string_to_id(name: str, number: int) -> int:
    """Return which of `number` servers has the dense parameter `name`. ElasticDL's rule hashes the name alone."""
    return int(hashlib.sha256(name.encode()).hexdigest(), 32) % number


def owners(ids: Tensor, number: int) -> Tensor:
    """Return which of `number` servers has each row."""
    return ids.remainder(number)


def merged(ids: Tensor, gradients: Tensor) -> tuple[Tensor, Tensor]:
    """Return the distinct ids in ascending order, and the sum of each id's gradients. Arguments are not changed."""
    distinct, places = torch.unique(ids, return_inverse=True)
    sums = gradients.new_zeros((len(distinct), *gradients.shape[1:]))
    return distinct, sums.index_add_(0, places, gradients)
