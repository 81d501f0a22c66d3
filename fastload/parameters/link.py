"""`Link`: one client's way to one server, which outlasts broken connections, and what was pushed on it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fastload.errors import ParametersError
from fastload.parameters.gradients import Gradients
from fastload.parameters.transport import Answer, ServerGoneError, Stub

_FIRST_NAP_S, _LONGEST_NAP_S = 0.02, 1.0


class NoAnswerError(ParametersError):
    """A server gave no answer for too long."""


class Link:
    """The way to one server.

    Attributes:
        incarnation: of the server that this client has met, "" before that.
        next: the position in the order of synchronous pushes that the server needs next.
        kept: the server has a folder of checkpoints, so it can be restarted.
        initialised: it had its dense parameters.
        floor: the server has, or had in a checkpoint, all pushes up to this one: they cannot be sent again.
    """

    def __init__(self, number: int, stub: Stub, *, patience_s: float, retained_bytes: int) -> None:
        self.number = number
        self._stub = stub
        self._patience_s = patience_s
        self._bound = retained_bytes
        self.forget()

    def forget(self) -> None:
        """Forget all that was said to this server."""
        self.incarnation = ""
        self.next = 0
        self.kept = self.initialised = False
        self.floor = 0
        self._retained: deque[tuple[int, Gradients]] = deque()
        self._bytes = 0

    @property
    def name(self) -> str:
        """What an error calls the server."""
        return self._stub.name

    def start(self, method: str, arguments: Mapping[str, Any]) -> Callable[[], Answer]:
        """Send a call; return what waits for the answer. `call` repeats it if the connection breaks."""
        wait: Callable[[], Answer] | None = None
        error: ParametersError | None = None
        try:
            wait = self._stub.start(method, arguments)
        except ServerGoneError:
            pass  # it is made again below, beside those of other servers
        except ParametersError as refused:
            error = refused

        def finish() -> Answer:
            if error is not None:
                raise error
            if wait is not None:
                try:
                    return wait()
                except ServerGoneError:
                    pass
            return self.call(method, arguments)

        return finish

    def call(self, method: str, arguments: Mapping[str, Any]) -> Answer:
        """Repeat a call until it has an answer. Raise NoAnswerError after `patience_s`."""
        deadline = time.monotonic() + self._patience_s
        nap = _FIRST_NAP_S
        while True:
            try:
                return self._stub.start(method, arguments)()
            except ServerGoneError as error:
                if time.monotonic() + nap > deadline:
                    raise NoAnswerError(
                        f"{self.name} has not answered for {self._patience_s:g} s: {error}. Start that server again. "
                        "It resumes from its checkpoint, and the workers send their later pushes again"
                    ) from error
            time.sleep(nap)
            nap = min(2 * nap, _LONGEST_NAP_S)

    # ---- what was pushed ----

    def retain(self, sequence: int, gradients: Gradients) -> None:
        """Keep a push until it is in a checkpoint. Drop the oldest if all take more than `retained_bytes`."""
        self._retained.append((sequence, gradients))
        self._bytes += gradients.nbytes
        while self._bytes > self._bound and len(self._retained) > 1:
            self.floor = max(self.floor, self._drop_first())

    def replace(self, sequence: int, gradients: Gradients | None) -> None:
        """Keep something else for the newest push, or nothing."""
        if self._retained and self._retained[-1][0] == sequence:
            self._bytes -= self._retained.pop()[1].nbytes
        if gradients is not None:
            self.retain(sequence, gradients)

    def saved(self, sequence: int) -> None:
        """Drop the pushes up to this one: they are in a checkpoint."""
        self.floor = max(self.floor, sequence)
        while self._retained and self._retained[0][0] <= sequence:
            self._drop_first()

    def after(self, sequence: int) -> Sequence[tuple[int, Gradients]]:
        """Return the pushes after this one that are kept."""
        return [push for push in self._retained if push[0] > sequence]

    def _drop_first(self) -> int:
        sequence, gradients = self._retained.popleft()
        self._bytes -= gradients.nbytes
        return sequence
