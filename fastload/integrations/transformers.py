"""Hugging Face's Trainer with fastload's loaders, for training, evaluation and prediction.

from fastload.integrations.transformers import Trainer

Or put `TrainerMixin` before another Trainer: `class Mine(TrainerMixin, Seq2SeqTrainer): ...`. All `dataloader_*`
arguments keep their meaning, and so do those of `accelerator_config` (see `fastload.accelerated`).
"""

from __future__ import annotations

from inspect import getattr_static
from types import FunctionType
from typing import Any

import transformers

from fastload.accelerated import skip_first_batches
from fastload.loader import DataLoader


class TrainerMixin:
    """Lets a Trainer build fastload's loaders, and resume them in the middle of an epoch without reading it again.

    The Trainer has no hook for either. So a class with this mixin gets its own copies of the Trainer's methods that
    make a loader or skip batches. In the copies, `DataLoader` and `skip_first_batches` are ours.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name in dir(cls):
            method = getattr_static(cls, name)
            if isinstance(method, FunctionType) and _makes_loaders(method):
                setattr(cls, name, _with_ours(method))


def _makes_loaders(method: FunctionType) -> bool:
    names = method.__code__.co_names
    makes = "dataloader" in method.__name__ and "DataLoader" in names
    return makes or "skip_first_batches" in names


def _with_ours(method: FunctionType) -> FunctionType:
    ours = {"DataLoader": DataLoader, "skip_first_batches": skip_first_batches}
    copy = FunctionType(
        method.__code__,
        method.__globals__ | ours,
        method.__name__,
        method.__defaults__,
        method.__closure__,
    )
    copy.__kwdefaults__ = method.__kwdefaults__
    copy.__dict__.update(vars(method))
    return copy


class Trainer(TrainerMixin, transformers.Trainer):
    """`transformers.Trainer` with fastload's loaders."""
