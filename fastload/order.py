"""What is read next, and what the loop has had: the loop's own side of an epoch, and its state.

A state describes what was *delivered*, as plain JSON values. It is restored by slicing the order where
the order is a function, else by running the sampler again up to there; never by reading samples.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sized
from contextlib import contextmanager
from itertools import chain, islice
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DistributedSampler, SequentialSampler

from fastload.errors import StateError
from fastload.faults import contained, pass_signals
from fastload.fetch import Batch, Fetcher
from fastload.lanes import BEGINNING
from fastload.randomness import StreamKeys
from fastload.sampler import RankSampler
from fastload.telemetry import Recorder

VERSION = 1


class SampledOrder:
    """The batches of one epoch of a map-style data set, in its sampler's order.

    Args:
        sampler: torch's "index sampler": of batches, or without batching of indices.
        fetcher: makes the batches.
        about: what a state must agree on; see `describe`.
        resume: a state that passed `check`: begin behind what it says was delivered.

    Everything here runs on the loop's thread, as in torch: the sampler is user code, and so races
    with nothing.
    """

    def __init__(
        self,
        sampler: Any,
        fetcher: Fetcher,
        *,
        epoch: int,
        rank: int,
        about: dict[str, Any],
        resume: dict[str, Any] | None = None,
    ) -> None:
        self.epoch = epoch
        self.about = about
        self.recorders: list[Recorder] = []  # of this epoch, by worker
        self.exhausted = False  # the sampler has given all that it has
        self._ended = False  # and the loop knows
        self._fetcher = fetcher
        self._sampler = sampler
        self._rank, self._world_size = rank, about["world_size"]
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
        """Fix the random streams; from now on the sampler may be asked."""
        self.seed = seed
        self.recorders = recorders
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
        """The loop has had `batch`, its data or its error."""
        self._ahead[batch.ordinal] = batch.position + batch.size
        while self._batches in self._ahead:
            self._delivered_to = self._ahead.pop(self._batches)
            self._batches += 1

    def end(self) -> None:
        """The loop has been told that there is no more."""
        self._ended = True
        if self._draws is not None:
            self._draws = _random_states(self._sampler)

    def state(self) -> dict[str, Any]:
        """What was delivered; see `DataLoader.state_dict`."""
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
            **self.about,
            "stream_seed": self.seed,
            "epoch": self.epoch,
            "batches": self._batches,
            "position": position,
            "ahead": ahead,
            "ahead_on_rank": self._rank if ahead else None,
            "ended": self._ended,
            "draws": self._draws,
        }


def fresh_state(epoch: int, about: dict[str, Any]) -> dict[str, Any]:
    """The state of a loader of which nothing was asked yet."""
    place: dict[str, Any] = {
        "batches": 0,
        "position": 0,
        "ahead": [],
        "ahead_on_rank": None,
        "draws": None,
    }
    if about["kind"] == "iterable":
        place = {"turn": 0, "lanes": [BEGINNING] * max(1, about["workers"])}
    return {**about, "stream_seed": None, "epoch": epoch, "ended": False, **place}


def describe(loader: Any) -> dict[str, Any]:
    """What a state and the loader that loads it must agree on, as JSON values."""
    common = {"version": VERSION, "seed": loader.seed}
    if loader.iterable:
        return {
            **common,
            "kind": "iterable",
            "workers": loader.num_workers,
            "world_size": 1,
            "global_batch": loader.batch_size,
            "drop_last": loader.drop_last,
        }
    sampler = loader._index_sampler
    single = single_sampler(sampler)
    batch = getattr(sampler, "batch_size", None) if loader._auto_collation else 1
    _, world_size = partition(sampler, loader.dataset)
    counted = isinstance(single, RankSampler | DistributedSampler) or not isinstance(single, Sized)
    about = {
        **common,
        "kind": "map-style",
        "samples": len(loader.dataset) if isinstance(loader.dataset, Sized) else None,
        "sampler": type(single).__name__,
        "sampler_length": None if counted else len(single),
        "world_size": world_size,
        "global_batch": batch * world_size if isinstance(batch, int) else None,
        "drop_last": bool(getattr(sampler, "drop_last", False)),
    }
    if isinstance(single, RankSampler | DistributedSampler):
        about |= {"sampler_seed": single.seed, "shuffle": single.shuffle}
    if isinstance(single, RankSampler):
        about["ends"] = single.ends
    return about


_REMEDIES = {
    "version": "use the fastload that made the state",
    "kind": "load it into a loader of the same kind of data set",
    "seed": "make the loader with the state's seed",
    "samples": "load it with the data set that it was made on",
    "sampler": "give the loader the same kind of sampler",
    "sampler_length": "give the loader the sampler that the state was made with",
    "sampler_seed": "give the sampler the state's seed",
    "shuffle": "give the sampler the state's shuffle",
    "ends": "give the sampler the state's ends",
    "drop_last": "make the loader with the state's drop_last",
    "global_batch": "choose the batch size so that batch size x ranks is the state's",
    "workers": "make the loader with the state's num_workers",
}


def check(state: Any, about: dict[str, Any], *, rank: int) -> None:
    """Raise `StateError` where a state does not fit a loader: with the field, both values and what to do."""
    if not isinstance(state, dict) or "version" not in state:
        raise StateError(f"this is no state of a fastload loader: {state!r:.100}")
    for field, remedy in _REMEDIES.items():
        theirs, ours = state.get(field), about.get(field)
        if field == "global_batch" and not _strides(about):
            _check_world(state, about)  # first: its remedy is another
        if theirs != ours or type(theirs) is not type(ours):
            raise StateError(f"{field}: the state has {theirs!r}, this loader {ours!r}; {remedy}")
    _check_values(state, about)
    _check_world(state, about)
    if state.get("ahead") and state["ahead_on_rank"] != rank:
        raise StateError(
            f"ahead: the state has batches {state['ahead']} delivered out of order on rank "
            f"{state['ahead_on_rank']}, this loader is of rank {rank}; load the state that the same rank saved"
        )


def _strides(about: dict[str, Any]) -> bool:
    return about.get("sampler") in ("RankSampler", "DistributedSampler")


def _check_world(state: dict[str, Any], about: dict[str, Any]) -> None:
    theirs, ours = state.get("world_size"), about["world_size"]
    if theirs == ours and type(theirs) is int:
        return
    if not _strides(about) or about["global_batch"] is None or type(theirs) is not int:
        raise StateError(
            f"world_size: the state has {theirs!r}, this loader {ours}; use as many ranks: only RankSampler and "
            "DistributedSampler with batches of a fixed size can be resumed by another number of them"
        )
    if state["ahead"]:
        raise StateError(
            f"world_size: the state has {theirs}, this loader {ours}, and batches {state['ahead']} were delivered out "
            "of order on the rank that saved it; resume with the same number of ranks"
        )


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _check_values(state: dict[str, Any], about: dict[str, Any]) -> None:
    """The fields that say where the epoch is: present, of their types, and not at odds with each other."""
    expected: dict[str, tuple[bool, str]] = {
        "epoch": (_is_count(state.get("epoch")), "an integer from 0 to 2**63 - 1"),
        "ended": (type(state.get("ended")) is bool, "true or false"),
        "stream_seed": (
            "stream_seed" in state
            and (state["stream_seed"] in (None, about["seed"]) or _is_count(state["stream_seed"])),
            "the seed, or an integer from 0 to 2**63 - 1 where there is none",
        ),
    }
    begun = state.get("ended") is True
    if about["kind"] == "iterable":
        lanes = state.get("lanes")
        count = max(1, about["workers"])
        if isinstance(lanes, list) and len(lanes) == count and all(map(_is_lane, lanes)):
            begun = begun or any(lane["samples"] for lane in lanes)
        else:
            expected["lanes"] = (False, f"the states of {count} workers")
        turn = state.get("turn")
        expected["turn"] = (_is_count(turn) and turn in range(count), f"an integer below {count}")
    else:
        begun = begun or bool(state.get("batches"))
        expected |= _expected_of_a_sampled(state, about, begun)
    if begun and state.get("stream_seed") is None:
        expected["stream_seed"] = (False, "an integer, as the epoch has begun")
    for field, (good, what) in expected.items():
        if not good:
            value = repr(state[field]) if field in state else "nothing"
            raise StateError(
                f"{field}: the state has {value:.100}, expected {what}; it was changed or cut off: use another one"
            )


def _expected_of_a_sampled(
    state: dict[str, Any], about: dict[str, Any], begun: bool
) -> dict[str, tuple[bool, str]]:
    batches, position, ahead = state.get("batches"), state.get("position"), state.get("ahead")
    most: int | None = None
    if isinstance(batches, int) and about["global_batch"]:
        most = batches * about["global_batch"]
    draws = state.get("draws")
    drawn = isinstance(draws, list) and len(draws) > 0 and all(map(_is_random_state, draws))
    needed = begun and not state.get("ended") and about["sampler"] == "RandomSampler"
    return {
        "batches": (_is_count(batches), "an integer of 0 or more"),
        "position": (
            isinstance(position, int)
            and _is_count(position)
            and (most is None or position <= most),
            "an integer of 0 or more" + ("" if most is None else f", at most {most}"),
        ),
        "ahead": (
            isinstance(ahead, list)
            and all(map(_is_count, ahead))
            and (not ahead or _is_count(state.get("ahead_on_rank"))),
            "a list of the numbers of batches, and their rank",
        ),
        "draws": (
            bool(drawn) or (draws is None and "draws" in state and not needed),
            "the states of torch's random generators",
        ),
    }


def _is_lane(lane: Any) -> bool:
    return (
        isinstance(lane, dict)
        and _is_count(lane.get("samples"))
        and type(lane.get("ended")) is bool
        and "state" in lane
    )


def _is_random_state(text: Any) -> bool:
    try:
        torch.Generator().set_state(_tensor(text))
    except (TypeError, ValueError, RuntimeError):
        return False
    return True


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
