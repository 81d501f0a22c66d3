"""Threads for commands: a function of many items, with its results in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

from fastload._kit.cores import usable_cores

Item = TypeVar("Item")
Result = TypeVar("Result")


@contextmanager
def in_order(
    function: Callable[[Item], Result],
    items: Iterable[Item],
    threads: int | None,
    *,
    ahead: int | None = None,
    nbytes: Callable[[Result], int] | None = None,
    max_bytes: int = 0,
) -> Iterator[Iterator[Result]]:
    """Yield the results of `function` for each of `items`, in order, which `threads` threads compute.

        with in_order(check, shards, 8) as results:
            for shard, result in zip(shards, results): ...

    An error of `function`, or of `items`, is raised in its place. The end of the block drops all items that no thread
    has begun, and waits for the calls in progress. The caller's thread reads `items`.

    Args:
        threads: number of threads. None: one for each core that this process may use. 0: the caller's thread computes
            each result when it is requested.
        ahead: maximum number of items that are begun and not taken (default: two for each thread).
        nbytes: size of a result in memory. With it, about `max_bytes` of results are begun and not taken, but one
            for each thread at least.
    """
    threads = usable_cores() if threads is None else threads
    if threads == 0:
        yield (function(item) for item in items)
        return
    pool = ThreadPoolExecutor(threads, "fastload-worker")
    most = ahead or 2 * threads

    def results() -> Iterator[Result]:
        begun: deque[Future[Result]] = deque()
        limit = threads if nbytes else most  # no size is known yet
        largest = 1.0
        left: Iterator[Item] | None = iter(items)
        while True:
            while left is not None and len(begun) < limit:
                try:
                    begun.append(pool.submit(function, next(left)))
                except StopIteration:
                    left = None
                except Exception as error:
                    begun.append(Future())
                    begun[-1].set_exception(error)
                    left = None
            if not begun:
                return
            result = begun.popleft().result()
            if nbytes:
                # Only the sizes of results are known. A large one counts for the next 100 or so, which are often large.
                largest = max(nbytes(result), 0.99 * largest)
                limit = max(threads, min(most, int(max_bytes / max(largest, 1))))
            yield result
            del result  # not kept while waiting

    try:
        yield results()
    finally:
        pool.shutdown(cancel_futures=True)
