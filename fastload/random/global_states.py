"""Python's, NumPy's and torch's global random states: save and restore them."""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


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


@contextmanager
def random_states_kept(needed: bool) -> Iterator[None]:
    """Restore Python's, NumPy's and torch's global random states after the block, if `needed`."""
    if not needed:
        yield
        return
    before = global_states()
    try:
        yield
    finally:
        restore_global_states(before)
