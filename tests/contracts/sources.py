"""What every source and every sink of a stream promises under `fastload.predict`.

Sources:
- Messages come in order, once each, with any number of workers, also those that arrive while it is read.
- A message is acknowledged only after its answer is held: not if the sink or the model raises, or the loop ends. If the
  source remembers, the next one gives exactly the other messages.
- Poison goes aside, and is acknowledged then. The other messages keep their order.
- `stop` wakes a source that waits. What was read is answered, and little more is read.
- After a kill, the next source gives all messages without an answer, unless it is a pipe.

Sinks:
- An answer is held when `write` returns, also if the process is killed then. A second sink loses none.
- An answer that is not JSON names its message, and the sink goes on.

A source joins by a class `TestSource(Sources)` with a fixture `stream`, a sink by `TestSink(Sinks)` with `place`.
"""

from __future__ import annotations

import json
import signal
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fastload
import fastload.stream
from fastload.stream import Message, Source
from fastload.stream.message import Plain
from tests.children import Python, run_python
from tests.promises.reading import wait_until

LONG = 3_600_000.0


class Stream(ABC):
    """Where a test puts integers, for a source to read them."""

    opening: str
    """The expression that makes the source, from the names of `fastload.stream`."""
    is_endless = True
    """The source waits for more messages."""
    comes_again = True
    """The next source gives what was read and has no answer. A pipe takes nothing back."""
    most_read = 3 * 4
    """Messages that are read at most before a batch of four is answered."""
    inherited: Sequence[int] = ()
    """Descriptors that another process needs to open the source."""

    @abstractmethod
    def put(self, values: Iterable[int]) -> None:
        """Put values at the end of the stream."""

    def left(self) -> list[int] | None:
        """Return the values without an acknowledgement, or None if the source does not remember them."""
        return None

    def open(self) -> Any:
        return opened(self.opening)


class Place(ABC):
    """Where a sink writes."""

    opening: str
    keeps_one = False
    """The sink keeps one answer for each key, the last."""

    @abstractmethod
    def held(self) -> list[tuple[str, Any]]:
        """Return keys, as strings, and answers, as another reader finds them."""

    def holds(self, *wanted: tuple[str, Any]) -> bool:
        return sorted(self.held(), key=repr) == sorted(wanted, key=repr)

    def open(self) -> Any:
        return opened(self.opening)


def opened(opening: str) -> Any:
    return eval(opening, {"stream": fastload.stream})


class Noted:
    """A source that notes the keys that it gives, and those that are acknowledged."""

    def __init__(self, source: Any) -> None:
        self._source: Source = source if isinstance(source, Source) else Plain(source)
        self.read: list[Any] = []
        self.acknowledged: list[Any] = []

    def __iter__(self) -> Iterator[Message]:
        for message in self._source:
            self.read.append(message.key)
            yield message

    def acknowledge(self, messages: Sequence[Message]) -> None:
        self.acknowledged += [message.key for message in messages]
        self._source.acknowledge(messages)

    def stop(self) -> None:
        self._source.stop()

    def close(self) -> None:
        self._source.close()


class Held:
    """A sink in memory. It calls `then` with all answers after each batch."""

    def __init__(self, then: Callable[[list[float]], None] = lambda answers: None) -> None:
        self.keys: list[Any] = []
        self.answers: list[float] = []
        self.then = then

    def write(self, answers: Sequence[tuple[Message, Any]]) -> None:
        self.keys += [message.key for message, _ in answers]
        self.answers += [answer.item() for _, answer in answers]
        self.then(self.answers)

    def close(self) -> None:
        pass


def double(x: Tensor) -> Tensor:
    return x * 2


def number(value: Any) -> Tensor:
    return torch.tensor([float(value.read_text() if isinstance(value, Path) else value)])


def poisoned(value: Any) -> Tensor:
    found = number(value)
    if found.item() % 5 == 3:
        raise ValueError("a three")
    return found


def no_fours(x: Tensor) -> Tensor:
    if (x % 5 == 4).any():
        raise RuntimeError("a four")
    return x * 2


def fail(message: Message, error: Exception) -> None:
    raise AssertionError(f"{message} failed: {error!r}")


KILLED = """
import os, signal, sys
import fastload
from tests.contracts.sources import double, number, opened
from fastload.stream import JSONLinesSink

class Killed(JSONLinesSink):
    batches = 0
    def write(self, answers):
        super().write(answers)
        self.batches += 1
        if self.batches == 3:
            os.kill(os.getpid(), signal.SIGKILL)

source = opened(sys.argv[1])
answers = fastload.predict(double, source, decode=number, batch_size=4, num_workers=2)
answers.write_to(Killed(sys.argv[2]))
"""


class Sources:
    """The promises of a source."""

    @pytest.mark.parametrize("num_workers", [0, 1, 3])
    def test_messages_are_answered_in_order_once_each(
        self, stream: Stream, num_workers: int
    ) -> None:
        later = [*range(20, 40)]
        stream.put(range(20))
        if not stream.is_endless:
            stream.put(later)
            later = []

        def more(held: list[float]) -> None:
            stream.put(later)
            later.clear()
            if len(held) == 40:
                answers.stop()

        answers = fastload.predict(
            double, stream.open(), decode=number, batch_size=7, num_workers=num_workers
        )
        answers.write_to(sink := Held(more))
        assert sink.answers == [2.0 * k for k in range(40)]
        assert len(set(sink.keys)) == 40
        assert (answers.answered, answers.failed) == (40, 0)
        assert not stream.left()

    @pytest.mark.parametrize(
        ("end", "batch_size", "batches"),
        [
            *(("sink", 4, 2), ("loop", 4, 2)),
            *(("model", 4, 2), ("model", 1, 2), ("model", 4, 0), ("model", 1, 0)),
        ],
    )
    def test_a_message_is_acknowledged_only_after_its_answer_is_held(
        self, stream: Stream, end: str, batch_size: int, batches: int
    ) -> None:
        """It ends after some batches. A batch of one message that fails looks like poison."""
        stream.put(range(20))
        count, calls = batch_size * batches, 0

        def model(x: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            if end == "model" and calls > batches:
                raise RuntimeError("the end of the model")
            return x * 2

        def write(held: list[float]) -> None:
            assert source.acknowledged == sink.keys[: -batch_size or None]
            if end == "sink" and len(held) > count:
                raise OSError("the end of the sink")

        sink, source = Held(write), Noted(stream.open())
        answers = fastload.predict(
            model, source, decode=number, batch_size=batch_size, max_wait_ms=LONG, on_failed=fail
        )
        if end == "loop":
            for k, (_, answer) in enumerate(answers):
                assert answer.item() == 2.0 * k
                if k == count + 1:
                    break
        else:
            with pytest.raises((RuntimeError, OSError), match=f"the end of the {end}"):
                answers.write_to(sink)
        assert source.acknowledged == source.read[:count]
        answers.close()
        left = stream.left()
        assert left is None or left == [*range(count, 20)]

    def test_poison_goes_aside_and_is_acknowledged_then(self, stream: Stream) -> None:
        stream.put(range(20))
        aside: list[tuple[Any, str]] = []

        def on_failed(message: Message, error: Exception) -> None:
            assert message.key not in source.acknowledged
            aside.append((message.key, str(error)))

        source = Noted(stream.open())
        answers = fastload.predict(
            no_fours,
            source,
            decode=poisoned,
            batch_size=4,
            max_wait_ms=LONG,
            num_workers=3,
            on_failed=on_failed,
        )
        answers.write_to(sink := Held(lambda held: answers.stop() if len(held) == 12 else None))
        assert sink.answers == [2.0 * k for k in range(20) if k % 5 < 3]
        wrong = [(k, "a three" if k % 5 == 3 else "a four") for k in range(20) if k % 5 >= 3]
        assert sorted(aside) == sorted((source.read[k], text) for k, text in wrong)
        assert source.acknowledged == source.read
        assert (answers.answered, answers.failed) == (12, 8)
        assert not stream.left()

    def test_stop_answers_what_was_read_and_leaves_the_rest(self, stream: Stream) -> None:
        stream.put(range(60))
        source = Noted(stream.open())
        answers = fastload.predict(
            double, source, decode=number, batch_size=4, max_wait_ms=LONG, num_workers=2
        )
        answers.write_to(sink := Held(lambda held: answers.stop()))
        count = len(sink.answers)
        assert sink.answers == [2.0 * k for k in range(count)]
        assert sink.keys == source.read == source.acknowledged
        assert 4 <= count <= stream.most_read
        left = stream.left()
        assert left is None or left == [*range(count, 60)]

    def test_stop_wakes_a_source_that_waits(self, stream: Stream) -> None:
        stream.put(range(2))
        source, sink = Noted(stream.open()), Held()
        answers = fastload.predict(double, source, decode=number, batch_size=64, max_wait_ms=LONG)
        runs = threading.Thread(target=answers.write_to, args=(sink,), daemon=True)
        runs.start()
        wait_until(lambda: len(source.read) == 2, "both are read")
        if stream.is_endless:
            assert sink.answers == [], "the batch is not full"
        answers.stop()
        runs.join(10)
        assert not runs.is_alive()
        assert sink.answers == [0.0, 2.0]
        assert source.acknowledged == source.read

    def test_nothing_is_lost_by_a_kill_after_a_write(self, stream: Stream, tmp_path: Path) -> None:
        stream.put(range(40))
        out = tmp_path / "out.jsonl"
        command = ["-c", KILLED, stream.opening, out]
        with Python(command, pass_fds=stream.inherited) as killed:
            assert killed.wait(60) == -signal.SIGKILL
        held = out.read_text().count("\n")
        assert held >= 3
        if stream.comes_again:
            answers = fastload.predict(double, stream.open(), decode=number)
            missing = {2.0 * k for k in range(40)} - _answers(out)
            sink = Held(lambda held: answers.stop() if missing <= {*held} else None)
            answers.write_to(sink)
            assert sink.answers == sorted(sink.answers)
            assert {*sink.answers} | _answers(out) == {2.0 * k for k in range(40)}
        assert _answers(out) == {2.0 * k for k in range(held)}


def _answers(path: Path) -> set[float]:
    return {json.loads(line)["answer"][0] for line in path.read_text().splitlines()}


WRITTEN = """
import os, signal, sys, torch
from fastload.stream import Message
from tests.contracts.sources import opened
opened(sys.argv[1]).write([(Message("k", b""), torch.tensor([1.5, 2.0])), (Message(7, b""), 3)])
os.kill(os.getpid(), signal.SIGKILL)
"""


class Sinks:
    """The promises of a sink."""

    def test_an_answer_is_held_when_write_returns(self, place: Place) -> None:
        sink = place.open()
        given = {
            "a b.jpg": torch.tensor([1.5, 2.0]),
            "topic/0/17": {"p": (1, np.float32(2)), "text": "é"},
            7: torch.tensor(3),
        }
        sink.write([(Message(key, b""), answer) for key, answer in given.items()])
        assert place.holds(
            ("a b.jpg", [1.5, 2.0]), ("topic/0/17", {"p": [1, 2.0], "text": "é"}), ("7", 3)
        )
        sink.close()

    def test_an_answer_that_is_not_json_names_its_message(self, place: Place) -> None:
        sink = place.open()
        for wrong in ([b"bytes"], {1, 2}, {"a": object()}):
            with pytest.raises(TypeError, match="the answer of message 'k' cannot be written"):
                sink.write([(Message("k", b""), wrong)])
        assert place.holds()
        sink.write([(Message("k", b""), 1)])
        assert place.holds(("k", 1))
        sink.close()

    def test_a_second_sink_loses_no_answer(self, place: Place) -> None:
        for answers in ({"a": 1, "b": 2}, {"b": 3, "c": 4}):
            sink = place.open()
            sink.write([(Message(key, b""), answer) for key, answer in answers.items()])
            sink.close()
        replaced = [] if place.keeps_one else [("b", 2)]
        assert place.holds(("a", 1), *replaced, ("b", 3), ("c", 4))

    def test_a_killed_process_loses_no_answer(self, place: Place) -> None:
        assert run_python("-c", WRITTEN, place.opening).returncode == -signal.SIGKILL
        assert place.holds(("k", [1.5, 2.0]), ("7", 3))
