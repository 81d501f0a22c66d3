"""Hugging Face's Trainer with fastload's loaders, for training, evaluation and prediction.

from fastload.integrations.transformers import Trainer

Or put `TrainerMixin` before another Trainer: `class Mine(TrainerMixin, Seq2SeqTrainer): ...`. All `dataloader_*`
arguments keep their meaning, and so do those of `accelerator_config` (see `fastload.integrations.accelerate`).

It uses no private name, but replaces a function in the modules of the Trainer's classes: see `TrainerMixin`.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import accelerate
import transformers
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import IterableDataset

from fastload.integrations.prepared import prepare, skip_first_batches
from fastload.loader import DataLoader

_KEPT = """num_workers collate_fn pin_memory timeout worker_init_fn multiprocessing_context generator
persistent_workers pin_memory_device in_order"""
"""The arguments of torch's loader that do not depend on others."""


class TrainerMixin:
    """Lets a Trainer read with fastload's loaders, and resume them in the middle of an epoch without reading it again.

    Its Accelerator's public `prepare_data_loader` turns the Trainer's loaders into ours. There is no hook for skipping
    batches. So `skip_first_batches`, in the modules of the Trainer's classes, becomes one that knows our loaders too.
    If no module has that name, a class with this mixin warns: after a resume, torch's workers would read the epoch.
    """

    args: Any
    accelerator: Any

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        order = cls.__mro__
        if transformers.Trainer in order[: order.index(TrainerMixin)]:
            raise TypeError(f"{cls.__name__}: put TrainerMixin before the Trainer among the bases")
        name, known = "skip_first_batches", (accelerate.skip_first_batches, skip_first_batches)
        modules = {kind.__module__ for kind in cls.__mro__} & sys.modules.keys() - {__name__}
        found = [
            held for held in (vars(sys.modules[m]) for m in modules) if held.get(name) in known
        ]
        for held in found:
            held[name] = skip_first_batches
        if not found:
            warnings.warn(
                f"fastload: transformers {transformers.__version__} has no {name} in its Trainer's module, so torch's "
                "workers read the rest of an epoch that is resumed",
                stacklevel=2,
            )

    def create_accelerator_and_postprocess(self) -> None:
        """See the Trainer's method."""
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        theirs = self.accelerator.prepare_data_loader

        def prepare_data_loader(loader: Any, device_placement: Any = None, *more: Any) -> Any:
            if type(loader) is TorchDataLoader:
                loader = _ours(loader, prefetch_factor=self.args.dataloader_prefetch_factor)
            return prepare(theirs, self.accelerator, loader, device_placement, *more)

        self.accelerator.prepare_data_loader = prepare_data_loader


def _ours(loader: Any, **more: Any) -> DataLoader[Any]:
    """Return a fastload loader with the arguments of one of torch's."""
    more |= {name: getattr(loader, name) for name in _KEPT.split()}
    if loader.batch_size is None and loader.batch_sampler is not None:
        return DataLoader(loader.dataset, batch_sampler=loader.batch_sampler, **more)
    if not isinstance(loader.dataset, IterableDataset):
        more["sampler"] = loader.sampler
    return DataLoader(
        loader.dataset, batch_size=loader.batch_size, drop_last=loader.drop_last, **more
    )


class Trainer(TrainerMixin, transformers.Trainer):
    """`transformers.Trainer` with fastload's loaders."""
