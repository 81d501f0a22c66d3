"""A variable of a module that holds generators, for the tests beside it."""

from __future__ import annotations

import random

import numpy as np
import torch


class Draws:
    """Has a generator of each kind, as a transform has."""

    def __init__(self) -> None:
        self.rng, self.py, self.torch = np.random.default_rng(), random.Random(), torch.Generator()

    def __call__(self) -> list[float]:
        return [self.rng.random(), self.py.random(), torch.rand((), generator=self.torch).item()]


HELD = Draws()
