"""How many requests a process has in flight, and who may begin one."""

from __future__ import annotations

import threading
from collections import deque


class Limit:
    """How many requests may be in flight: more while that gets more done in a second, half after throttling.

    By Little's law, what is in flight is the rate times the latency, so a limit that is reached bounds the rate. It is
    changed after rounds of twice as many requests that reached it. A growth by half that brought less than a tenth is
    taken back. It is tried again after `REST` rounds, in which a limit that was halved grows by one each.

    A server that fails at random does not fail less when it is asked less. So the limit is halved only when `MANY` of
    the last requests, by a sliding mean of about `LAST`, were throttled.
    """

    LEAST, FIRST, MOST, REST = 4, 16, 256, 32
    MANY, LAST = 1 / 3, 64
    REQUEST_BYTES = 64 << 10
    """What a request counts beside its bytes: small objects are bounded by requests, large ones by bytes."""

    def __init__(self, now: float) -> None:
        self.allowed = self.FIRST
        self._smaller, self._rate = self.FIRST, 0.0
        self._rest = self._step = 0
        self._halved, self._throttled = now, 0.0
        self._begin(now)

    def _begin(self, now: float) -> None:
        self._began, self._done, self._work, self._full = now, 0, 0, False

    def succeeded(self, nbytes: int, full: bool, now: float) -> None:
        """Count a request that has ended. `full`: as many as allowed were in flight."""
        self._throttled -= self._throttled / self.LAST
        self._done += 1
        self._work += nbytes + self.REQUEST_BYTES
        self._full |= full
        if self._done < 2 * self.allowed:
            return
        rate, full = self._work / max(now - self._began, 1e-9), self._full
        self._begin(now)
        if not full:
            return
        if self._rest:
            self._rest -= 1
            self.allowed = min(self.MOST, self.allowed + self._step)
            if not self._rest:
                self._rate = 0.0  # nothing to compare with: the next round tries
        elif rate < 1.1 * self._rate:
            self.allowed, self._rest, self._step = self._smaller, self.REST, 0
        else:
            self._smaller, self._rate = self.allowed, rate
            self.allowed = min(self.MOST, self.allowed * 3 // 2)

    def throttled(self, sent: float, now: float) -> None:
        """Count a request that was throttled, sent at `sent`. Halve the limit if many were.

        Those in flight when it was halved do not count.
        """
        if sent < self._halved:
            return
        self._throttled += (1 - self._throttled) / self.LAST
        if self._throttled < self.MANY:
            return
        self.allowed = max(self.LEAST, self.allowed // 2)
        self._halved, self._throttled, self._rest, self._step = now, 0.0, self.REST, 1
        self._begin(now)


class Turns:
    """Who may have a request in flight. Its owner's lock is held in each call.

    What a thread waits for may have `limit.allowed` requests in flight, and begins whatever look-ahead does.
    Look-ahead begins while all requests together are fewer.
    """

    def __init__(self, now: float) -> None:
        self.limit = Limit(now)
        self.in_flight = 0
        self.line: deque[threading.Lock] = deque()
        """Callers without a turn. The release of its lock gives each its own."""
        self._asked = 0

    def join(self) -> threading.Lock:
        """Return a lock that is released when the caller has a turn."""
        turn = threading.Lock()
        turn.acquire()
        self.line.append(turn)
        self._grant()
        return turn

    def give_up(self, turn: threading.Lock) -> None:
        """Leave the line. Or end the turn, if it has come."""
        if turn in self.line:
            self.line.remove(turn)
        else:
            self.end(ahead=False)

    def free(self, *, ahead: bool) -> bool:
        """Return whether a thread may begin a request now."""
        if ahead:
            return self.in_flight < self.limit.allowed
        return not self.line and self._asked < self.limit.allowed

    def begin(self, *, ahead: bool) -> None:
        """Count a request that begins."""
        self.in_flight += 1
        self._asked += not ahead

    def end(self, *, ahead: bool) -> None:
        """Count a request that has ended, and give its turn to the next caller."""
        self.in_flight -= 1
        self._asked -= not ahead
        self._grant()

    def _grant(self) -> None:
        while self.line and self._asked < self.limit.allowed:
            self.begin(ahead=False)
            self.line.popleft().release()
