"""A prepared loader, and its iterator. The batches are those of Accelerate's own loaders for the same order.

The private names of Accelerate that fastload uses:

    _is_accelerate_prepared   of a loader: True keeps Accelerate from making one of torch's loaders out of it. `prepare`
                              looks at what it made, and raises RuntimeError if that is another loader
    _prepare_device_mesh      of an Accelerator: which ranks read the same samples. Without it, `prepare` raises
                              AttributeError
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import accelerate
from accelerate.data_loader import DataLoaderStateMixin
from accelerate.state import GradientState
from accelerate.utils import send_to_device, synchronize_rng_states
from torch.utils.data import IterableDataset

from fastload.errors import LoaderTimeoutError
from fastload.integrations.division import agreed_seed, check, divided, number_of_samples
from fastload.integrations.stream import Part
from fastload.loader import DataLoader, samplers_of
from fastload.order.batches import draws_nothing, position_after
from fastload.order.epochs import Epochs, fresh_state
from fastload.order.sampler_state import own_state, random_states, rank_sampler
from fastload.order.state import IterableState, SampledState, batches_of, known_length
from fastload.settings import Settings


class Prepared(DataLoaderStateMixin, DataLoader[Any]):
    """A loader of one rank, as `prepare` makes it. The mixin tells Accelerate which epoch runs.

    `remainder` is as in Accelerate: how many samples of all ranks' last batches are new, 0 for all, -1 if unknown.
    """

    _is_accelerate_prepared = True

    def adopt(self, accelerator: accelerate.Accelerator, device_placement: bool | None) -> bool:
        """Take the rank's part of the samples, and the accelerator's device. Return False if torch's workers read."""
        if not self._is_ours:
            return False
        settings = Settings.of(self)
        check(self, settings.sampler, accelerator, resumes=self._epochs.resume is not None)
        rank, world_size = _data_rank(accelerator)
        ranks = 1 if accelerator.split_batches else world_size
        size = getattr(settings.sampler, "batch_size", None) or self.batch_size
        self.total_dataset_length = number_of_samples(settings)
        self.total_batch_size = size and size * ranks
        placed = accelerator.device_placement if device_placement is None else device_placement
        self.device = accelerator.device if placed else None
        self.non_blocking = accelerator.non_blocking
        self.gradient_state = GradientState()
        self._rng_types = [t for t in accelerator.rng_types or () if str(t) != "generator"]
        self._to_skip = 0
        self._state_before: dict[str, Any] | None = None  # of the batch that is read ahead
        self._agreed = agreed_seed(settings, accelerator, world_size)
        if world_size == 1 and self._agreed is None:
            return True
        coming = self._epochs.coming()
        if self._agreed is not None and self.seed is None:
            self.seed, self.generator = self._agreed, None
        self.__dict__.update(divided(self, accelerator, rank, world_size))
        self._epochs = Epochs(
            samplers_of(self._index_sampler, self.batch_sampler, self.sampler), self.dataset
        )
        self._epochs.set(coming)
        return True

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # as in DataLoader
        """Begin the next epoch. It says to Accelerate which batch is the last, and how many samples of it are new."""
        if self._rng_types:
            synchronize_rng_states(self._rng_types)
        epoch = self._epochs.coming()
        parts: Any = (self.dataset, self.batch_sampler)
        for part in parts:
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)
        read = self._apply_skip(epoch)
        self._state_before = None
        batches = super().__iter__()
        for _ in range(read):
            next(batches, None)
        return _Batches(self, batches)

    def __len__(self) -> int:
        """Return the number of batches. Raise TypeError if the dataset or the sampler does not know it."""
        if isinstance(self.dataset, Part):
            return self.dataset.batches()
        return super().__len__()

    def state_dict(self, *, ahead: int = 0) -> dict[str, Any]:
        """See `fastload.DataLoader.state_dict`."""
        if self._state_before is not None and not ahead:
            return self._state_before
        ahead += self._state_before is not None
        return super().state_dict(ahead=ahead)

    def load_state_dict(self, state: dict[str, Any] | list[dict[str, Any]]) -> None:
        """See `fastload.DataLoader.load_state_dict`. A seed that the ranks have agreed on is taken from the state."""
        if (
            self._agreed is not None
            and isinstance(state, dict)
            and isinstance(state.get("seed"), int)
        ):
            self._agreed = self.seed = state["seed"]
            if isinstance(self.dataset, Part):
                self.dataset.seed = state["seed"]
            sampler, seed = rank_sampler(Settings.of(self).sampler), state.get("sampler_seed")
            if sampler is not None and isinstance(seed, int):
                sampler.seed = seed
        super().load_state_dict(state)
        self._state_before = None

    def begin(self) -> None:
        """Tell Accelerate that an epoch of this loader runs."""
        super().begin()
        length, total = self.total_dataset_length, self.total_batch_size
        self.remainder = -1 if self.drop_last or not (length and total) else length % total

    def mark_last(self) -> None:
        """Tell Accelerate that the batch that it gets next is the last."""
        self.end_of_dataloader = True
        if isinstance(self.dataset, Part) and (state := self._state_before) and not self.drop_last:
            lane = state["lanes"][state["turn"] - 1]  # the last batch is from this worker
            self.remainder = lane["state"]["new"]

    def end(self) -> None:
        """Tell Accelerate that no epoch of this loader runs."""
        self._state_before = None
        super().end()

    def skip(self, batches: int) -> None:
        """Let the next `iter()` begin after the first `batches` batches of its epoch.

        If a state was loaded that was saved after the last batch of an epoch, 0 means the beginning of the next epoch:
        programs divide the number of steps by the loader's length.
        """
        self._to_skip = batches
        state: Any = None if batches else self._epochs.resume
        at_end = isinstance(state, SampledState) and state.batches == known_length(self)
        if at_end and not state.ended and state.epoch == self._epochs.coming():
            list(self)  # the rest of the epoch: nothing

    def keep_state(self) -> None:
        """Keep the state of now for `state_dict()`, because one more batch is read."""
        self._state_before = super().state_dict()

    def _apply_skip(self, epoch: int) -> int:
        """Move the beginning of the coming epoch. Return how many batches must be read and dropped for it."""
        count, self._to_skip = self._to_skip, 0
        if not count:
            return 0
        state: Any = self._epochs.resume
        if state is not None and (state.ended or state.epoch != epoch):
            state = None
        if isinstance(state, IterableState):
            return max(0, count - batches_of(state.to_json()))
        settings = Settings.of(self)
        sampler, size = settings.sampler, getattr(settings.sampler, "batch_size", None)
        if not size or settings.iterable:
            return count
        if state is None:
            state, _ = fresh_state(settings, epoch, None)
            if not draws_nothing(sampler):
                draws = [random_states(sampler, keyed=self.seed is not None)]
                state = replace(state, draws=draws, sampler_state=own_state(sampler))
        if state.batches != count:
            position = position_after(sampler, state.world_size, count)
            state = replace(
                state,
                batches=count,
                position=count * size * state.world_size if position is None else position,
                ahead=[],
                checksum=None,
            )
            super().load_state_dict(state.to_json())
        return 0


class _Batches(Iterator[Any]):
    """The batches of an epoch, on the device. If the loader does not know their number, one is read ahead."""

    def __init__(self, loader: Any, batches: Iterator[Any]) -> None:
        self._loader = loader
        self._batches = batches
        self._left: int | None = None
        if not isinstance(loader.dataset, IterableDataset):
            with suppress(TypeError):  # a batch sampler without length
                self._left = len(loader) - loader.state_dict()["batches"]
        self._ahead: list[Any] = []
        self._began = False

    def __next__(self) -> Any:
        loader = self._loader
        if not self._began:
            self._began = True
            loader.begin()
        try:
            batch = self._known() if self._left is not None else self._looked_ahead()
        except StopIteration:
            loader.end()
            raise
        if loader.device is None:
            return batch
        return send_to_device(batch, loader.device, non_blocking=loader.non_blocking)

    def _known(self) -> Any:
        assert self._left is not None
        try:
            batch = next(self._batches)
        except Exception as error:
            # Another error counts as the batch.
            self._left -= not isinstance(error, StopIteration | LoaderTimeoutError)
            raise
        self._left -= 1
        self._loader.end_of_dataloader = not self._left
        return batch

    def _looked_ahead(self) -> Any:
        batch = self._ahead.pop() if self._ahead else next(self._batches)
        if isinstance(batch, Exception):
            raise batch
        self._loader.keep_state()
        try:
            self._ahead.append(next(self._batches))
        except StopIteration:
            self._loader.mark_last()
        except Exception as error:
            self._ahead.append(error)  # for the next `next()`
        return batch


def prepare(
    theirs: Callable[..., Any],
    accelerator: accelerate.Accelerator,
    loader: Any,
    device_placement: bool | None,
    *more: Any,
) -> Any:
    """Do as `Accelerator.prepare_data_loader`, which is `theirs`. A loader of ours becomes a `Prepared` copy of it.

    Raises ValueError if the accelerator's settings do not fit the loader.
    """
    if isinstance(loader, DataLoader) and not isinstance(loader, Prepared):
        kind: Any = type(type(loader).__name__, (Prepared, type(loader)), {})
        copy = kind.__new__(kind)
        copy.__setstate__(loader.__getstate__())
        if copy.adopt(accelerator, device_placement):
            loader = copy
        else:
            warnings.warn(
                'fastload: with worker_method="torch", Accelerate reads this loader as one of torch\'s, and '
                "`save_state` does not hold its position",
                stacklevel=4,
            )
    made = theirs(loader, device_placement, *more)
    if isinstance(loader, Prepared) and made is not loader:
        raise RuntimeError(
            f"Accelerate {accelerate.__version__} made a {type(made).__name__} out of a loader that is prepared. "
            "fastload knows Accelerate 1.8 to 1.15"
        )
    return made


def _data_rank(accelerator: accelerate.Accelerator) -> tuple[int, int]:
    """Return rank and number of the parts that the data has: ranks of one tensor-parallel group read the same."""
    mesh = accelerator._prepare_device_mesh()
    if not mesh:
        return accelerator.process_index, accelerator.num_processes
    sizes = {name: mesh[name].size() for name in mesh.mesh_dim_names}
    same = sizes.get("tp", 1) * sizes.get("cp", 1)
    parts = sizes.get("dp_replicate", 1) * sizes.get("dp_shard", 1)
    return accelerator.process_index // same, parts


def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
    """Do as `accelerate.skip_first_batches`, which makes one of torch's loaders, for prepared ones of ours too."""
    if not isinstance(dataloader, Prepared):
        if num_batches and isinstance(dataloader, DataLoader):
            warnings.warn(
                "fastload: this loader was not prepared, so batches are skipped as by torch, and the rest of the epoch "
                "may have other samples than before. Prepare it: accelerator.prepare(loader)",
                stacklevel=2,
            )
        return accelerate.skip_first_batches(dataloader, num_batches)
    dataloader.skip(num_batches)
    return dataloader
