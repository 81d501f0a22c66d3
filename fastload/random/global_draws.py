"""Python's, NumPy's and torch's global random states: notice draws from them, save and restore them."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable
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


class GlobalDraws:
    """Notices draws from a global random state that is not routed, in runs of one thread.

    It compares the state before and after, for some 50 us. The loop may draw meanwhile, so only the first four runs
    count, and only if the state changed in each.

    Args:
        noticed: the set to which the warning of `shared_draws` is added.
        module: "python" or "numpy".
    """

    def __init__(self, noticed: set[str], module: str) -> None:
        self._noticed = noticed
        self._state: Callable[[], Any] = _numpy_state if module == "numpy" else random.getstate
        self._name = "NumPy's" if module == "numpy" else "Python's"
        self._looks = self._changes = 0
        self._before: Any = None

    def begin(self) -> None:
        """Begin to look, before user code runs."""
        self._before = self._state()

    def end(self) -> None:
        """Stop looking, after user code ran, and add a warning about draws to `noticed`."""
        self._looks += 1
        self._changes += self._before != self._state()
        if self._changes == self._looks == 4:
            self._noticed.add(shared_draws(f"{self._name} global random state"))


def _numpy_state() -> bytes:
    return pickle.dumps(np.random.get_state(legacy=False))  # users may set any bit generator


def global_states() -> tuple[Any, Any, Any]:
    """Return Python's, NumPy's and torch's global random states. They can be compared and restored."""
    return random.getstate(), _numpy_state(), torch.default_generator.get_state().numpy().tobytes()


def restore_global_states(states: tuple[Any, Any, Any]) -> None:
    """Set Python's, NumPy's and torch's global random states to what `global_states()` returned."""
    python, numpy, of_torch = states
    random.setstate(python)
    np.random.set_state(pickle.loads(numpy))
    torch.default_generator.set_state(torch.tensor(bytearray(of_torch), dtype=torch.uint8))
