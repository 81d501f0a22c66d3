"""What `get_worker_info().rng` is in threads."""

from __future__ import annotations

import random

import numpy as np
import torch

from fastload.random.python_random import GLOBAL
from fastload.random.streams import current_stream, sample_generator, sample_rng


class WorkerRng:
    """The generators of the sample that the calling thread works on, by the names that torch gives to a worker's.

    `torch.random.thread_safe_generator()` returns the first. Outside of samples they are the global ones.
    """

    @property
    def torch_generator(self) -> torch.Generator:
        """See `fastload.sample_generator`."""
        return sample_generator()

    @property
    def numpy_generator(self) -> np.random.Generator:
        """See `fastload.sample_rng`."""
        return sample_rng()

    @property
    def random_generator(self) -> random.Random:
        """Python's: the one from which `random.random()` draws, if `random` is routed."""
        stream = current_stream()
        return GLOBAL if stream is None else stream.python()
