"""How a signal stops a training run: all ranks after the same step."""

from __future__ import annotations

import contextlib
import signal
from types import FrameType, TracebackType
from typing import Any, Self

from fastload.distributed import Control, Vote


class Stopping:
    """Lets SIGINT and SIGTERM stop the block after a step, the same step on all ranks. Use it in the main thread only.

    A rank that gets a signal must not stop alone, because the others would wait for its gradients. So each rank votes
    before every step. The vote travels during a step and is counted after it, so no rank waits for it. A second signal
    acts at once, as it would outside the block.

    If SIGINT is ignored outside the block, it stays ignored, as in a job that a shell started in the background.
    SIGTERM is always handled. A job script may ignore it, and its ranks inherit that, but they must still write their
    checkpoint.
    """

    def __init__(self, control: Control) -> None:
        self._control = control
        self._vote: Vote | None = None
        self._arrived = 0
        self._before: dict[int, Any] = {}

    def asked(self) -> int:
        """Return the signal that stops all ranks here, or 0. Collective: each rank calls it once before every step."""
        if agreed := self._settled():
            return agreed
        vote = self._control.cast(self._arrived)
        if self._control.rank.world_size == 1:
            return vote.result()
        self._vote = vote
        return 0

    def _settled(self) -> int:
        """Return the result of the vote in progress, or 0 without one."""
        vote, self._vote = self._vote, None
        return vote.result() if vote is not None else 0

    def __enter__(self) -> Self:
        taken = [signal.SIGTERM]
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            taken.append(signal.SIGINT)
        self._before = {number: signal.signal(number, self._arrive) for number in taken}
        return self

    def _arrive(self, number: int, _: FrameType | None) -> None:
        if self._arrived:
            self._restore()
            signal.raise_signal(number)
        self._arrived = number

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._restore()
        if exc is None:
            self._settled()
        else:
            # Another rank may have ended, and then this vote has no result.
            self._vote = None


def signal_name(number: int) -> str:
    """Return the name of a signal, such as SIGINT for 2."""
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    return str(number)
