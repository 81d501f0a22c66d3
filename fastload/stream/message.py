"""Messages of a stream, and the protocols of sources and sinks."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable


class Message(NamedTuple):
    """One message of a source.

    Attributes:
        key: text or a number that names the message in errors, in the side list and in sinks with keys. It must be
            unique in its source. Folders turn it into text: for them, 7 and "7" are the same key.
        value: the input of `decode`.
        at: position in the source, for `acknowledge`.

    Examples:
        >>> fastload.stream.Message("a", [1, 2]).value
        [1, 2]
    """

    key: str | int | float
    value: Any
    at: Any = None


@dataclass(frozen=True, slots=True)
class Poison:
    """The value of a message that the source could not read, or that has failed. It goes to the side list.

    Examples:
        >>> poison = fastload.stream.Poison("{", ValueError("is not JSON"))
    """

    text: str
    error: Exception


@runtime_checkable
class Source(Protocol):
    """A source of messages. A plain iterable also works: its values are numbered, and nothing is acknowledged.

    Examples:
        >>> class Numbers:
        ...     def __iter__(self): return iter([fastload.stream.Message("a", 1)])
        ...     def acknowledge(self, messages): pass
        ...     def stop(self): pass
        ...     def close(self): pass
    """

    def __iter__(self) -> Iterator[Message]:
        """Yield messages, on one thread that is not the loop's. End at the end of the input, or after `stop`."""

    def acknowledge(self, messages: Sequence[Message]) -> None:
        """Record that the sink has the answers of these messages. The loop calls this, in the order of the source.

        Failed messages are among them, after `on_failed` got them. Their value is a `Poison`.
        """

    def stop(self) -> None:
        """End the iteration soon, even if it waits. Any thread or signal handler may call this."""

    def close(self) -> None:
        """Close connections and files. This is the last call. A second one must do nothing."""


class Plain:
    """A plain iterable as a source: its values are numbered. It cannot take a message back."""

    def __init__(self, values: Iterable[Any]) -> None:
        self._values = values
        self._stopped = False

    def __iter__(self) -> Iterator[Message]:
        for number, value in enumerate(self._values):
            if self._stopped:  # `stop()` was called during the wait for this value, so drop it
                return
            yield value if isinstance(value, Message) else Message(str(number), value)

    def acknowledge(self, messages: Sequence[Message]) -> None:
        """Do nothing."""

    def stop(self) -> None:
        """End the iteration at the next value, because nothing wakes an iterable that waits for one."""
        self._stopped = True

    def close(self) -> None:
        """Do nothing."""


class Sink(Protocol):
    """A sink for answers.

    Examples:
        >>> class Printed:
        ...     def write(self, answers): print(answers)
        ...     def close(self): pass
    """

    def write(self, answers: Sequence[tuple[Message, Any]]) -> None:
        """Write the answers, and return when the end of this process can no longer lose them."""

    def close(self) -> None:
        """Close connections and files."""


def to_json(message: Message, answer: Any) -> str:
    """Return an answer as JSON. Tensors and arrays become lists. NaN and Infinity are written as Python's json does.

    Raise TypeError, with the key of the message, if the answer has other values.
    """
    try:
        return json.dumps(_plain(answer))
    except TypeError as error:
        raise TypeError(
            f"the answer of message {message.key!r} cannot be written as JSON ({error}). Let the model return tensors, "
            "arrays, numbers, text, or lists and dicts of these"
        ) from error


def _plain(answer: Any) -> Any:
    if hasattr(answer, "tolist"):
        return answer.tolist()
    if isinstance(answer, dict):
        return {str(key): _plain(value) for key, value in answer.items()}
    if isinstance(answer, list | tuple):
        return [_plain(value) for value in answer]
    return answer
