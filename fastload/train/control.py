"""How a signal ends a training run: all ranks between the same two steps."""

from __future__ import annotations

import contextlib
import signal
from types import FrameType, TracebackType
from typing import Any, Self

from fastload.distributed import Control, Vote


class Stopping:
    """Lets SIGINT and SIGTERM end the block between two steps, on all ranks between the same two.

    A rank that gets a signal must not leave alone: the others would wait for its gradients. So each votes
    before every step. The vote is counted one step later, in which it has travelled beside the step's work, and costs
    no wait. A second signal does at once what it would have done outside the block. In the main thread alone.

    A SIGINT that is ignored outside the block stays ignored, as in a job that a shell started in the background.
    SIGTERM is always taken. A job script may ignore it and its ranks inherit that. They must still write their
    checkpoint.
    """

    def __init__(self, control: Control) -> None:
        self._control = control
        self._vote: Vote | None = None
        self._arrived = 0
        self._before: dict[int, Any] = {}

    def asked(self) -> int:
        """The signal on which all ranks stop here, 0 if none. Collective: each rank asks once before every step."""
        if agreed := self._settled():
            return agreed
        vote = self._control.cast(self._arrived)
        if self._control.rank.world_size == 1:
            return vote.result()
        self._vote = vote
        return 0

    def _settled(self) -> int:
        """What the vote under way comes to; 0 without one."""
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
            # Another rank may be gone, and then nobody counts this vote.
            self._vote = None


def signal_name(number: int) -> str:
    """SIGINT for 2, and so on."""
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    return str(number)
