"""How a signal stops a training run: all ranks after the same step."""

from __future__ import annotations

import signal
from typing import Any, Self

from fastload._kit.guard import asked_to_end
from fastload.distributed import Control, Vote


class Stopping:
    """Lets SIGINT and SIGTERM stop the block after a step, the same step on all ranks. Use it in the main thread only.

    A rank that gets a signal must not stop alone, because the others would wait for its gradients. So each rank votes
    before every step. The vote travels during a step and is counted after it, so no rank waits for it. Which signals
    are one request, and which one ends at once, is in `fastload._kit.guard`.
    """

    def __init__(self, control: Control) -> None:
        self._control = control
        self._vote: Vote | None = None
        self._block = asked_to_end(lambda number: None)

    def asked(self) -> int:
        """Return the signal that stops all ranks here, or 0. Collective: each rank calls it once before every step."""
        if self._vote is not None and (agreed := self._vote.result()):
            self._vote = None
            return agreed
        self._vote = self._control.cast(self._request.number)
        return self._vote.result() if self._control.rank.world_size == 1 else 0

    def __enter__(self) -> Self:
        self._request = self._block.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._block.__exit__(*raised)
        # After an error, another rank may have ended, and then the vote has no result.
        if self._vote is not None and raised[1] is None:
            self._vote.result()
        self._vote = None


def signal_name(number: int) -> str:
    """Return the name of a signal, such as SIGINT for 2."""
    return signal.Signals(number).name
