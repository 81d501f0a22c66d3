"""Promises:
- Commands compute with threads of their own and keep the order. They hold a bounded number of results, and of bytes.
- A command that ends early begins nothing more, and leaves no thread.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from fastload._kit import pool
from fastload._kit.pool import in_order


def test_the_results_are_in_order_also_if_a_later_one_is_there_first() -> None:
    first = threading.Event()

    def compute(number: int) -> int:
        if number == 0:
            assert first.wait(30)
        if number == 3:
            first.set()
        return -number

    with in_order(compute, range(20), 2) as results:
        assert list(results) == [-number for number in range(20)]


def test_all_threads_work_at_once_and_with_none_the_caller_does() -> None:
    together = threading.Barrier(3)
    with in_order(lambda _: together.wait(30), range(3), 3) as results:
        assert sorted(results) == [0, 1, 2]
    with in_order(lambda _: threading.current_thread(), range(3), 0) as threads:
        assert set(threads) == {threading.current_thread()}


def counted(asked: list[int], stop: int = 1000) -> Iterator[int]:
    for number in range(stop):
        asked.append(number)
        yield number


@pytest.mark.parametrize(
    ("threads", "ahead", "begun"), [(2, None, 4), (2, 7, 7), (3, 3, 3), (0, 5, 1)]
)
def test_a_bounded_number_is_begun_and_not_taken(
    threads: int, ahead: int | None, begun: int
) -> None:
    asked: list[int] = []
    with in_order(str, counted(asked), threads, ahead=ahead) as results:
        assert asked == []
        for taken in range(50):
            assert next(results) == str(taken)
            assert len(asked) == taken + begun


def test_a_bounded_number_of_bytes_is_begun_and_not_taken() -> None:
    asked: list[int] = []
    sizes = [10] * 40 + [1000] * 40 + [10] * 800

    def begun(results: Iterator[bytes], count: int) -> int:
        """Take results, and return how many more are begun."""
        nonlocal taken
        for _ in range(count):
            assert len(next(results)) == sizes[taken]
            taken += 1
        return len(asked) - taken

    taken = 0
    small = counted(asked, len(sizes))
    with in_order(
        lambda number: bytes(sizes[number]), small, 2, ahead=30, nbytes=len, max_bytes=5000
    ) as results:
        assert begun(results, 1) == 1, "one for each thread, until a size is known"
        assert begun(results, 38) == 29, "as many as `ahead` says"
        assert begun(results, 39) <= 5, "5 of 1000 bytes"
        assert begun(results, 600) == 29, "as many as `ahead` says, after a while"


@pytest.mark.parametrize("threads", [0, 2])
def test_an_error_comes_in_its_place(threads: int) -> None:
    def items() -> Iterator[int]:
        yield from (3, 2, 1)
        raise OSError("no more")

    with in_order(lambda number: 6 // number, items(), threads) as results:
        assert [next(results) for _ in range(3)] == [2, 3, 6]
        with pytest.raises(OSError, match="no more"):
            next(results)
    with in_order(lambda number: 6 // number, (3, 2, 0, 1), threads) as results:
        assert [next(results) for _ in range(2)] == [2, 3]
        with pytest.raises(ZeroDivisionError):
            next(results)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_the_end_of_the_block_waits_for_calls_in_progress_and_drops_the_others(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    done: list[int] = []
    begun, dropped = threading.Event(), threading.Event()

    class Pool(ThreadPoolExecutor):
        def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
            super().shutdown(wait=False, cancel_futures=cancel_futures)
            dropped.set()
            super().shutdown(wait)

    def compute(number: int) -> None:
        if number == 1:
            begun.set()
            assert dropped.wait(30)
        done.append(number)

    monkeypatch.setattr(pool, "ThreadPoolExecutor", Pool)
    with pytest.raises(error), in_order(compute, counted(asked), 1, ahead=5) as results:
        next(results)
        assert begun.wait(30)
        raise error
    assert asked == [0, 1, 2, 3, 4]
    assert done == [0, 1]
