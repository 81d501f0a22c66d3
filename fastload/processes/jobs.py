"""The messages to a worker process, its job as it starts and a ticket for each batch, and the kinds of its answers.

Tickets hold plain values, so that the pickle of each takes some microseconds. So do outcomes, which are the answers.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

from fastload.random.keys import StreamKeys
from fastload.reading.modes import Modes
from fastload.safety import Survey
from fastload.settings import Settings

STARTED, READY, FAILED_SAMPLE, BATCH, BROKEN = range(5)
"""Answers: the process runs, it is ready, it needs `on_error` for a sample, it sends a batch, or its start failed."""

TICKET, HANDLED = range(2)
"""What is sent to it: a batch to read, or what `on_error` chose."""

STACK, DROP, END = b"s", b"d", b"e"
"""Orders beside the tickets: send the stack, drop the tickets up to a number, end."""


class Job(NamedTuple):
    """What a worker process is to do, from its start on."""

    workers: tuple[int, ...]
    """The ids of its workers, each with a thread of its own."""
    seed: int
    """Torch's base seed."""
    modes: Modes
    """Torch's modes in which it reads."""


def named(workers: Sequence[int]) -> str:
    """Return what names these workers in messages: "worker 0" or "workers 0, 1"."""
    return f"worker{'s' * (len(workers) > 1)} {', '.join(map(str, workers))}"


class Sealed:
    """Holds settings. If it is pickled, it stays pickled at the other end until `open`: the worker seeds before that.

    Pickling happens while multiprocessing starts a process, so queues and locks may be in it.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings: Settings | None = settings
        self.generators: list[tuple[str, Any]] | None = None
        """Those of the dataset and of modules, if a fork is to inherit them: looking for them would copy memory."""
        self.survey: Survey | None = None
        """What makes the copies of several workers of a process, if a fork is to inherit it."""
        self._pickle = b""
        self._pickler: ForkingPickler | None = None

    def __getstate__(self) -> bytes:
        # It holds what it has pickled. A generator's state is a tensor that nothing else holds, and its descriptor must
        # be open until the process has started.
        file = io.BytesIO()
        self._pickler = ForkingPickler(file)
        self._pickler.dump(self._settings)
        return file.getvalue()

    def __setstate__(self, state: bytes) -> None:
        self._settings, self.generators, self.survey, self._pickle = None, None, None, state

    def open(self) -> Settings:
        """Return the settings."""
        if self._settings is None:
            self._settings = ForkingPickler.loads(self._pickle)
        return self._settings


class TicketMessage(NamedTuple):
    """A batch that a worker process is to read. It travels as a plain tuple."""

    number: int
    """Of the window. It is unique, and grows."""
    lane: int
    """The worker to which the batch belongs, if the dataset is iterable."""
    keys: StreamKeys | None
    """None if they are those of the ticket before, of this lane. If not, an iterable dataset begins again."""
    epoch: int
    ordinal: int
    position: int
    given: Any
    """What the sampler gave, or what the lane of an iterable dataset needs."""
    segment: tuple[int, int] | None
    nbytes: int
    """Of the segment, whose descriptor comes along if the process does not have it yet; else 0."""
    forget: list[tuple[int, int]]
    """The segments that are never lent again."""


class RaisedInLoop(Exception):
    """Stands for what `on_error` raised, which the loop's process has stored under a number."""
