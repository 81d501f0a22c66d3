"""`Link`: a client's link to one server. It survives broken connections, and keeps pushes to send them again."""

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
    """The link to one server.

    Attributes:
        incarnation: incarnation of the server that this client knows, or "" before the first contact.
        next: the position in the order of synchronous pushes that the server needs next.
        kept: True if the server has a folder of checkpoints, so that it can be restarted.
        initialised: True if the server had its dense parameters.
        floor: number of the last push that this link no longer keeps, and so cannot send again.
    """

    def __init__(self, number: int, stub: Stub, *, patience_s: float, retained_bytes: int) -> None:
        self.number = number
        self._stub = stub
        self._patience_s = patience_s
        self._bound = retained_bytes
        self.forget()

    def forget(self) -> None:
        """Forget all that this client knows of the server."""
        self.incarnation = ""
        self.next = 0
        self.kept = self.initialised = False
        self.floor = 0
        self._retained: deque[tuple[int, Gradients]] = deque()
        self._bytes = 0

    @property
    def name(self) -> str:
        """The name of the server in errors."""
        return self._stub.name

    def start(self, method: str, arguments: Mapping[str, Any]) -> Callable[[], Answer]:
        """Send a call. Return a function that waits for the answer. It repeats the call if the connection breaks."""
        wait: Callable[[], Answer] | None = None
        error: ParametersError | None = None
        try:
            wait = self._stub.start(method, arguments)
        except ServerGoneError:
            pass  # `finish` repeats it, in parallel with the calls to other servers
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
                        f"{self.name} has not answered for {self._patience_s:g} s: {error}. If it has ended, start it "
                        "again. It resumes from its checkpoint, and the workers send their later pushes again"
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
        """Replace the kept gradients of the newest push, or drop them if `gradients` is None."""
        if self._retained and self._retained[-1][0] == sequence:
            self._bytes -= self._retained.pop()[1].nbytes
        if gradients is not None:
            self.retain(sequence, gradients)

    def saved(self, sequence: int) -> None:
        """Drop the pushes up to this one, because a checkpoint has them."""
        self.floor = max(self.floor, sequence)
        while self._retained and self._retained[0][0] <= sequence:
            self._drop_first()

    def after(self, sequence: int) -> Sequence[tuple[int, Gradients]]:
        """Return the kept pushes after this one."""
        return [push for push in self._retained if push[0] > sequence]

    def _drop_first(self) -> int:
        sequence, gradients = self._retained.popleft()
        self._bytes -= gradients.nbytes
        return sequence
