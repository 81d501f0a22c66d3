"""What a sampler draws from: taken as plain JSON values before it draws, and put back to let it draw the same again.

That is torch's global generator, the generators of torch's that the sampler holds, and for samplers that
are not torch's own Python's and NumPy's global ones. A generator of another kind that a sampler holds is
not known here.
"""

from __future__ import annotations

import base64
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

Draws = dict[str, Any]

GLOBAL = {
    "torch": "torch's global random state",
    "numpy": "NumPy's global random state",
    "python": "Python's global random state",
}
"""The states that others draw from too."""

_TORCHS = (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)


def single_sampler(sampler: Any) -> Any:
    """The sampler of single indices under a batch sampler of torch's."""
    return sampler.sampler if isinstance(sampler, BatchSampler) else sampler


def is_torchs(sampler: Any) -> bool:
    """Whether it is known to draw from torch's generators alone, and all that it draws before its first index."""
    return type(sampler) in _TORCHS and type(single_sampler(sampler)) in _TORCHS


def generators(sampler: Any) -> list[torch.Generator]:
    """Those of torch's that the sampler holds."""
    found = [getattr(s, "generator", None) for s in (sampler, single_sampler(sampler))]
    return list({id(g): g for g in found if isinstance(g, torch.Generator)}.values())


def take(sampler: Any) -> Draws:
    """All that `sampler` may draw from, as it is now."""
    return {
        "torch": _text(torch.get_rng_state()),
        "generators": [_text(g.get_state()) for g in generators(sampler)],
        **(dict.fromkeys(("numpy", "python")) if is_torchs(sampler) else _take_foreign()),
    }


def changed(before: Draws, after: Draws) -> Draws:
    """What of `before` something was drawn from since."""
    return {name: state for name, state in before.items() if state != after[name]}


@contextmanager
def drawing_as_then(sampler: Any, draws: Draws | None) -> Iterator[None]:
    """Let the sampler draw in the block what it drew after `draws` was taken.

    Its own generators move on with it; the global ones are as before.
    """
    if draws is None:
        yield
        return
    before = {"torch": _text(torch.get_rng_state()), **_take_foreign()}
    try:
        restore_generators(sampler, draws)
        _restore_global(draws)
        yield
    finally:
        _restore_global(before)


def restore_generators(sampler: Any, draws: Draws) -> None:
    """Set the generators that the sampler holds to the states that `draws` has of them."""
    for generator, state in zip(generators(sampler), draws["generators"], strict=True):
        generator.set_state(_tensor(state))


def are_draws(value: Any, *, held: int) -> bool:
    """Whether this is what `take` gives, of a sampler that holds so many generators."""
    try:
        kept = value["generators"]
        for text in (value["torch"], *kept):
            torch.Generator().set_state(_tensor(text))
        if value["numpy"] is not None:
            np.random.RandomState(0).set_state(_numpys(value["numpy"]))
        if value["python"] is not None:
            random.Random().setstate(_pythons(value["python"]))
    except (TypeError, ValueError, LookupError, OverflowError, RuntimeError):
        return False
    return isinstance(kept, list) and len(kept) == held


def _take_foreign() -> Draws:
    numpys: Any = np.random.get_state(legacy=False)
    _, words, gauss = random.getstate()
    states: Draws = {"numpy": None, "python": [_encoded(np.array(words, "<u4").tobytes()), gauss]}
    if numpys["bit_generator"] == "MT19937":  # users may put another in its place
        key = np.asarray(numpys["state"]["key"], "<u4").tobytes()
        place = numpys["state"]["pos"], numpys["has_gauss"], numpys["gauss"]
        states["numpy"] = [_encoded(key), *place]
    return states


def _restore_global(draws: Draws) -> None:
    torch.set_rng_state(_tensor(draws["torch"]))
    if draws["numpy"] is not None:
        np.random.set_state(_numpys(draws["numpy"]))
    if draws["python"] is not None:
        random.setstate(_pythons(draws["python"]))


def _numpys(state: Any) -> Any:
    key, *place = state
    return ("MT19937", np.frombuffer(base64.b64decode(key), "<u4"), *place)


def _pythons(state: Any) -> Any:
    words, gauss = state
    return (3, tuple(np.frombuffer(base64.b64decode(words), "<u4").tolist()), gauss)


def _encoded(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


def _text(state: torch.Tensor) -> str:
    return _encoded(state.numpy().tobytes())


def _tensor(state: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(state)), dtype=torch.uint8)
