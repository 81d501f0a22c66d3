"""What is read next, and what the loop has had of it: the loop's own side of an epoch.

A state describes what was *delivered*. It is restored by slicing the order where the order is a
function, else by running the sampler again up to there; never by reading samples.
"""

from __future__ import annotations

import base64
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain, islice
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DistributedSampler, SequentialSampler

from fastload.faults import contained, pass_signals
from fastload.fetch import Batch, Fetcher
from fastload.randomness import StreamKeys
from fastload.sampler import RankSampler
from fastload.telemetry import Recorder


class Order(ABC):
    """The batches of one epoch, and which of them the loop has had.

    Args:
        epoch, rank: which part of which epoch.
        about: what a state must agree on; see `state.describe`.

    Everything here runs on the loop's thread, as in torch: the sampler is user code, and so races
    with nothing.
    """

    def __init__(self, *, epoch: int, rank: int, about: dict[str, Any]) -> None:
        self.epoch = epoch
        self.about = about
        self.recorders: list[Recorder] = []  # of this epoch, by worker
        self.exhausted = False  # there are no more batches
        self._ended = False  # and the loop knows
        self._rank = rank

    def begin(self, seed: int, recorders: list[Recorder]) -> None:
        """Fix the random streams, by `seed`; from now on batches may be asked for."""
        self.seed = seed
        self.recorders = recorders

    @abstractmethod
    def __next__(self) -> Batch:
        """The next batch to be read; at the end sets `exhausted`, and raises StopIteration."""

    @abstractmethod
    def delivered(self, batch: Batch) -> None:
        """The loop has had `batch`: its data, its error, or nothing where it was left out."""

    def end(self) -> None:
        """The loop has been told that there is no more."""
        self._ended = True

    def state(self) -> dict[str, Any]:
        """What was delivered; see `DataLoader.state_dict`."""
        return {
            **self.about,
            "stream_seed": self.seed,
            "epoch": self.epoch,
            "ended": self._ended,
            **self._place(),
        }

    @abstractmethod
    def _place(self) -> dict[str, Any]:
        """Where in the epoch the loop is, as JSON values."""


class SampledOrder(Order):
    """The batches of one epoch of a map-style data set, in its sampler's order.

    Args:
        sampler: torch's "index sampler": of batches, or without batching of indices.
        fetcher: makes the batches.
        resume: a state that passed `state.check`: begin behind what it says was delivered.
        epoch, rank, about: see `Order`.
    """

    def __init__(
        self,
        sampler: Any,
        fetcher: Fetcher,
        *,
        epoch: int,
        resume: dict[str, Any] | None = None,
        **part: Any,
    ) -> None:
        super().__init__(epoch=epoch, **part)
        self._fetcher = fetcher
        self._sampler = sampler
        self._world_size = self.about["world_size"]
        self._ordinal = self._batches = resume["batches"] if resume else 0
        # Rounded up: only the end of an epoch is no multiple, and behind it there is nothing.
        self._position = -(-resume["position"] // self._world_size) if resume else 0
        self._delivered_to = self._position
        # Delivered before batches that were not (in_order=False): ordinal -> position behind it.
        self._ahead: dict[int, int] = {}
        self._late: set[int] = set(resume["ahead"]) if resume else set()  # those that a state named
        self._draws: list[str] | None = resume["draws"] if resume else None
        if resume is None:
            before = [] if is_function(sampler) else _random_states(sampler)
            self._indices = _behind(sampler, epoch, 0, 0)
            # A sampler that draws in `__iter__` has done so now; a generator will when it is asked.
            if before and before != _random_states(sampler):
                self._draws = before
        else:
            with _drawing_as_then(sampler, self._draws):
                rest = _behind(sampler, epoch, self._ordinal, self._position)
                self._indices = chain(list(islice(rest, 1)), rest)

    def begin(self, seed: int, recorders: list[Recorder]) -> None:
        """See `Order`. From now on the sampler is asked."""
        super().begin(seed, recorders)
        self._keys = StreamKeys(seed, self.epoch, rank=self._rank, world_size=self._world_size)
        if self._draws is None and not is_function(self._sampler):
            self._draws = _random_states(self._sampler)

    def __next__(self) -> Batch:
        while True:
            try:
                batch = self._next()
            except StopIteration:
                self.exhausted = True
                raise
            self._ordinal += 1
            self._position += batch.size
            if batch.ordinal not in self._late:
                return batch
            self._late.discard(batch.ordinal)
            self.delivered(batch)

    def _next(self) -> Batch:
        place: dict[str, Any] = {
            "keys": self._keys,
            "recorders": self.recorders,
            "epoch": self.epoch,
            "ordinal": self._ordinal,
            "position": self._position,
        }
        try:
            return self._fetcher.batch(next(self._indices), **place)
        except StopIteration:
            raise
        except BaseException as exc:
            pass_signals(exc)
            batch = Batch(0, [], size=0, **place)
            batch.error, batch.where = contained(exc), f"{batch}; stage: sampler"
            return batch

    def delivered(self, batch: Batch) -> None:
        """See `Order`."""
        self._ahead[batch.ordinal] = batch.position + batch.size
        while self._batches in self._ahead:
            self._delivered_to = self._ahead.pop(self._batches)
            self._batches += 1

    def end(self) -> None:
        """See `Order`."""
        super().end()
        if self._draws is not None:
            self._draws = _random_states(self._sampler)

    def _place(self) -> dict[str, Any]:
        position = self._delivered_to * self._world_size
        single = single_sampler(self._sampler)
        if (
            isinstance(single, RankSampler)
            and self._delivered_to >= len(single)
            and single.ends != "pad"
        ):
            position = single.length  # the same on ranks that had fewer samples
        ahead = sorted({*self._ahead, *self._late})
        return {
            "batches": self._batches,
            "position": position,
            "ahead": ahead,
            "ahead_on_rank": self._rank if ahead else None,
            "draws": self._draws,
        }


def partition(sampler: Any, dataset: Any) -> tuple[int, int]:
    """The rank and the world size by which positions stride: the sampler's, the data set's, or torch.distributed's."""
    single = single_sampler(sampler)
    if isinstance(single, RankSampler):
        return single.rank, single.world_size
    if isinstance(single, DistributedSampler):
        return single.rank, single.num_replicas
    if getattr(dataset, "partitioned_by_rank", False) and hasattr(dataset, "world_size"):
        return dataset.rank, dataset.world_size
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def single_sampler(sampler: Any) -> Any:
    """The sampler of single indices under a batch sampler of torch's."""
    return sampler.sampler if isinstance(sampler, BatchSampler) else sampler


def is_function(sampler: Any) -> bool:
    """Whether the order is a function of what the sampler says of itself: nothing is drawn."""
    single = single_sampler(sampler)
    return type(single) in (RankSampler, SequentialSampler) and type(sampler) in (
        BatchSampler,
        type(single),
    )


def _behind(sampler: Any, epoch: int, batches: int, samples: int) -> Iterator[Any]:
    """What `sampler` gives in an epoch after so many batches with so many samples."""
    single = single_sampler(sampler)
    if type(sampler) is BatchSampler and (samples or is_function(sampler)):
        rest = _behind(single, epoch, samples, samples)
        return iter(BatchSampler(rest, sampler.batch_size, sampler.drop_last))
    if sampler is single and type(single) is RankSampler:
        return single.ordered(epoch, samples)
    if sampler is single and type(single) is SequentialSampler:
        return iter(range(samples, len(single)))
    return islice(iter(sampler), batches, None) if batches else iter(sampler)


# ---- what samplers draw from ----


def _generators(sampler: Any) -> list[torch.Generator]:
    found = [getattr(s, "generator", None) for s in (sampler, single_sampler(sampler))]
    return list({id(g): g for g in found if isinstance(g, torch.Generator)}.values())


def _random_states(sampler: Any) -> list[str]:
    """The states of torch's global generator and of those that the sampler holds."""
    states = [torch.get_rng_state(), *(g.get_state() for g in _generators(sampler))]
    return [base64.b64encode(state.numpy().tobytes()).decode() for state in states]


@contextmanager
def _drawing_as_then(sampler: Any, draws: list[str] | None) -> Iterator[None]:
    """Let the sampler draw what it drew when `draws` was taken. Its own generators move on with it;
    torch's global one is as before."""
    if draws is None:
        yield
        return
    before = torch.get_rng_state()
    restore_generators(sampler, draws)
    torch.set_rng_state(_tensor(draws[0]))
    try:
        yield
    finally:
        torch.set_rng_state(before)


def restore_generators(sampler: Any, draws: list[str]) -> None:
    """Set the generators that the sampler holds to the states that `draws` has of them."""
    for generator, state in zip(_generators(sampler), draws[1:], strict=True):
        generator.set_state(_tensor(state))


def _tensor(state: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(state)), dtype=torch.uint8)


def is_random_state(text: Any) -> bool:
    """Whether this is the state of a generator, as a state of a loader holds it."""
    try:
        torch.Generator().set_state(_tensor(text))
    except (TypeError, ValueError, RuntimeError):
        return False
    return True
