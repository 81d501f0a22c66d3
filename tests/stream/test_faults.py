"""Promises:
- A source, a `decode` or a model that fails ends the stream with its error.
- No answer gets the key of another message.
- A model that breaks makes no message poison, and a message without an answer is never acknowledged.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import fastload
from fastload.errors import WorkerCrashError
from fastload.stream import Message
from fastload.stream.batches import Batches
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

    def faulty(given: Batches, *arguments: Any) -> None:
        raise MemoryError("no memory to decode a message")

    monkeypatch.setattr(Batches, "_decode_at", faulty)
    source = Queue([*range(20), None])
    answers = fastload.predict(double, source, decode=to_tensor, batch_size=4, max_wait_ms=LONG)
    with pytest.raises(WorkerCrashError) as caught:
        list(answers)
    assert isinstance(caught.value.__cause__, MemoryError)
    assert source.acknowledged == []


def test_a_batch_of_poison_only_ends_no_stream() -> None:
    """The model takes items out of its batch: it still gets the last good one whole."""

    def model(batch: dict[str, Tensor]) -> Tensor:
        x = batch.pop("x")
        if (x >= 4).all() and (x < 8).all():
            raise RuntimeError("four to seven")
        return x

    source = Queue([*range(12), None])
    aside: list[Any] = []
    answers = fastload.predict(
        model,
        source,
        decode=lambda value: {"x": torch.tensor(value)},
        batch_size=4,
        max_wait_ms=LONG,
        on_failed=lambda message, error: aside.append((message.key, str(error))),
    )
    assert [y.item() for _, y in answers] == [0, 1, 2, 3, 8, 9, 10, 11]
    assert aside == [(f"k{k}", "four to seven") for k in range(4, 8)]
    assert source.acknowledged == [f"k{k}" for k in range(12)]


def test_a_model_that_raises_stop_iteration_is_named() -> None:
    def model(x: Tensor) -> Tensor:
        raise StopIteration

    with pytest.raises(RuntimeError, match="the model raised StopIteration"):
        list(fastload.predict(model, range(3), decode=to_tensor))


@pytest.mark.parametrize("end", ["stop", "close"])
def test_decode_may_end_the_stream(end: str) -> None:
    def decode(value: int) -> Tensor:
        if value == 3:
            getattr(answers, end)()
        return to_tensor(value)

    answers = fastload.predict(double, range(20_000), decode=decode, batch_size=4, num_workers=2)
    assert len(list(answers)) <= 3 * 4


def test_poison_is_not_logged_as_well(caplog: pytest.LogCaptureFixture) -> None:
    aside: list[Any] = []
    answers = fastload.predict(
        double,
        ["1", "no"],
        decode=lambda v: torch.tensor(float(v)),
        on_failed=lambda *a: aside.append(a),
    )
    with caplog.at_level(logging.DEBUG):
        assert len(list(answers)) == 1
    assert len(aside) == 1
    assert caplog.records == []
