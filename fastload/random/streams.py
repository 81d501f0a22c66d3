"""A random stream for each sample and each batch, from which unmodified transforms draw.

A stream is keyed by (seed, epoch, position, index). So the draws of a sample do not depend on the number of workers
or on timing. An index that comes twice in an epoch draws other numbers. In the thread that reads:

- torch's random functions on the CPU draw from the sample's generator;
- Python's `random` and NumPy's global functions act on generators of the sample, if they are routed;
- the generators that the worker's own dataset holds are keyed again.

Other threads and the global states are not affected. If a module cannot be routed, the loader warns once.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from fastload._kit.integers import integer
from fastload.random import numpy_random, passes, python_random, torch_random
from fastload.random.held import Keyed
from fastload.random.keys import StreamKeys

# Separate what Python's and NumPy's global functions draw in a stream.
_PYTHON, _NUMPY = 0x7079_7468_6F6E_0000, 0x6E75_6D70_7900_0000
_local = threading.local()

MODULES: dict[str, Any] = {"python": python_random, "numpy": numpy_random}
"""The modules with global random functions that can be routed."""

OWNERS = {"python": "Python's", "numpy": "NumPy's", "torch": "torch's"}
"""What a message calls the owner of a global random state."""

ENVIRONMENT = "FASTLOAD_RANDOM_MODULES"
"""The environment variable with the modules to route if a loader has no `random_modules`."""


def chosen_modules(given: Collection[str] | None) -> frozenset[str]:
    """Return which of `MODULES` to route: those given, or those in the environment. Raise ValueError for others."""
    name = "random_modules"
    if given is None:
        name, text = ENVIRONMENT, os.environ.get(ENVIRONMENT, "python,numpy")
        given = () if text == "none" else text.split(",")
    named = isinstance(given, Collection) and not isinstance(given, str)
    if not named or not set(given) <= MODULES.keys():
        raise ValueError(
            f'{name} must name no other modules than "python" and "numpy", got {given!r}'
        )
    return frozenset(given)


def routable(names: Collection[str]) -> frozenset[str]:
    """Return those of `names` that can be routed with the installed versions."""
    return frozenset(name for name in names if MODULES[name].unusable() is None)


class StreamSource(Protocol):
    """Something with random streams. A batch has one for each position, and one for itself (None)."""

    def stream_key(self, at: int | None, *, seeded: bool = True) -> int:
        """Return the 64-bit key of the stream at a position. With `seeded=False` it does not depend on the seed."""


class Stream:
    """The random numbers of the sample or batch that a thread works on. The thread owns it and enters it by `entered`.

    Keys and generators are created only if something draws: about 2 us for torch, 4 us for Python, 10 us for NumPy.

    Args:
        modules: which of `MODULES` draw from this stream while it is entered.
        held: the generators that the dataset holds, which are keyed for each sample.
        keyed: whether the dataset's generators must be keyed, even if it holds none.
        seeded: whether the keys of `held` depend on the seed.
    """

    def __init__(
        self,
        *,
        modules: Collection[str] = (),
        held: Keyed | None = None,
        keyed: bool = False,
        seeded: bool = True,
    ) -> None:
        self.source: StreamSource | None = None
        self.at: int | None = None
        self.stale = True  # whether the generators are those of the previous position
        self.modules = modules
        self.held = held
        self.must_move = held is not None or bool(modules)  # others draw, beside torch
        self.keyed = keyed
        self.seeded = seeded
        self.noticed: set[str] = set()  # warnings about the dataset, without its name
        self._key: int | None = None
        self._pass_key: int | None = None
        self._torch = torch.Generator()
        self._torch_fresh = False
        self._rng: np.random.Generator | None = None
        self._python, self._python_fresh = random.Random(0), False
        self._numpy, self._numpy_fresh = numpy_random.ThreadState(), False

    def move(self, source: StreamSource | None, at: int | None) -> None:
        """Move to a position, and begin its stream."""
        drawn = self._python_fresh  # before a signal handler that draws can change it
        self.source, self.at, self.stale = source, at, True
        if drawn:
            python_random.again()
        if self.held is not None and source is not None:
            self.held.begin(source.stream_key(at, seeded=self.seeded))

    def begin_pass(self, key: int, drawn: dict[str, Any]) -> None:
        """Let the modules draw from one stream from now on, not from one for each sample. A worker process does so too.

        Workers of an iterable dataset may seed once, and draw the same numbers to partition the data. `drawn` is what
        `pass_state` returned in the pass that is continued, or {}.
        """
        self._pass_key = key
        self._python_fresh, self._numpy_fresh = passes.restore(drawn, self._python, self._numpy)
        python_random.again()

    def pass_state(self) -> dict[str, Any]:
        """Return, as JSON values, where Python's and NumPy's generators are in this pass, if it drew from them."""
        python = self._python if self._python_fresh else None
        return passes.state(python, self._numpy if self._numpy_fresh else None)

    def python(self) -> random.Random:
        """Return the generator that `random` functions use here. Between two samples it is the previous sample's."""
        if self.stale and self.source is not None:
            self._refresh()
        if not self._python_fresh:
            self._python.seed(self._module_key() ^ _PYTHON)
            self._python_fresh = True
        return self._python

    def numpy(self) -> numpy_random.ThreadState:
        """Return the state that NumPy's global functions use here. Between two samples it is the previous sample's."""
        if self.stale and self.source is not None:
            self._refresh()
        if not self._numpy_fresh:
            self._numpy.seed(self._module_key() ^ _NUMPY)
            self._numpy_fresh = True
        return self._numpy

    def _module_key(self) -> int:
        return (self._key if self._pass_key is None else self._pass_key) or 0

    def generator(self) -> torch.Generator:
        """Return torch's generator for this position. It is valid until the stream moves on."""
        self._refresh()
        if not self._torch_fresh:
            assert self._key is not None
            # Torch uses only the low 32 bits of a seed. `initial_seed()` has 63, as in a worker process.
            self._torch.manual_seed(self._key & (1 << 63) - 1)
            self._torch_fresh = True
        return self._torch

    def of_sample(self) -> torch.Generator | None:
        """Return `generator()`, or None between two samples: torch then draws from its global generator."""
        return None if self.source is None else self.generator()

    def drawn(self) -> dict[str, Any]:
        """Return what was drawn at this position. With it, a stream of another process draws what comes next here."""
        self._refresh()
        names = ("_key", "_pass_key", "_python_fresh", "_numpy", "_numpy_fresh", "_torch_fresh")
        return {
            **{name: getattr(self, name) for name in (*names, "_rng")},
            "torch": self._torch.get_state() if self._torch_fresh else None,
            "python": self._python.getstate() if self._python_fresh else None,
        }

    def resume(self, drawn: dict[str, Any]) -> None:
        """Go on where a stream of another process was."""
        state = dict(drawn)
        if (torch_state := state.pop("torch")) is not None:
            self._torch.set_state(torch_state)
        if (python_state := state.pop("python")) is not None:
            self._python.setstate(python_state)
        vars(self).update(state)
        if self.source is None:
            self.source = Fixed(drawn["_key"])
        self.stale = False

    def rng(self) -> np.random.Generator:
        """Return NumPy's generator for this position: Philox, with the position's key."""
        self._refresh()
        if self._rng is None:
            self._rng = np.random.Generator(np.random.Philox(key=self._key))
        return self._rng

    def _refresh(self) -> None:
        if self.stale:
            assert self.source is not None
            self._key = self.source.stream_key(self.at)
            self._torch_fresh, self._rng = False, None
            if self._pass_key is None:
                self._python_fresh = self._numpy_fresh = False
            self.stale = False


@dataclass(frozen=True, slots=True)
class Streams:
    """Makes the random stream of each worker, or of the loop if there are no workers.

    `modules`, `keyed` and `seeded` are the arguments of `Stream`.
    """

    modules: frozenset[str]
    keyed: bool
    seeded: bool

    def make(self, generators: Sequence[tuple[str, Any]] | None, *, initialised: bool) -> Stream:
        """Return a worker's stream.

        Args:
            generators: those that the worker's dataset holds; see `Keyed`.
            initialised: whether a `worker_init_fn` ran. It may seed by the worker's id, but what a sample draws must
                not depend on its worker.
        """
        seeded = self.seeded or initialised
        held = None
        if self.keyed and generators:
            held = Keyed(generators, own_state=not seeded)
        return Stream(modules=self.modules, held=held, keyed=self.keyed, seeded=seeded)


# ---- what users call ----


def current_stream() -> Stream | None:
    """Return the stream that this thread has entered, or None."""
    stream: Stream | None = getattr(_local, "stream", None)
    return stream


def _seeded() -> torch.Generator | None:
    """Return the generator that `torch.manual_seed()` seeds in this thread, or None for torch's default one."""
    stream = current_stream()
    return None if stream is None else stream.of_sample()


@contextmanager
def entered(stream: Stream) -> Iterator[None]:
    """Let this thread draw from `stream` in the block. Then restore the previous stream and the held generators."""
    torch_random.install(_seeded)
    for name, module in {**MODULES, "torch": torch_random}.items():
        if reason := module.unusable():
            stream.noticed.add(
                f"may draw from {OWNERS[name]} global random state, which this installation cannot patch per thread: "
                f"{reason}. Such draws are not reproducible. Use fastload.sample_generator() (torch) or "
                "fastload.sample_rng() (NumPy, and instead of Python's random)."
            )
    before = current_stream()
    try:
        try:
            for name in stream.modules:
                MODULES[name].install()
            _enter(stream, stream.modules)
            yield
        finally:
            leave(stream, before)
    finally:
        leave(stream, before)  # again: Ctrl-C may have struck before


def _enter(stream: Stream | None, modules: Collection[str]) -> None:
    _local.entering = True  # so that `leave` knows if Ctrl-C strikes before the end
    _local.stream = stream
    torch_random.enter(None if stream is None else stream.of_sample)
    for name in modules:
        mine = stream is not None and name in stream.modules
        MODULES[name].enter(getattr(stream, name) if mine else None)
    _local.entering = False


def leave(stream: Stream, outer: Stream | None) -> None:
    """Undo what `entered` did: return this thread to the stream `outer`, and restore the held generators.

    Call it again after `entered`: Ctrl-C may have struck while that entered or left. The second call does the rest.
    """
    stream.move(None, None)  # so that it keeps no batch
    if current_stream() is not outer or getattr(_local, "entering", False):
        _enter(outer, stream.modules)
    if stream.held is not None:
        stream.held.restore()


class Fixed:
    """A source with one stream."""

    def __init__(self, key: int) -> None:
        self._key = key

    def stream_key(self, at: int | None, *, seeded: bool = True) -> int:
        """See `StreamSource`."""
        return self._key


@contextmanager
def random_stream(
    *, seed: int, epoch: int, position: int, index: Any, batch: bool = False
) -> Iterator[None]:
    """Draw in the block what a loader with `seed` draws for one sample or batch, so that a loop can repeat it.

    Args:
        seed, epoch: of the loader.
        position: the global position of the sample, or of the first sample of the batch, in the
            order of the epoch: with `RankSampler`, `local position * world_size + rank`.
        index: what the sampler gave for the sample, or for the first sample of the batch.
        batch: enter the stream of a batch, in which `collate_fn` and `__getitems__` run.

    Examples:
        >>> with fastload.random_stream(seed=7, epoch=0, position=5, index=42):
        ...     sample = dataset[42]
        >>> with fastload.random_stream(seed=7, epoch=0, position=5, index=42, batch=True):
        ...     batch = torch.utils.data.default_collate([sample])
    """
    keys = StreamKeys(integer("seed", seed), integer("epoch", epoch))
    make = keys.batch if batch else keys.sample
    stream = Stream(modules=routable(MODULES))
    stream.move(Fixed(make(integer("position", position), index)), None)
    with entered(stream):
        yield


def sample_generator() -> torch.Generator:
    """Return torch's generator for the sample or the batch that this thread works on.

    Torch's random functions draw from the same generator there, so both draw from one stream. Use it only while the
    sample is read. Outside of a loader and of `random_stream`, it is torch's default generator.

    Examples:
        >>> noise = torch.rand(3, generator=fastload.sample_generator())
    """
    return _seeded() or torch.default_generator


def sample_rng() -> np.random.Generator:
    """Return a NumPy generator for the sample or the batch that this thread works on. Creating it takes 10 us.

    Use it for all draws that are not torch's: `rng.random()`, `rng.integers(n)`, `rng.shuffle(list)`. Outside of a
    loader and of `random_stream`, it is a new one, seeded by a draw from torch's default generator.

    Examples:
        >>> angle = fastload.sample_rng().uniform(-10, 10)
    """
    stream = current_stream()
    if stream is None or not stream.source:
        return np.random.default_rng(int(torch.randint(2**63 - 1, ()).item()))
    return stream.rng()
