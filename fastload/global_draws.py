"""Python's, NumPy's and torch's global random states: draws from them noticed, the states taken and put back."""

from __future__ import annotations

import pickle
import random
import sys
from types import FrameType
from typing import Any

import numpy as np
import torch


def shared_draws(state: str) -> str:
    """Return what the loader says of samples that draw from `state`, after "the dataset seems to"."""
    return (
        f"draw from {state}, which all threads share: its samples are not reproducible, and a sample that seeds it "
        "twice to repeat a draw may get the draws of another. Draw from fastload.sample_generator() (torch) or "
        'fastload.sample_rng() (NumPy, and instead of Python\'s random), or use worker_method="process".'
    )


class GlobalDraws:
    """Notices draws from Python's and NumPy's global random state, in the runs of one thread that shows it them.

    A call of Python's global generator is seen for certain, by a profile function of this thread. If the module is
    routed, only a method that code took from it before, and keeps in no module, gets there. NumPy's functions make no
    such event: there the state is compared, at some 50 us a look, and as the loop may draw meanwhile, only the first
    four looks, if each saw a change, count.

    Args:
        noticed: where the sentences go, see `shared_draws`.
        numpy: look at NumPy's state, which is not routed.
    """

    def __init__(self, noticed: set[str], *, numpy: bool) -> None:
        self._noticed = noticed
        self._looks_at_numpy = numpy
        self._looks = self._changes = 0
        self._numpy = b""
        self._profiling = False

    def begin(self) -> None:
        """Begin a run of user code."""
        if self._looks_at_numpy:
            self._numpy = _numpy_state()
        if not is_profiled():
            self._profiling = True
            sys.setprofile(self._saw)

    def end(self) -> None:
        """End the run, and put into `noticed` what drew."""
        if self._profiling:
            sys.setprofile(None)
            self._profiling = False
        if not self._looks_at_numpy:
            return
        self._looks += 1
        self._changes += self._numpy != _numpy_state()
        if self._changes == self._looks == 4:
            self._noticed.add(shared_draws("NumPy's global random state"))

    def _saw(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "c_call" and getattr(argument, "__self__", None) is _PYTHONS:
            self._noticed.add(shared_draws("Python's global random state"))


def is_profiled() -> bool:
    """Return whether this thread has a profile function; one that Ctrl-C kept `GlobalDraws` from removing is none."""
    profile = sys.getprofile()
    return profile is not None and getattr(profile, "__func__", None) is not GlobalDraws._saw


_PYTHONS = random.random.__self__  # type: ignore[attr-defined]  # the generator of the module's functions


def _numpy_state() -> bytes:
    return pickle.dumps(
        np.random.get_state(legacy=False)
    )  # users may put any bit generator in place


def global_states() -> tuple[Any, Any, Any]:
    """Python's, NumPy's and torch's global random state, to be compared."""
    return random.getstate(), _numpy_state(), torch.default_generator.get_state().numpy().tobytes()


def restore_global_states(states: tuple[Any, Any, Any]) -> None:
    """Set Python's, NumPy's and torch's global random states to what `global_states()` returned."""
    python, numpy, of_torch = states
    random.setstate(python)
    np.random.set_state(pickle.loads(numpy))
    torch.default_generator.set_state(torch.tensor(bytearray(of_torch), dtype=torch.uint8))
