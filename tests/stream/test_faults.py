"""Promises:
- A source, a `decode` or a model that fails ends the stream with its error.
- No answer gets the key of another message.
- A model that breaks makes no message poison, and a message without an answer is never acknowledged.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import fastload
from fastload.errors import WorkerCrashError
from fastload.stream import Message
from fastload.stream.batches import MessageBatches
from tests.contracts.sources import LONG, double
from tests.stream.test_predict import Queue, to_tensor


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("wrong", [("k", 1.0), b"k", 3])
def test_a_source_that_yields_no_message_is_named_after_the_answers_before(
    wrong: Any, num_workers: int
) -> None:
    class Source(Queue):
        def __iter__(self) -> Iterator[Any]:
            for k in range(40):
                yield wrong if k == 17 else Message(k, k)

    source = Source()
    answers = fastload.predict(
        double, source, decode=to_tensor, batch_size=4, max_wait_ms=LONG, num_workers=num_workers
    )
    got: list[tuple[Any, float]] = []
    with pytest.raises(TypeError, match="Source must yield fastload.stream.Message, got"):
        got.extend((key, y.item()) for key, y in answers)
    assert got == [(k, 2.0 * k) for k in range(17)]
    assert source.acknowledged == [*range(17)]


def test_a_reader_that_crashes_is_an_error_after_the_answers_before() -> None:
    """SystemExit passes `except Exception`."""

    class Source(Queue):
        def __iter__(self) -> Iterator[Message]:
            for k in range(17):
                yield Message(k, k)
            raise SystemExit(3)

    source = Source()
    answers = fastload.predict(double, source, decode=to_tensor, batch_size=4, max_wait_ms=LONG)
    got: list[tuple[Any, float]] = []
    with pytest.raises(RuntimeError, match="SystemExit"):
        got.extend((key, y.item()) for key, y in answers)
    assert got == [(k, 2.0 * k) for k in range(17)]
    assert source.acknowledged == [*range(17)]


def test_a_worker_that_crashes_ends_the_stream_with_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A fault of fastload ends a worker, and nothing is acknowledged."""

    def faulty(given: MessageBatches, *arguments: Any) -> None:
        raise MemoryError("no memory to decode a message")

    monkeypatch.setattr(MessageBatches, "_decode_at", faulty)
    source = Queue([*range(20), None])
    answers = fastload.predict(double, source, decode=to_tensor, batch_size=4, max_wait_ms=LONG)
    with pytest.raises(WorkerCrashError) as caught:
        list(answers)
    assert isinstance(caught.value.__cause__, MemoryError)
    assert source.acknowledged == []
