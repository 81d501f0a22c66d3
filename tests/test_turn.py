"""Promise: Workers that decode one stream take its samples one at a time, and none waits for a batch that is full."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from fastload.read_ahead import Turn
from fastload.window import Window
from tests.promises.reading import wait_until


class Waiting:
    """A turn that the test has taken, and two threads that wait for it until they are let off."""

    def __init__(self) -> None:
        self.turn = Turn(Window(1))
        assert self.turn.enter(lambda: False)
        self.off = [False, False]
        self.pool = ThreadPoolExecutor(2)
        self.entered: list[Future[bool]] = []
        for k in range(2):
            self.entered.append(self.pool.submit(self.turn.enter, lambda k=k: self.off[k]))
            self.wait_for_line(k + 1)

    def wait_for_line(self, n: int) -> None:
        wait_until(lambda: len(self.turn._line._turns) == n, f"{n} threads are in line")

    def close(self) -> None:
        self.off = [True, True]
        self.turn.close()


@pytest.fixture
def waiting() -> Iterator[Waiting]:
    waiting = Waiting()
    yield waiting
    waiting.close()
    waiting.pool.shutdown()


def test_threads_come_in_one_at_a_time_in_their_order(waiting: Waiting) -> None:
    waiting.turn.leave()
    assert waiting.entered[0].result(30)
    waiting.wait_for_line(1)
    assert not waiting.entered[1].done()
    waiting.turn.leave()
    assert waiting.entered[1].result(30)


def test_a_thread_that_is_let_off_takes_no_turn(waiting: Waiting) -> None:
    assert not waiting.turn.enter(lambda: True)
    waiting.off[0] = True
    waiting.turn.tell()
    assert not waiting.entered[0].result(30)
    waiting.wait_for_line(1)
    waiting.turn.leave()
    assert waiting.entered[1].result(30)


@pytest.mark.parametrize("told_first", [True, False])
def test_a_turn_that_goes_to_a_thread_just_let_off_is_not_lost(
    waiting: Waiting, told_first: bool
) -> None:
    waiting.off[0] = True
    steps = [waiting.turn.tell, waiting.turn.leave]
    for step in steps if told_first else reversed(steps):
        step()
    assert not waiting.entered[0].result(30)
    assert waiting.entered[1].result(30)


def test_close_lets_off_those_that_wait_and_those_that_come(waiting: Waiting) -> None:
    waiting.close()
    assert not any(entered.result(30) for entered in waiting.entered)
    assert not waiting.turn.enter(lambda: True)
