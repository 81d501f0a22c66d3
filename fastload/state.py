"""The state of a loader as plain JSON values: what it and the loader that loads it must agree on, and whether they do.

What of an epoch was delivered, the orders say: `Order.state`.
"""

from __future__ import annotations

import operator
from typing import Any

from torch.utils.data import BatchSampler, DistributedSampler

from fastload.draws import are_draws, generators, single_sampler
from fastload.errors import StateError
from fastload.lanes import BEGINNING
from fastload.order import partition, position_behind
from fastload.sampler import RankSampler

VERSION = 1


def fresh_state(epoch: int, sampler_epoch: int | None, about: dict[str, Any]) -> dict[str, Any]:
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
    begun = {"stream_seed": None, "epoch": epoch, "sampler_epoch": sampler_epoch, "ended": False}
    return {**about, **begun, **place}


def describe(loader: Any) -> dict[str, Any]:
    """What a state and the loader that loads it must agree on, as JSON values."""
    common = {"version": VERSION, "seed": loader.seed}
    if loader.iterable:
        return {
            **common,
            "kind": "iterable",
            "workers": whole(loader.num_workers),
            "world_size": 1,
            "global_batch": whole(loader.batch_size),
            "drop_last": loader.drop_last,
        }
    sampler = loader._index_sampler
    single = single_sampler(sampler)
    batch = 1 if sampler is single and not loader._auto_collation else sampler_batch(sampler)
    _, world_size = partition(sampler, loader.dataset)
    counted = isinstance(single, RankSampler | DistributedSampler)
    about = {
        **common,
        "kind": "map-style",
        "samples": known_length(loader.dataset),
        "sampler": type(single).__name__,
        "sampler_length": None if counted else known_length(single),
        "generators": len(generators(sampler)),
        "world_size": world_size,
        "global_batch": None if batch is None else batch * world_size,
        "drop_last": bool(getattr(sampler, "drop_last", False)),
    }
    if isinstance(single, RankSampler | DistributedSampler):
        about |= {"sampler_seed": whole(single.seed), "shuffle": bool(single.shuffle)}
    if isinstance(single, RankSampler):
        about |= {"sampler_length": single.length, "ends": single.ends}
        about |= {"window": single.window, "run": single.run}
    return about


def whole(value: Any) -> int | None:
    """`value` as an int, of whatever type of integers; None where it is none."""
    try:
        return operator.index(value)
    except TypeError:
        return None


def known_length(it: Any) -> int | None:
    """`len(it)`; None where it does not say, which torch never asks."""
    try:
        return len(it)
    except Exception:
        return None


def sampler_batch(sampler: Any) -> int | None:
    """The samples of a batch, as its sampler says; None where it does not."""
    return whole(getattr(sampler, "batch_size", None))


_REMEDIES = {
    "version": "use the fastload that made the state",
    "kind": "load it into a loader of the same kind of data set",
    "seed": "make the loader with the state's seed",
    "samples": "load it with the data set that it was made on",
    "sampler": "give the loader the same shuffle, or the same kind of sampler",
    "sampler_length": "give the loader the sampler that the state was made with",
    "generators": "give the loader, or its sampler, a generator where the state's had one and only there",
    "sampler_seed": "give the sampler the state's seed",
    "shuffle": "give the sampler the state's shuffle",
    "ends": "give the sampler the state's ends",
    "window": "give the sampler the state's window and run",
    "run": "give the sampler the state's window and run",
    "drop_last": "make the loader with the state's drop_last",
    "global_batch": "choose the batch size so that batch size x ranks is the state's",
    "workers": "make the loader with the state's num_workers",
}


_MADE_BY = {
    "RankSampler": "shuffle=True with a seed",
    "RandomSampler": "shuffle=True without a seed",
    "SequentialSampler": "shuffle=False",
}
_STRIDING = (RankSampler, DistributedSampler)


def check(state: Any, about: dict[str, Any], *, rank: int, sampler: Any = None) -> None:
    """Raise `StateError` where a state does not fit a loader: with the field, both values and what to do.

    `about` describes the loader, `sampler` is what it asks for indices; of an iterable data set nothing is asked.
    """
    if not isinstance(state, dict) or "version" not in state:
        raise StateError(f"this is no state of a fastload loader: {state!r:.100}")
    for field, remedy in _REMEDIES.items():
        theirs, ours = state.get(field), about.get(field)
        if field in about and field not in state:
            raise StateError(f"{field}: the state has nothing; it was cut off: use another one")
        if field == "global_batch" and not _strides(sampler):
            _check_world(state, about, sampler)  # first: its remedy is another
        if theirs != ours or type(theirs) is not type(ours):
            if field == "sampler":
                theirs, ours = _in_words(theirs), _in_words(ours)
            else:
                theirs, ours = repr(theirs), repr(ours)
            raise StateError(f"{field}: the state has {theirs}, this loader {ours}; {remedy}")
    _check_world(state, about, sampler)
    _check_values(state, about, sampler)
    if state.get("ahead") and state["ahead_on_rank"] != rank:
        raise StateError(
            f"ahead: the state has batches {state['ahead']} delivered out of order on rank "
            f"{state['ahead_on_rank']}, this loader is of rank {rank}; load the state that the same rank saved"
        )


def _in_words(sampler: Any) -> str:
    """The name of a sampler, with the arguments by which a loader makes one itself."""
    made_by = _MADE_BY.get(sampler) if isinstance(sampler, str) else None
    return f"{sampler!r} (or {made_by})" if made_by else repr(sampler)


def _strides(sampler: Any) -> bool:
    return type(single_sampler(sampler)) in _STRIDING


def _is_fixed(sampler: Any) -> bool:
    """Whether a batch holds as many samples as its sampler says; what is not torch's own may say anything."""
    return type(sampler) is BatchSampler or type(sampler) in _STRIDING


def _check_world(state: dict[str, Any], about: dict[str, Any], sampler: Any) -> None:
    theirs, ours = state.get("world_size"), about["world_size"]
    if theirs == ours and type(theirs) is int:
        return
    batch = about["global_batch"] if _strides(sampler) and _is_fixed(sampler) else None
    if batch is None or type(theirs) is not int or theirs < 1 or batch % theirs:
        raise StateError(
            f"world_size: the state has {theirs!r}, this loader {ours}; use as many ranks: only RankSampler and "
            "DistributedSampler with batches of a fixed size can be resumed by another number of them"
        )
    if state.get("ahead"):
        raise StateError(
            f"world_size: the state has {theirs}, this loader {ours}, and batches {state['ahead']} were delivered out "
            "of order on the rank that saved it; resume with the same number of ranks"
        )


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _check_values(state: dict[str, Any], about: dict[str, Any], sampler: Any) -> None:
    """The fields that say where the epoch is: present, of their types, and not at odds with each other."""
    expected: dict[str, tuple[bool, str]] = {
        "epoch": (_is_count(state.get("epoch")), "an integer from 0 to 2**63 - 1"),
        "sampler_epoch": (
            "sampler_epoch" in state
            and (state["sampler_epoch"] is None or _is_count(state["sampler_epoch"])),
            "the sampler's own epoch, or null",
        ),
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
        expected |= _expected_of_a_sampled(state, about, begun, sampler)
    if begun and state.get("stream_seed") is None:
        expected["stream_seed"] = (False, "an integer, as the epoch has begun")
    for field, (good, what) in expected.items():
        if not good:
            value = repr(state[field]) if field in state else "nothing"
            raise StateError(
                f"{field}: the state has {value:.100}, expected {what}; it was changed or cut off: use another one"
            )


def _expected_of_a_sampled(
    state: dict[str, Any], about: dict[str, Any], begun: bool, sampler: Any
) -> dict[str, tuple[bool, str]]:
    batches, position, ahead = state.get("batches"), state.get("position"), state.get("ahead")
    exact: int | None = None
    most: int | None = None
    if isinstance(batches, int):
        exact = position_behind(sampler, about["world_size"], batches)
        if _is_fixed(sampler) and about["global_batch"]:
            most = batches * about["global_batch"]
    where = "an integer of 0 or more" if most is None else f"an integer from 0 to {most}"
    draws = state.get("draws")
    drawn = are_draws(draws, held=about["generators"])
    needed = begun and not state.get("ended") and about["sampler"] == "RandomSampler"
    return {
        "batches": (_is_count(batches), "an integer of 0 or more"),
        "position": (
            isinstance(position, int)
            and _is_count(position)
            and (most is None or position <= most)
            and (exact is None or position == exact),
            where if exact is None else f"{exact}, behind {batches} batches",
        ),
        "ahead": (
            isinstance(ahead, list)
            and all(map(_is_count, ahead))
            and "ahead_on_rank" in state
            and (_is_count(state["ahead_on_rank"]) if ahead else state["ahead_on_rank"] is None),
            "a list of the numbers of batches, and ahead_on_rank their rank",
        ),
        "draws": (
            drawn or (draws is None and "draws" in state and not needed),
            "the states of random generators",
        ),
    }


def _is_lane(lane: Any) -> bool:
    return (
        isinstance(lane, dict)
        and _is_count(lane.get("samples"))
        and type(lane.get("ended")) is bool
        and "state" in lane
    )
