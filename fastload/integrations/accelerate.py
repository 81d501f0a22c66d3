"""Hugging Face's Accelerate with fastload's loaders. Only the import of the Accelerator changes:

from fastload.integrations.accelerate import Accelerator
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import accelerate

from fastload.integrations.prepared import Prepared, prepare, skip_first_batches


class Accelerator(accelerate.Accelerator):
    """`accelerate.Accelerator`, the `prepare` of which knows fastload's loaders. All arguments are the same.

    `prepare(loader)` returns a loader of fastload's that reads the rank's part, with the same workers, seed and state.
    `save_state`, `load_state` and `skip_first_batches` hold its position. Other loaders are Accelerate's.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._prepared: list[Prepared] = []
        self.register_save_state_pre_hook(self._save_loaders)
        self.register_load_state_pre_hook(self._load_loaders)

    def prepare_data_loader(
        self, data_loader: Any, device_placement: bool | None = None, *more: Any
    ) -> Any:
        """See `accelerate.Accelerator`. Raise ValueError if the settings do not fit a loader of ours."""
        made = prepare(super().prepare_data_loader, self, data_loader, device_placement, *more)
        if isinstance(made, Prepared) and made not in self._prepared:
            self._prepared.append(made)
        return made

    def free_memory(self, *objects: Any) -> Any:
        """See `accelerate.Accelerator`."""
        self._prepared.clear()
        return super().free_memory(*objects)

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Return `dataloader`, the next epoch of which begins after `num_batches` batches.

        They are read only if they are of a stream.
        """
        return skip_first_batches(dataloader, num_batches)

    def _save_loaders(self, _models: Any, _weights: Any, folder: str) -> None:
        for number, loader in enumerate(self._prepared):
            text = json.dumps(loader.state_dict())
            _file(folder, number, self.process_index).write_text(text)

    def _load_loaders(self, _models: Any, folder: str) -> None:
        for number, loader in enumerate(self._prepared):
            own, first = (_file(folder, number, rank) for rank in (self.process_index, 0))
            found = own if own.exists() else first
            if found.exists():
                loader.load_state_dict(json.loads(found.read_text()))
            else:
                warnings.warn(
                    f"fastload: {folder} has no state of {loader!r} ({first.name}), so its epoch starts anew",
                    stacklevel=3,
                )


def _file(folder: str, number: int, rank: int) -> Path:
    return Path(folder) / f"fastload_loader_{number}_rank_{rank}.json"
