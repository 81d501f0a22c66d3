"""Promises:
- `predict` answers every message of a stream in order, by size or deadline, and acknowledges it only after its answer
  is held.
- A message that fails (poison) goes aside with its error.
- A source is read only as fast as the model answers.
- `stop` drains the stream: all messages that were read are answered.
- A loop that ends early, or a sink or model that raises, acknowledges nothing, so no message is lost.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fastload
from fastload.errors import PredictError
from fastload.stream import Message
from tests.contracts.sources import LONG, Sources, Stream, double, fail


def to_tensor(value: int) -> Tensor:
    return torch.tensor([float(value)])


class Values(Stream):
    """A plain iterable."""

    is_endless = False

    def __init__(self) -> None:
        self.values: list[int] = []

    @property
    def opening(self) -> str:  # type: ignore[override]
        return repr(self.values)

    def put(self, values: Iterable[int]) -> None:
        self.values += values


class TestIterable(Sources):
    @pytest.fixture
    def stream(self) -> Stream:
        return Values()


class Queue:
    """A source that gives what a test puts into it, and notes what was acknowledged."""

    def __init__(self, values: Iterable[Any] = ()) -> None:
        self.queue: SimpleQueue[Any] = SimpleQueue()
        self.acknowledged: list[str] = []
        self.read = 0
        self.stopped = self.closed = False
        for value in values:
            self.put(value)

    def put(self, value: Any) -> None:
        self.queue.put(value)

    def __iter__(self) -> Iterator[Message]:
        while not self.stopped and (value := self.queue.get()) is not None:
            if isinstance(value, Exception):
                raise value
            self.read += 1
            yield value if isinstance(value, Message) else Message(f"k{value}", value)

    def acknowledge(self, messages: Sequence[Message]) -> None:
        self.acknowledged += [message.key for message in messages]

    def stop(self) -> None:
        self.stopped = True
        self.queue.put(None)

    def close(self) -> None:
        self.closed = True


class List:
    """A sink in memory."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, float]] = []

    def write(self, answers: Sequence[tuple[Message, Any]]) -> None:
        self.rows += [(message.key, answer.item()) for message, answer in answers]

    def close(self) -> None:
        pass


def test_without_decode_the_values_are_the_samples() -> None:
    answers = fastload.predict(double, [torch.tensor(1.0), torch.tensor(2.0)])
    assert [(key, y.item()) for key, y in answers] == [("0", 2.0), ("1", 4.0)]


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (lambda x: x.numpy(), [0.0, 1.0, 2.0]),
        (lambda x: [float(v) for v in x], [0.0, 1.0, 2.0]),
        (lambda x: {"a": x, "b": [1, 2, 3]}, [{"a": k, "b": k + 1} for k in range(3)]),
        (lambda x: (x, {"b": x}), [(k, {"b": k}) for k in range(3)]),
    ],
)
def test_a_model_may_return_arrays_lists_dicts_and_tuples(model: Any, expected: Any) -> None:
    values = [torch.tensor(float(k)) for k in range(3)]
    answers = fastload.predict(model, values, batch_size=3, max_wait_ms=LONG)
    assert [y for _, y in answers] == expected


def test_a_model_that_returns_no_row_for_each_message_is_refused() -> None:
    for outputs in (torch.tensor(1.0), torch.zeros(2, 4), "text", None):
        source = Queue([*range(4), None])
        answers = fastload.predict(
            lambda _, given=outputs: given,
            source,
            decode=to_tensor,
            batch_size=4,
            max_wait_ms=LONG,
            on_failed=fail,
        )
        with pytest.raises(TypeError, match="must return 4 rows, one per message"):
            list(answers)
        assert source.acknowledged == []


def test_a_batch_that_is_not_full_comes_at_its_deadline() -> None:
    source = Queue([1, 2])
    with fastload.predict(double, source, decode=to_tensor, max_wait_ms=50) as answers:
        got = iter(answers)
        assert [next(got)[0], next(got)[0]] == ["k1", "k2"]
        assert source.acknowledged == []
        source.put(3)
        assert next(got)[0] == "k3"
        assert source.acknowledged == ["k1", "k2"], "they are when the next is asked for"
        source.put(None)
        assert list(got) == []
    assert source.acknowledged == ["k1", "k2", "k3"]
    assert source.closed


def bad_decode(value: int) -> Tensor:
    if value % 5 == 3:
        raise ValueError(f"cannot decode {value}")
    return to_tensor(value)


def odd_shape(value: int) -> Tensor:
    return torch.full((2 if value % 5 == 3 else 1,), float(value))


def one_column(x: Tensor) -> Tensor:
    if x.shape[1] != 1:
        raise RuntimeError(f"expected one column, got {x.shape[1]}")
    return x[:, 0] * 2


@pytest.mark.parametrize(("batch_size", "num_workers"), [(1, 0), (64, 3)])
def test_samples_that_do_not_fit_go_aside_in_their_places_and_all_others_are_answered(
    batch_size: int, num_workers: int
) -> None:
    source, sink = Queue([*range(20), None]), List()
    aside: list[tuple[str, str]] = []
    answers = fastload.predict(
        one_column,
        source,
        decode=odd_shape,
        batch_size=batch_size,
        num_workers=num_workers,
        on_failed=lambda message, error: aside.append((message.key, str(error))),
    )
    answers.write_to(sink)
    assert sink.rows == [(f"k{k}", 2.0 * k) for k in range(20) if k % 5 != 3]
    assert [key for key, _ in aside] == ["k3", "k8", "k13", "k18"]
    assert all("one column" in text for _, text in aside)
    assert sorted(source.acknowledged) == sorted(f"k{k}" for k in range(20))
    assert (answers.answered, answers.failed) == (16, 4)


def test_without_on_failed_poison_is_raised_after_the_answers_before_it() -> None:
    source, sink = Queue([*range(20), None]), List()
    answers = fastload.predict(double, source, decode=bad_decode, batch_size=8, max_wait_ms=LONG)
    with pytest.raises(PredictError, match=r"message k3 .*cannot decode 3") as caught:
        answers.write_to(sink)
    assert isinstance(caught.value.__cause__, ValueError)
    assert source.acknowledged == ["k0", "k1", "k2"] == [key for key, _ in sink.rows]


def test_what_the_source_raises_comes_after_the_answers_before_it() -> None:
    source = Queue([0, 1, 2, 3, 4, ConnectionError("broker gone")])
    sink = List()
    answers = fastload.predict(double, source, decode=to_tensor, batch_size=2, max_wait_ms=LONG)
    with pytest.raises(ConnectionError, match="broker gone"):
        answers.write_to(sink)
    assert [key for key, _ in sink.rows] == source.acknowledged == [f"k{k}" for k in range(5)]
    assert source.closed


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_source_is_read_only_as_fast_as_the_loop_answers(num_workers: int) -> None:
    source = Queue(range(1000))
    answers = fastload.predict(
        double, source, decode=to_tensor, batch_size=4, num_workers=num_workers
    )
    got = iter(answers)
    for _ in range(4):
        next(got)
    time.sleep(0.1)  # a reader that read on would have read all
    assert source.read <= 3 * 4
    source.put(None)
    assert len(list(got)) == 996


def test_the_model_is_in_eval_mode_without_gradients_and_the_loop_is_not() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))
            self.dropout = nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            assert not torch.is_grad_enabled()
            assert not self.training
            y: Tensor = self.dropout(x) * self.weight
            return y

    model = Model()
    for _, y in fastload.predict(model, range(10), decode=to_tensor):
        assert torch.is_grad_enabled()
        assert not y.requires_grad
    assert model.training
    assert model.dropout.training
