"""Python's, NumPy's and torch's global random states: save and restore them, and warn of draws from them."""

from __future__ import annotations

import pickle
import random
from typing import Any

import numpy as np
import torch

in_worker_process = False
"""Whether this process reads samples for the loop of another one. A worker process sets it."""


def shared_draws(state: str) -> str:
    """Return the warning about samples that draw from `state`, without its beginning "the dataset seems to"."""
    fact = (
        "which all threads share: samples are not reproducible. A sample that seeds that state twice, to repeat a "
        'draw, may get the draws of another (not with worker_method="process" without worker_processes)'
    )
    if in_worker_process:
        fact = "of which each worker has one: a draw depends on which samples that worker has read"
    return (
        f"draw from {state}, {fact}. Draw from fastload.sample_generator() (torch) or fastload.sample_rng() (NumPy, "
        "and instead of Python's random)."
    )


def global_states() -> tuple[Any, Any, Any]:
    """Return Python's, NumPy's and torch's global random states. They can be compared and restored."""
    # Of NumPy's, pickled: users may set any bit generator.
    numpy = pickle.dumps(np.random.get_state(legacy=False))
    return random.getstate(), numpy, torch.default_generator.get_state().numpy().tobytes()


def restore_global_states(states: tuple[Any, Any, Any]) -> None:
    """Set Python's, NumPy's and torch's global random states to what `global_states()` returned."""
    python, numpy, of_torch = states
    random.setstate(python)
    np.random.set_state(pickle.loads(numpy))
    torch.default_generator.set_state(torch.tensor(bytearray(of_torch), dtype=torch.uint8))
