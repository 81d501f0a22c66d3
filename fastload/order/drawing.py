"""What a sampler draws from while its code runs on the loop's thread."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fastload._kit.hashing import mix64
from fastload.errors import StateError
from fastload.order.sampler_state import RandomStates
from fastload.random.streams import Fixed, Stream, entered

MIXED = (
    "draws: the sampler draws from torch's global generator batch by batch, and so does the training loop. This state "
    "does not determine the rest of the epoch. Make the loader with seed=, or give the sampler a generator of its "
    "own, as an attribute"
)

_SAMPLER = 0x7361_6D70_6C65_7200  # separates the sampler's stream from those of samples and batches


class Drawing:
    """The random stream of a sampler in one epoch, if it does not draw from the loop's global generators.

    With a seed it is a stream of (seed, epoch), the same on all ranks. Without one, a sampler and the loop share a
    generator, as in torch. After a resume that cannot be repeated, so a stream continues what the sampler drew alone.

    Args:
        seed, epoch: of the loader.
        draws: the random states of a loaded state. Without a seed they are replayed.
        modules: those with global random functions that a keyed stream routes.
    """

    def __init__(
        self,
        seed: int | None,
        epoch: int,
        draws: list[RandomStates] | None,
        modules: Callable[[], Collection[str]],
    ) -> None:
        self._replays = bool(draws) and seed is None
        self._mark: torch.Tensor | None = None
        """Torch's global state when a replay ended, or the sampler last drew."""
        self.mixed = False  # whether the loop has drawn between two draws of the sampler
        self._stream: Stream | None = None
        if self._replays or seed is not None:
            self._source = Fixed(mix64(mix64(mix64(seed or 0) ^ epoch) ^ _SAMPLER))
            self._stream = Stream(modules=() if self._replays else modules())
            self._stream.move(self._source, None)
            self._stream.generator()  # now it is not stale, and `entered` continues it

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Let this thread draw from the stream in the block, from where the last block ended."""
        if (stream := self._stream) is None:
            yield
            return
        stream.source, stream.stale = self._source, False
        with entered(stream):
            yield

    def next(self, indices: Iterator[Any], ordinal: int) -> Any:
        """Return what the sampler gives as its batch number `ordinal`.

        Raise StateError if it draws after a replay and after the loop: before, the loop's draws were between its own.
        """
        if self._stream is not None and not self._replays:
            with self.entered():
                return next(indices)
        loops = torch.default_generator.get_state()
        with self.entered():
            before = torch.get_rng_state()
            given = next(indices)
            drew = not torch.equal(before, torch.get_rng_state())
        if self._mark is None or not ordinal:
            self._mark = torch.default_generator.get_state()
        elif drew:
            self.mixed |= not torch.equal(loops, self._mark)
            self._mark = self._mark if self._replays else torch.default_generator.get_state()
        if self.mixed and self._replays:
            raise StateError(MIXED)
        return given
