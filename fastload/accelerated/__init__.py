"""What `accelerator.prepare(loader)` makes of a fastload loader.

prepared    the rank's batches, on the device, and their state
division    which samples are the rank's
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from accelerate import Accelerator
from accelerate import skip_first_batches as _skip_theirs

from fastload.accelerated.prepared import Prepared


def prepare(loader: Any, *, asked_by: FrameType) -> bool:
    """Prepare a fastload loader for an Accelerator, and return True. It stays the same object, with the same workers.

    Args:
        loader: it is not prepared yet.
        asked_by: the frame that asks whether the loader is prepared. It runs a method of the Accelerator, and is the
            only way to find it.

    Return False if no Accelerator asks. Raises ValueError if its settings do not fit the loader.
    """
    accelerator = asked_by.f_locals.get("self")
    if not isinstance(accelerator, Accelerator):
        return False
    own = type(loader)
    loader.__class__ = type(own.__name__, (Prepared, own), {})
    try:
        loader.adopt(accelerator)
        if asked_by.f_locals.get("device_placement") is False:
            loader.device = None
    except BaseException as error:
        loader.__class__ = own
        # Accelerate would take an AttributeError for a loader that is not prepared.
        if isinstance(error, AttributeError):
            raise RuntimeError(f"{loader!r} cannot be prepared: {error}") from error
        raise
    if "skip_first_batches" not in vars(accelerator):  # else it knows of our loaders
        _know_of_loaders(accelerator)
    return True


def _know_of_loaders(accelerator: Accelerator) -> None:
    """Let `save_state`, `load_state` and `skip_first_batches` of an accelerator know of our loaders."""
    rank = accelerator.process_index

    def loaders() -> Iterator[tuple[int, Any]]:
        return enumerate(one for one in accelerator._dataloaders if isinstance(one, Prepared))

    def save(_models: Any, _weights: Any, folder: str) -> None:
        for number, loader in loaders():
            _file(folder, number, rank).write_text(json.dumps(loader.state_dict()))

    def load(_models: Any, folder: str) -> None:
        for number, loader in loaders():
            own, first = (_file(folder, number, r) for r in (rank, 0))
            found = own if own.exists() else first
            if found.exists():
                loader.load_state_dict(json.loads(found.read_text()))
            else:
                warnings.warn(
                    f"fastload: {folder} has no state of {loader!r} ({first.name}), so its epoch starts anew",
                    stacklevel=3,
                )

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
    # The method of this accelerator alone: Accelerate's own makes one of torch's loaders out of any other.
    vars(accelerator)["skip_first_batches"] = partial(
        skip_first_batches, theirs=accelerator.skip_first_batches
    )


def skip_first_batches(dataloader: Any, num_batches: int = 0, *, theirs: Any = _skip_theirs) -> Any:
    """Return `dataloader`, the next epoch of which begins after `num_batches` batches. They are read only if they
    are of a stream.

    `theirs` does this for loaders that are not ours.
    """
    if not isinstance(dataloader, Prepared):
        return theirs(dataloader, num_batches)
    dataloader.skip(num_batches)
    return dataloader


def _file(folder: str, number: int, rank: int) -> Path:
    return Path(folder) / f"fastload_loader_{number}_rank_{rank}.json"
