"""Random numbers of plans: bit for bit those that torchvision's calls draw from the same generator.

The numbers of a packed image are computed from the generator's words, without torch. Each call of torch releases the
GIL. Beside other workers, five such calls cost 25 us for each image, and wake the others for nothing.

Source of the formulas: ATen/core/TransformationHelper.h, DistributionsHelper.h.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import lru_cache
from typing import Protocol

import numpy as np
import torch

from fastload.random.streams import sample_generator

_BITS = 0xFFFFFF  # the bits of a word from which a float32 of [0, 1) is computed
_UNIT = 2.0**-24


class Draws(Protocol):
    """A source of random numbers. Each call uses 32 bits of it."""

    def uniform(self, low: float, high: float) -> float:
        """Return a float32 of [low, high), as `torch.empty(1).uniform_(low, high)` does."""

    def below(self, n: int) -> int:
        """Return a number of [0, n), as `torch.randint(n, ())` does, for n below 2**28."""


class GeneratorDraws:
    """Draws by torch, from a torch.Generator. None is the default generator."""

    def __init__(self, generator: torch.Generator | None) -> None:
        self._generator = generator

    def uniform(self, low: float, high: float) -> float:
        """See `Draws`."""
        _scratch.number.uniform_(low, high, generator=self._generator)
        return float(_scratch.as_number.item())

    def below(self, n: int) -> int:
        """See `Draws`."""
        _scratch.place.random_(0, n, generator=self._generator)
        return int(_scratch.as_place.item())


class WordDraws:
    """Draws from the words of a generator, 32 bits each."""

    def __init__(
        self, word: Callable[[], int], uniform: Callable[[int, float, float], float]
    ) -> None:
        self._word = word
        self._uniform = uniform

    def uniform(self, low: float, high: float) -> float:
        """See `Draws`."""
        return self._uniform(self._word(), low, high)

    def below(self, n: int) -> int:
        """See `Draws`."""
        return self._word() % n


class KeyDraws:
    """Draws from the words of torch's generator, seeded with a key. It belongs to one thread."""

    def __init__(self) -> None:
        twin = np.random.MT19937()  # the algorithm of torch's generator, seeded as torch seeds it
        self._seed = np.random.RandomState(twin).seed
        self._next = twin.random_raw
        uniform = uniform_of_word()
        assert uniform is not None
        self._draws = WordDraws(lambda: int(self._next()), uniform)

    def of(self, key: int) -> Draws:
        """Return the draws of a sample, valid until the next call."""
        self._seed(key & 0xFFFF_FFFF)  # torch uses only these bits
        return self._draws


def sample_draws() -> Draws:
    """Return draws from the stream of this thread's sample, or from torch's default outside of a loader."""
    return GeneratorDraws(sample_generator())


def exp32(x: float) -> float:
    """Return torch's exp of a float32, a float32 within 1 ulp of the true value."""
    return float(torch.tensor(x, dtype=torch.float32, device="cpu").exp_().item())


def fused(word: int, low: float, high: float) -> float:
    """Return the float32 of [low, high) that belongs to a word, rounded once."""
    # In doubles nothing is rounded before the end. The product of two times 24 bits is exact. So is the sum, unless a
    # bound is 2**4 times their distance. Beyond that, one draw in 2**28 might differ in its last bit.
    base, width = base_and_span(low, high)
    return float(np.float32((word & _BITS) * _UNIT * width + base))


def _separate(word: int, low: float, high: float) -> float:
    base, width = base_and_span(low, high)
    return float(np.float32(float(np.float32((word & _BITS) * _UNIT * width)) + base))


@lru_cache(maxsize=64)
def base_and_span(low: float, high: float) -> tuple[float, float]:
    """Return the float32 values from which `low + unit * (high - low)` is computed."""
    base = np.float32(low)
    return float(base), float(np.float32(high) - base)


@lru_cache(maxsize=1)
def uniform_of_word() -> Callable[[int, float, float], float] | None:
    """Return the function by which torch on this machine turns a word into a number. It rounds once or twice.

    This depends on how torch was compiled. Return None if torch does neither: then torch itself must draw.
    """
    generator = torch.Generator()
    words = [int(w) for w in np.random.RandomState(0).randint(2**32, size=256, dtype=np.uint32)]
    for rule in (fused, _separate):
        if all(
            torch.empty(256, dtype=torch.float32, device="cpu")
            .uniform_(*bounds, generator=generator.manual_seed(0))
            .tolist()
            == [rule(word, *bounds) for word in words]
            for bounds in ((0.08, 1.0), (-0.2876820862293243, 0.2876820862293243), (0.3, 0.9))
        ):
            return rule
    return None


class _Scratch(threading.local):
    """A thread's own tensors to draw into, and arrays to read them: creating a tensor costs as much as a draw."""

    def __init__(self) -> None:
        # Outside of inference mode, nothing could be drawn into a tensor that was created in it.
        with torch.inference_mode(mode=False):
            self.number = torch.empty(1, dtype=torch.float32, device="cpu")
            self.place = torch.empty(1, dtype=torch.int64, device="cpu")
        self.as_number, self.as_place = self.number.numpy(), self.place.numpy()


_scratch = _Scratch()
