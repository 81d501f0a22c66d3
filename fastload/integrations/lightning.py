"""Lightning's Trainer. Its checkpoints hold the exact position of fastload's loaders, on every rank.

Lightning itself finds this, by the entry points of the installed package. There is nothing to set.

What it uses of Lightning's training loop beside hooks. `_lacks` looks for these names as a training begins. Without one
of them there is a warning, and checkpoints hold no position.

    _combined_loader                    the loaders of this training
    _combined_loader._mode              whether one of several loaders that ends gives nothing more
    _combined_loader._iterator          its `_consumed`: which of several loaders were read to their end
    _combined_loader._load_state_dicts  loads the states of other loaders again, which Lightning has used up
    _data_fetcher                       `fetched`: how many batches it took. `iter()` begins the loaders again
    epoch_loop.on_run_start             begins the loaders again at some moments. So ours resume after it
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from fastload.errors import StateError
from fastload.order.order import MAX_AHEAD
from fastload.order.sampler import RankSampler
from fastload.order.state import batches_of

if TYPE_CHECKING:
    from fastload.loader import DataLoader

KEY = "fastload"
"""Where a checkpoint has the positions."""
_NAMES = """
_combined_loader._mode _combined_loader._iterator _combined_loader._load_state_dicts _data_fetcher.fetched
epoch_loop.on_run_start
"""


def callback() -> Any:
    """Return what Lightning adds to each Trainer of `lightning.pytorch`."""
    from lightning.pytorch import Callback

    return _made_for(Callback, callback)


def callback_of_pytorch_lightning() -> Any:
    """Return what Lightning adds to each Trainer of `pytorch_lightning`."""
    from pytorch_lightning import Callback

    return _made_for(Callback, callback_of_pytorch_lightning)


def _made_for(base: type, factory: Callable[[], Any]) -> Any:
    # Strategies that spawn processes pickle a Trainer and its callbacks.
    again = {"__reduce__": lambda self: (factory, ())}
    return type("LoaderPositions", (LoaderPositions, base), again)()


class LoaderPositions:
    """Saves which batches the training has used, and resumes after them.

    Lightning saves states of loaders too. But it saves those of rank 0 for all ranks, and those of streams one batch
    ahead. It loads none of them if an epoch had ended. So a checkpoint holds our own, and Lightning's are dropped.
    """

    def __init__(self) -> None:
        self._found: dict[str, Any] | None = None  # in the checkpoint of this run
        self._is_torchs = False  # whether it has no positions
        # Lightning's states of all loaders there, if some are not ours
        self._others: list[Any] = []
        self._unused: tuple[int, list[bool]] = 0, []  # the end of a run drops them
        self._waits = False  # for the training's first batch after a checkpoint
        self._epoch = -1  # the latest that the training began
        # By how much Lightning's number is larger: it counts an epoch twice that `max_steps` ended.
        self._shift = 0

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Forget the checkpoint of an earlier run."""
        self._found, self._is_torchs = None, False
        self._resumed(trainer)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Keep what a checkpoint after the run must know."""
        if self._is_known:
            self._unused = _unused(trainer.fit_loop)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Keep it also if the run fails, or Ctrl-C ends it."""
        if self._is_known and trainer.fit_loop._data_fetcher is not None:
            self._unused = _unused(trainer.fit_loop)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Add the positions of all ranks. Each rank calls this, as it must call `save_checkpoint`."""
        loop = trainer.fit_loop
        if not (self._is_known and (loaders := _loaders(loop))):
            return
        if self._waits:
            checkpoint[KEY] = self._found
            return
        progress = loop.epoch_loop.batch_progress
        used, fetcher = progress.current.processed, loop._data_fetcher
        held, consumed = self._unused if fetcher is None else _unused(loop)
        # A step that fetches its own batches meets the end within a step.
        ended = (_is_last(trainer) and used == progress.current.ready) or (
            not held and getattr(fetcher, "done", False)
        )
        ahead = [held] * len(loaders)
        if held and loop._combined_loader._mode == "max_size":
            # A loader that has ended gives nothing more.
            ahead = [min(held, max(0, batches_of(one.state_dict()) - used)) for one in loaders]
        states = [one.state_dict(ahead=n) for one, n in zip(loaders, ahead, strict=True)]
        checkpoint[KEY] = {
            "epochs": self._epoch + 1,
            "epoch_ended": used > 0 and ended,
            "consumed": consumed,
            "told": [sampler.is_set for sampler in _rank_samplers(loaders)],
            "loaders": _of_all_ranks(states, trainer.world_size),
        }

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Take the positions. Let Lightning load no states, if it has no other loaders' states."""
        self._found, self._shift = checkpoint.get(KEY), 0
        theirs = checkpoint["loops"]["fit_loop"]["state_dict"]
        self._others = theirs.get("combined_loader", [])
        self._is_torchs = not self._found and not self._others
        if self._found and len(self._others) == len(self._found["loaders"][0]):
            self._others = theirs["combined_loader"] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Let the training begin where the checkpoint was saved.

        Lightning begins an epoch of its own choice: before this, and in some cases in its loop's `on_run_start` again.
        Some runs of that loop train nothing. So this resumes after each `on_run_start`, until a batch is taken.
        """
        lacks = _lacks(trainer.fit_loop)
        self._is_known = lacks is None
        if lacks is not None:
            if sys.modules.get("fastload.loader"):
                warnings.warn(
                    f"fastload: this Lightning's training loop has no {lacks}, so checkpoints hold no position of a "
                    "loader. fastload knows Lightning 2.5 and 2.6",
                    stacklevel=2,
                )
            return
        if (found := self._found) is None:
            if self._is_torchs and _loaders(trainer.fit_loop) and not _is_last(trainer):
                warnings.warn(
                    "fastload: the checkpoint is of the middle of an epoch, and has no position of a loader. The epoch "
                    "starts from its first batch",
                    stacklevel=2,
                )
            return
        ended, every = found["epoch_ended"], trainer.reload_dataloaders_every_n_epochs
        if ended and every and found["epochs"] % every == 0:
            return  # the undisturbed run has new loaders now, too
        self._epoch = found["epochs"] - (not ended)
        self._shift = trainer.current_epoch - self._epoch
        self._waits = True
        loop, begin = trainer.fit_loop.epoch_loop, trainer.fit_loop.epoch_loop.on_run_start

        def on_run_start(fetcher: Any) -> None:
            begin(fetcher)
            try:
                self._resume(trainer, found)
            except StateError as error:
                if not ended:
                    raise
                warnings.warn(
                    f"fastload: the loaders begin anew, because the checkpoint is of others: {error}",
                    stacklevel=2,
                )
                self._resumed(trainer)

        loop.on_run_start = on_run_start

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        """End the beginning: the training has taken its first batch."""
        if self._waits:
            self._resumed(trainer)

    def _resumed(self, trainer: Any) -> None:
        self._waits = False
        vars(trainer.fit_loop.epoch_loop).pop("on_run_start", None)

    def _resume(self, trainer: Any, found: dict[str, Any]) -> None:
        loop, ended = trainer.fit_loop, found["epoch_ended"]
        loaders, saved = _loaders(loop), found["loaders"]
        # If another number of ranks saved them, each loader checks whether it can resume.
        states = saved[trainer.global_rank if trainer.global_rank < len(saved) else 0]
        if len(loaders) != len(states):
            raise StateError(
                f"the checkpoint has the states of {len(states)} fastload loaders for training, and this run has "
                f"{len(loaders)}. Resume with the loaders that the checkpoint was made with"
            )
        if self._others and not ended:
            loop._combined_loader._load_state_dicts(self._others)  # Lightning has used them up
        for loader, state in zip(loaders, states, strict=True):
            # A loader's epoch may end before that of the training.
            loader.load_state_dict(state if ended else {**state, "ended": False})
        iter(loop._data_fetcher)
        if ended:
            for loader, state in zip(loaders, states, strict=True):
                if state.get("ended"):
                    loader.load_state_dict(state)  # it has begun the next epoch already
            _set_epoch(loaders, found["epochs"])
            iter(loop._data_fetcher)
        elif found["consumed"]:
            _combined_iterator(loop)._consumed = found["consumed"]
        loop._data_fetcher.fetched += loop.epoch_loop.batch_progress.current.ready
        for sampler, is_set in zip(_rank_samplers(loaders), found["told"], strict=False):
            sampler.is_set = is_set and not ended

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Tell samplers the epoch again: Lightning may have counted another one twice."""
        if self._waits:
            self._shift = trainer.current_epoch - self._epoch
        self._epoch = trainer.current_epoch - self._shift
        _set_epoch(_loaders(trainer.fit_loop), self._epoch)


def _lacks(loop: Any) -> str | None:
    """Return the first of the names above that Lightning's loop lacks, or None."""
    for name in _NAMES.split():
        try:
            attrgetter(name)(loop)
        except AttributeError:
            return name
    return None


def _loaders(loop: Any) -> list[DataLoader[Any]]:
    """Return our loaders of one of Lightning's loops."""
    loader = sys.modules.get("fastload.loader")  # a program without our loaders does not import it
    combined = getattr(loop, "_combined_loader", None)
    if loader is None or combined is None:
        return []
    return [one for one in combined.flattened if isinstance(one, loader.DataLoader)]


def _is_last(trainer: Any) -> bool:
    """Return whether the latest batch that was trained on is the last of its epoch, or there was none."""
    progress = trainer.fit_loop.epoch_loop.batch_progress
    used = progress.current.processed
    return not used or progress.is_last_batch or used >= trainer.num_training_batches


def _combined_iterator(loop: Any) -> Any:
    """Return Lightning's iterator over several loaders, or None. It knows which of them were read to their end."""
    return vars(loop._combined_loader)["_iterator"]


def _samplers(loader: DataLoader[Any]) -> tuple[Any, Any]:
    return loader.sampler, getattr(loader.batch_sampler, "sampler", None)


def _set_epoch(loaders: list[DataLoader[Any]], epoch: int) -> None:
    """Tell the samplers which epoch comes, as Lightning does."""
    for loader in loaders:
        for sampler in _samplers(loader):
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)


def _rank_samplers(loaders: list[DataLoader[Any]]) -> list[RankSampler]:
    return [s for one in loaders for s in _samplers(one) if isinstance(s, RankSampler)]


def _unused(loop: Any) -> tuple[int, list[bool]]:
    """Return how many batches were fetched and not trained on: one ahead, and one that failed.

    Return also which of several loaders were read to their end.
    """
    held = loop._data_fetcher.fetched - loop.epoch_loop.batch_progress.current.processed
    return min(max(held, 0), MAX_AHEAD), list(getattr(_combined_iterator(loop), "_consumed", []))


def _of_all_ranks(states: list[Any], world_size: int) -> list[list[Any]]:
    """Return the states of all ranks, by rank; or only one rank's, if all are equal."""
    if world_size == 1 or not (dist.is_available() and dist.is_initialized()):
        return [states]
    gathered: list[Any] = [None] * world_size
    dist.all_gather_object(gathered, states)
    return gathered[:1] if all(one == states for one in gathered) else gathered
