"""Python's, NumPy's and torch's global random states: notice draws from them, save and restore them."""

from __future__ import annotations

import pickle
import random
import sys
from types import FrameType
from typing import Any

import numpy as np
import torch

from fastload.random.python_random import GLOBAL

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
    """Notices draws from Python's and NumPy's global random state in runs of one thread.

    A profile function of the thread sees calls of Python's global generator. It takes the first 10,000 events of a run:
    all of them would cost much in pure Python. If `random` is routed, one way to that generator is left: a method that
    code took from it earlier, and stores outside of modules.

    NumPy's functions cause no profile event. So this compares NumPy's state before and after, for some 50 us. The loop
    may draw meanwhile, so only the first four runs count, and only if the state changed in each.

    Args:
        noticed: the set to which the warnings of `shared_draws` are added.
        numpy: look at NumPy's state too, because NumPy is not routed.
    """

    def __init__(self, noticed: set[str], *, numpy: bool) -> None:
        self._noticed = noticed
        self._looks_at_numpy = numpy
        self._looks = self._changes = self._events = 0
        self._numpy = b""
        self._profiling = False

    def begin(self) -> None:
        """Begin to look, before user code runs."""
        if self._looks_at_numpy:
            self._numpy = _numpy_state()
        if not is_profiled():
            self._profiling, self._events = True, 0
            _set_profile(self._saw)

    def end(self) -> None:
        """Stop looking, after user code ran, and add warnings about draws to `noticed`."""
        if self._profiling:
            _set_profile(None)
            self._profiling = False
        if not self._looks_at_numpy:
            return
        self._looks += 1
        self._looks_at_numpy = self._looks < 4
        self._changes += self._numpy != _numpy_state()
        if self._changes == self._looks == 4:
            self._noticed.add(shared_draws("NumPy's global random state"))

    def _saw(self, frame: FrameType, event: str, argument: Any) -> None:
        self._events += 1
        found = event == "c_call" and getattr(argument, "__self__", None) is GLOBAL
        if found:
            self._noticed.add(shared_draws("Python's global random state"))
        if found or self._events == 10_000:
            _set_profile(None)


def _set_profile(function: Any) -> None:
    """Do as `sys.setprofile`. CPython 3.11 refuses it while another thread is within a call; the next one is free."""
    try:
        sys.setprofile(function)
    except RuntimeError:
        _set_profile(function)


def is_profiled() -> bool:
    """Return whether this thread has a profile function, other than one that `GlobalDraws` left after Ctrl-C."""
    profile = sys.getprofile()
    return profile is not None and getattr(profile, "__func__", None) is not GlobalDraws._saw


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
