"""What travels in a stream: messages from a source, and answers to a sink."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable


class Message(NamedTuple):
    """One message of a source.

    Attributes:
        key: names the message in errors, in the side list and in sinks with keys. No other message of its source
            has it.
        value: what `decode` gets.
        at: the source's own place, for `acknowledge`.
    """

    key: str
    value: Any
    at: Any = None


@dataclass(frozen=True, slots=True)
class Poison:
    """The value of a message that the source itself could not read. It goes to the side list."""

    text: str
    error: Exception


@runtime_checkable
class Source(Protocol):
    """Where messages come from. A plain iterable is one too: its values are numbered, and nothing is acknowledged."""

    def __iter__(self) -> Iterator[Message]:
        """Yield messages. One thread runs this, and never the loop's. It ends when the input does, or after `stop`."""

    def acknowledge(self, messages: Sequence[Message]) -> None:
        """Take note that the answers of these messages are held. The loop calls this, in the order of the source."""

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
        """End the iteration at the next value."""
        self._stopped = True

    def close(self) -> None:
        """Do nothing."""


class Sink(Protocol):
    """Where answers go."""

    def write(self, answers: Sequence[tuple[Message, Any]]) -> None:
        """Return once the answers are held, so that losing this process loses none of them."""

    def close(self) -> None:
        """Give back connections and files."""


def plain(answer: Any) -> Any:
    """Return an answer as JSON values: tensors and arrays become lists."""
    if hasattr(answer, "tolist"):
        return answer.tolist()
    if isinstance(answer, dict):
        return {str(key): plain(value) for key, value in answer.items()}
    if isinstance(answer, list | tuple):
        return [plain(value) for value in answer]
    return answer
