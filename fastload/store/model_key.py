"""What a set of a model's outputs is known by: a hash of the weights, a version that the caller names, and names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import nn
from torch.utils.data import Subset

from fastload._kit.fingerprint import fingerprint
from fastload.order.batches import set_id_of

_RANDOM = (
    r"\b(?:Random|Rand|ColorJitter|AutoAugment|TrivialAugment|AugMix|ElasticT|MixUp|CutMix)\w*"
)
"""Names of random transforms: fastload's, torchvision's and MONAI's."""


def key_of(dataset: Any, model: Any, version: str, more: Mapping[str, Any]) -> dict[str, str]:
    """Return what the outputs of a model for a dataset are known by, as text, by the name of each part.

    Code does not count, and neither do samples that are not in a set: `version` stands for both.
    """
    return {
        **{part: name_of(value) if callable(value) else str(value) for part, value in more.items()},
        "weights": _weights(model),
        "version": version,
        "model": name_of(model),
        "dataset": name_of(dataset),
        "rows": str(len(dataset)),
        "source": _source(dataset),
    }


def name_of(value: Any) -> str:
    """Return the qualified name of a function, or of the type of an object."""
    while isinstance(value, partial):
        value = value.func
    return str(getattr(value, "__qualname__", type(value).__qualname__))


def random_transforms(dataset: Any) -> list[str]:
    """Return the names of a dataset's transforms that draw random numbers, judged by the names alone."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    names = ("transform", "target_transform", "transforms")
    found = [getattr(dataset, name, None) for name in names]
    return sorted({*re.findall(_RANDOM, repr(found))})


def _source(dataset: Any) -> str:
    """Return what a dataset itself knows of its content: the id of a set, or Hugging Face's; "" if it knows nothing."""
    if isinstance(dataset, Subset):
        inner, indices = dataset.dataset, [*map(int, dataset.indices)]
        return fingerprint(name_of(inner), _source(inner), indices)
    known = set_id_of(dataset) or getattr(dataset, "_fingerprint", None)
    return known if isinstance(known, str) else ""


def _weights(model: Any) -> str:
    if not isinstance(model, nn.Module):
        return ""
    # Not `state_dict()`, which leaves out buffers that are not persistent.
    return fingerprint(dict(model.named_parameters()), dict(model.named_buffers()))
