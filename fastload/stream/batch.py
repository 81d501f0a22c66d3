"""A batch of messages, from the first one that arrives to its data."""

from __future__ import annotations

from time import perf_counter
from typing import Any

from fastload.random.keys import StreamKeys
from fastload.stream.message import Message

_KEYS = StreamKeys(0, 0)


class MessageBatch:
    """A batch of messages. The lock of `MessageBatches` owns it until it is made, except samples and failures.

    A position of these belongs to the worker that decodes it. Later all belong to the thread that collates, and to the
    loop once the batch is made.

    Args:
        first: the number of its first message in the stream.

    Attributes:
        messages: in the order of the source.
        samples: what they were decoded to, by position. If the model fails on the batch, it gets each of them alone.
        failures: the errors of those that could not be decoded, by position.
        data: the batch of all others.
        error: that of `collate_fn`, if there is no `data`.
    """

    def __init__(self, first: int) -> None:
        self.first = first
        self.arrived = perf_counter()
        self.messages: list[Message] = []
        self.samples: dict[int, Any] = {}
        self.failures: dict[int, Exception] = {}
        self.left = 0  # messages that are not decoded yet
        self.closed = False  # whether it gets no more messages
        self.made = False
        self.data: Any = None
        self.error: Exception | None = None

    def stream_key(self, at: int | None, *, seeded: bool = True) -> int:
        """Return the key of the random stream of the message at a position, or of `collate_fn` if `at` is None."""
        make, number = (_KEYS.batch, self.first) if at is None else (_KEYS.sample, self.first + at)
        return make(number, number, seeded=seeded)
