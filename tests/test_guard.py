"""Promise: SIGINT and SIGTERM within two seconds of the first are one request to end. Another SIGTERM never ends at
once, a later SIGINT does.

Each place that takes signals has a test of its own: `tests/train/test_train.py`, `tests/submit/test_ends_of_jobs.py`,
`tests/flow/test_runner.py`, `tests/stream/test_predict_command.py` and `tests/parameters/test_serve.py`.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from fastload._kit.guard import Request, asked_to_end, forwarding

BOTH = (signal.SIGINT, signal.SIGTERM)
LATER = "fastload._kit.guard.TOGETHER_S"


@pytest.fixture(autouse=True)
def _handlers_are_put_back() -> Iterator[None]:
    before = [signal.getsignal(number) for number in BOTH]
    yield
    assert [signal.getsignal(number) for number in BOTH] == before


@pytest.mark.parametrize("first", BOTH)
@pytest.mark.parametrize("second", BOTH)
def test_signals_of_two_seconds_are_one_request(
    first: int, second: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr("fastload._kit.guard.time.monotonic", lambda: now)
    request = Request()
    assert request.takes(first)
    assert request.number == first
    now = 102.0
    assert not request.takes(second)
    assert request.takes(signal.SIGUSR1), "it asks for something else"
    now = 102.1
    assert request.takes(second) == (second == signal.SIGINT)
    assert request.number == first


def test_each_end_is_asked_for_once() -> None:
    asked: list[int] = []
    for _ in range(2):  # a later block has a request of its own
        with asked_to_end(asked.append) as request:
            for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
                signal.raise_signal(number)
            assert request.number == signal.SIGTERM
    assert asked == [signal.SIGTERM] * 2


def test_a_later_sigint_ends_at_once_and_a_later_sigterm_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(LATER, -1.0)
    asked: list[int] = []
    with asked_to_end(asked.append):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
    assert asked == [signal.SIGINT]


def test_blocks_in_one_another_have_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank of `fastload train` has a block for the command and one for its steps."""
    outer: list[int] = []
    inner: list[int] = []
    with asked_to_end(outer.append) as request:
        with asked_to_end(inner.append) as same:
            signal.raise_signal(signal.SIGTERM)
        assert same is request
        signal.raise_signal(signal.SIGTERM)  # it comes while the results are written
        monkeypatch.setattr(LATER, -1.0)
        with asked_to_end(inner.append), pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert (outer, inner) == ([], [signal.SIGTERM])


def test_a_launcher_gets_each_request_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    with forwarding(sent.append):
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
            signal.raise_signal(number)
        monkeypatch.setattr(LATER, -1.0)
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            signal.raise_signal(number)
    assert sent == [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR1, signal.SIGINT]
