"""What travels in a stream: messages from a source, and answers to a sink."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

from torch.utils.data import IterableDataset


class Message(NamedTuple):
    """One message of a source.

    Attributes:
        key: text or a number, which names the message in errors, in the side list and in sinks with keys. No other
            message of its source has it. Folders and Kafka make text of it: to them 7 and "7" are one key.
        value: what `decode` gets.
        at: the source's own place, for `acknowledge`.
    """

    key: str | int | float
    value: Any
    at: Any = None


@dataclass(frozen=True, slots=True)
class Poison:
    """The value of a message that the source itself could not read, or that has failed. It goes to the side list."""

    text: str
    error: Exception


@runtime_checkable
class Source(Protocol):
    """Where messages come from. A plain iterable is one too: its values are numbered, and nothing is acknowledged."""

    def __iter__(self) -> Iterator[Message]:
        """Yield messages. One thread runs this, and never the loop's. It ends when the input does, or after `stop`."""

    def acknowledge(self, messages: Sequence[Message]) -> None:
        """Take note that the answers of these messages are held. The loop calls this, in the order of the source.

        A message that failed is among them, with a `Poison` as its value: `on_failed` has it.
        """

    def stop(self) -> None:
        """End the iteration soon, also one that waits. Any thread may call this, and a signal's handler."""

    def close(self) -> None:
        """Give back connections and files. The loop calls this last."""


class Plain:
    """A plain iterable as a source: its values are numbered. It cannot take a message back."""

    def __init__(self, values: Iterable[Any]) -> None:
        self._values = values
        self._stopped = False

    def __iter__(self) -> Iterator[Message]:
        for number, value in enumerate(self._values):
            if self._stopped:  # `stop()` was called while this value was awaited: drop it
                return
            yield value if isinstance(value, Message) else Message(str(number), value)

    def acknowledge(self, messages: Sequence[Message]) -> None:
        """Do nothing."""

    def stop(self) -> None:
        """End the iteration at the next value: nothing wakes an iterable that waits for one."""
        self._stopped = True

    def close(self) -> None:
        """Do nothing."""


class Messages(IterableDataset[Message]):
    """The messages of a source. One reader thread iterates over it.

    Attributes:
        error: the exception that ended the source. The loop raises it after the answers of all messages before.
    """

    fastload_per_worker = ()

    def __init__(self, source: Source) -> None:
        self._source = source
        self.error: Exception | None = None

    def __iter__(self) -> Iterator[Message]:
        try:
            for message in self._source:
                if not isinstance(message, Message):
                    raise TypeError(
                        f"{type(self._source).__name__} must yield fastload.stream.Message, got {message!r:.200}"
                    )
                yield message
        except Exception as error:
            self.error = error


class Sink(Protocol):
    """Where answers go."""

    def write(self, answers: Sequence[tuple[Message, Any]]) -> None:
        """Return once the answers are held, so that losing this process loses none of them."""

    def close(self) -> None:
        """Give back connections and files."""


def to_json(message: Message, answer: Any) -> str:
    """Return an answer as JSON. Tensors and arrays become lists. NaN and Infinity stay, as Python's json has them.

    Raises TypeError, with the message's key, if the answer has other values.
    """
    try:
        return json.dumps(_plain(answer))
    except TypeError as error:
        raise TypeError(
            f"the answer of message {message.key!r} cannot be written ({error}): let the model return tensors, arrays, "
            "numbers, text, or lists and dicts of these"
        ) from error


def _plain(answer: Any) -> Any:
    if hasattr(answer, "tolist"):
        return answer.tolist()
    if isinstance(answer, dict):
        return {str(key): _plain(value) for key, value in answer.items()}
    if isinstance(answer, list | tuple):
        return [_plain(value) for value in answer]
    return answer
