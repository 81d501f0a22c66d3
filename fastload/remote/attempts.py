"""What a request does until it has an answer: attempts, pauses between them, and errors that say both."""

from __future__ import annotations

import errno
from collections.abc import Callable
from random import SystemRandom
from time import perf_counter
from typing import TypeVar

from fastload.errors import FastloadError, RemoteError
from fastload.remote.backends import Failure, Got
from fastload.remote.lines import Job, Session

PAUSE_SECONDS, LONGER, MOST_SECONDS = 0.02, 5, 20.0
"""The longest first pause, how many times longer each next one is, and the longest of all.

One failure is mostly chance, and is soon repeated. More of one request say that the server needs time.
"""

_jitter = SystemRandom()  # a generator without a state: no seed of the user's is drawn from


T = TypeVar("T")

Count = Callable[[Session, float, Got | Failure, bool], None]
"""Hears of each attempt: when it was sent, what came, and whether it is repeated."""


def attempted(job: Job, call: Callable[[], Got], count: Count) -> Got:
    """Return what `call` brings, after as many attempts as that takes."""
    session, attempt = job.session, 0
    while True:
        attempt += 1
        sent = perf_counter()
        try:
            got = call()
        except FastloadError:
            raise
        except Exception as error:
            failure, cause = session.backend.failure(error), error
        else:
            count(session, sent, got, False)
            _is_the_same(session, job.path, got.etag)
            return got
        again = attempt <= min(session.retries, failure.repeats) and job.users > 0
        count(session, sent, failure, again)
        # Full jitter: threads that failed together come back apart.
        longest = min(MOST_SECONDS, PAUSE_SECONDS * LONGER ** (attempt - 1))
        if not (again and job.pause(_jitter.uniform(0, longest))):
            shown = cause if failure.quotable else None
            raise _error(session, job.path, job.span, failure, attempt) from shown


def once(session: Session, path: str, span: str, call: Callable[[], T]) -> T:
    """Return what `call` brings, whose requests the client retries: a listing has pages, and a large object parts."""
    try:
        return call()
    except FastloadError:
        raise
    except Exception as error:
        failure = session.backend.failure(error)
        cause = error if failure.quotable else None
        raise _error(session, path, span, failure, session.retries + 1) from cause


def _error(session: Session, path: str, span: str, failure: Failure, attempts: int) -> OSError:
    if failure.missing:
        return FileNotFoundError(errno.ENOENT, "No such object", session.name(path))
    tries = f"{attempts} attempt{'s' * (attempts != 1)}"
    return RemoteError(f"{session.name(path)}{span}: {failure.reason} ({tries})")


def _is_the_same(session: Session, path: str, etag: str | None) -> None:
    """Raise if an object is not the one that this store saw first."""
    first = session.etags.setdefault(path, etag) if etag else None
    if first != etag:
        raise RemoteError(
            f"{session.name(path)}: the object has changed since this store first read it: its ETag was {first}, "
            f"and is {etag}. Begin again with what is there now, or put the old object back"
        )
