"""The state that a sampler's indices depend on, as JSON values, and a checksum of the indices that it gives.

A sampler can repeat its indices if it draws from torch's global generator or from generators in its attributes, or if
it has a `state_dict()`. The checksum tells if it gives others.
"""

from __future__ import annotations

import base64
import copy
import json
import re
import struct
import zlib
from collections.abc import Iterator, Sized
from contextlib import suppress
from random import Random
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DistributedSampler

from fastload._kit.torch_private import is_default_generator
from fastload._kit.user_errors import shown
from fastload.errors import StateError
from fastload.order.sampler import RankSampler
from fastload.order.state import keeps_state, load_into
from fastload.random import passes

RandomStates = dict[str, Any]
_END = object()
_NUMPYS = np.random.Generator, np.random.RandomState


def single_sampler(sampler: Any) -> Any:
    """Return the sampler of single indices under a batch sampler of torch's."""
    return sampler.sampler if isinstance(sampler, BatchSampler) else sampler


def rank_sampler(sampler: Any) -> RankSampler | None:
    """Return the `RankSampler` under a batch sampler, or itself, or None: an order that a loader can plan."""
    single = single_sampler(sampler)
    return single if isinstance(single, RankSampler) else None


def generators(sampler: Any) -> list[Any]:
    """Return the generators of torch, NumPy and `random` in the sampler's attributes, but not their global ones."""
    found = {
        id(x): x
        for s in (sampler, single_sampler(sampler))
        for x in (getattr(s, "generator", None), *getattr(s, "__dict__", {}).values())
        if type(x) is Random  # a subclass may have no state, as SystemRandom
        or isinstance(x, _NUMPYS)
        or (isinstance(x, torch.Generator) and not is_default_generator(x))
    }
    # NumPy's functions are methods of its global RandomState.
    return [g for g in found.values() if g is not getattr(np.random.rand, "__self__", None)]


def random_states(sampler: Any, *, keyed: bool) -> RandomStates:
    """Return the states of torch's global generator (None if the sampler's draws are keyed), and of the sampler's."""
    return {
        "torch": None if keyed else _text(torch.get_rng_state()),
        "generators": [_state_of(g) for g in generators(sampler)],
    }


def restore_random_states(sampler: Any, states: RandomStates) -> None:
    """Set torch's global generator and the sampler's to what `random_states` returned."""
    if states["torch"] is not None:
        torch.set_rng_state(_tensor(states["torch"]))
    restore_generators(sampler, states)


def restore_generators(sampler: Any, states: RandomStates) -> None:
    """Set the generators that the sampler holds to what `random_states` returned."""
    for generator, state in zip(generators(sampler), states["generators"], strict=True):
        _set_state(generator, state)


def _keeper(sampler: Any) -> Any:
    """Return the sampler with a `state_dict()`, or None: `sampler` itself, or the one that it batches."""
    # Not torchdata's StatefulDistributedSampler: after a load it continues by itself, and its state after an epoch is
    # empty. It needs no state, because it draws from its seed and its epoch, like torch's.
    both = (sampler, single_sampler(sampler))
    return next((s for s in both if keeps_state(s) and not isinstance(s, DistributedSampler)), None)


def own_state(sampler: Any) -> Any:
    """Return the sampler's `state_dict()` as JSON values, None if it has none, or the StateError to be raised."""
    if (keeper := _keeper(sampler)) is None:
        return None
    try:
        return json.loads(json.dumps(keeper.state_dict()))
    except StateError as exc:
        return exc
    except Exception as exc:
        error = StateError(
            f"sampler_state: JSON cannot hold what state_dict() of {type(keeper).__name__} returned "
            f"({type(exc).__name__}: {shown(exc, str)}). Return numbers, strings, lists and dicts from it"
        )
        error.__cause__ = exc
        return error


def restore_own_state(sampler: Any, state: Any) -> None:
    """Load a copy of what `own_state` returned."""
    keeper = _keeper(sampler)
    if not (keeper is None or state is None or isinstance(state, StateError)):
        load_into(keeper, copy.deepcopy(state), "sampler_state")


def checksum(given: Any, before: int) -> int:
    """Return the CRC-32 of an index or a batch of indices from a sampler, continued from `before`."""
    indices: Any = given if isinstance(given, Sized) else [given]
    try:
        raw = struct.pack(f"<{len(indices)}q", *indices)  # four times as fast as array and NumPy
    except (TypeError, struct.error):
        # Without addresses in memory: they differ in another process.
        raw = re.sub(r" at 0x[0-9a-fA-F]+", "", shown(given)).encode(errors="replace")
    return zlib.crc32(raw, before)


def checksum_of_next(indices: Iterator[Any], count: int, before: int) -> int:
    """Return the checksum of the next `count` elements of `indices`, continued from `before`.

    Skip an element that raises: its error counted as a batch too. At the end, count the end.
    """
    for _ in range(count):
        with suppress(Exception):
            if (given := next(indices, _END)) is _END:
                return checksum(None, before)
            before = checksum(given, before)
    return before


def _state_of(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return _text(generator.get_state())
    if isinstance(generator, Random):
        return passes.python_state(generator)
    legacy = isinstance(generator, np.random.RandomState)
    state = generator.get_state(legacy=False) if legacy else generator.bit_generator.state
    return json.loads(json.dumps(state, default=np.ndarray.tolist))


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(_tensor(state))
    elif isinstance(generator, Random):
        passes.set_python_state(generator, state)
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(state)
    else:
        generator.bit_generator.state = state


def _text(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _tensor(state: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(state)), dtype=torch.uint8)
