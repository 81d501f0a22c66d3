"""`Link`: a client's calls to one server. It repeats a call if the connection breaks."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from fastload.errors import ParametersError, ParametersLostError
from fastload.parameters.transport import Answer, ServerGoneError, Stub

_FIRST_NAP_S, _LONGEST_NAP_S = 0.02, 1.0
RESUME = (
    "End all servers and workers, and start them again with the same --checkpoint: they resume from the newest "
    "complete checkpoint"
)


class Link:
    """The link to server `number`.

    Attributes:
        run: the server's own name for its run, or "" before the first contact. A restarted server has another.
    """

    def __init__(self, number: int, stub: Stub, *, patience_s: float) -> None:
        self._number, self._stub, self._patience_s = number, stub, patience_s
        self.run = ""
        self._failed: ParametersError | None = None  # why no call gets an answer any more

    @property
    def name(self) -> str:
        """The server's number and address, for errors."""
        return f"server {self._number} {self._stub.name}"

    def start(self, method: str, arguments: Mapping[str, Any]) -> Callable[[], Answer]:
        """Send a call. Return a function that waits for the answer, and repeats the call if the connection breaks.

        It raises ParametersError if there is no answer for `patience_s`, or if the server refuses the call. It raises
        ParametersLostError if the server has restarted.
        """
        sent = {**arguments, "run": self.run}
        waiting = self._tried(method, sent)
        deadline = time.monotonic() + self._patience_s

        def finish() -> Answer:
            nap, wait = _FIRST_NAP_S, waiting
            while True:
                try:
                    return self._checked(wait())
                except ServerGoneError as error:
                    if time.monotonic() + nap > deadline:
                        self._failed = ParametersError(
                            f"{self.name} has not answered for {self._patience_s:g} s: {error}. {RESUME}"
                        )
                        raise self._failed from error
                time.sleep(nap)
                nap, wait = min(2 * nap, _LONGEST_NAP_S), self._tried(method, sent)

        return finish

    def _tried(self, method: str, sent: Mapping[str, Any]) -> Callable[[], Answer]:
        """Send a call. Return a function that waits for the answer, or raises the error of sending."""
        try:
            if self._failed is not None:
                raise ParametersError(str(self._failed))
            return self._stub.start(method, sent)
        except (ParametersError, ServerGoneError) as error:
            failed = error

        def wait() -> Answer:
            raise failed

        return wait

    def _checked(self, answer: Answer) -> Answer:
        if self.run not in ("", answer["run"]):
            raise ParametersLostError(
                f"{self.name} has restarted, and lacks the pushes since its checkpoint. {RESUME}"
            )
        if "refused" in answer:
            raise ParametersError(f"{self.name}: {answer['refused']}")
        return answer
