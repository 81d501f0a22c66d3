"""The state of a loader as plain JSON values: what it and the loader that loads it must agree on, and whether they do.

What of an epoch was delivered, the orders say: `Order.state`.
"""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

from torch.utils.data import DistributedSampler

from fastload.errors import StateError
from fastload.lanes import BEGINNING
from fastload.order import is_random_state, partition, single_sampler
from fastload.sampler import RankSampler

VERSION = 1


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
        about |= {"ends": single.ends, "window": single.window, "run": single.run}
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
    "window": "give the sampler the state's window and run",
    "run": "give the sampler the state's window and run",
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
    drawn = isinstance(draws, list) and len(draws) > 0 and all(map(is_random_state, draws))
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
