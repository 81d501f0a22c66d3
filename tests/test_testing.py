"""Promise: The fakes in `fastload.testing` do what they say, so that a test can rely on them."""

from __future__ import annotations

import pickle
import threading
import time
from contextlib import suppress

import pytest

import fastload.testing as testing
from fastload import DataLoader
from fastload.testing import FailingDataset, Sequencer, SlowDataset


def test_a_slow_dataset_takes_its_time_and_lets_others_run() -> None:
    dataset = SlowDataset(6, seconds=0.05)
    assert len(dataset) == 6
    started = time.monotonic()
    assert [dataset[index] for index in range(2)] == [0, 1]
    assert time.monotonic() - started >= 0.1
    threads = [threading.Thread(target=dataset.__getitem__, args=(0,)) for _ in range(40)]
    started = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.monotonic() - started < 40 * 0.05 / 2, "the reads held the interpreter"


@pytest.mark.parametrize("error", [ValueError("bad"), KeyboardInterrupt()])
def test_a_failing_dataset_fails_where_it_is_told_to(error: BaseException) -> None:
    """Also a pickled one, whatever becomes of the mapping that the caller gave."""
    failures = {3: error}
    dataset = FailingDataset(SlowDataset(5, seconds=0), failures=failures)
    failures.clear()
    for each in (dataset, dataset, pickle.loads(pickle.dumps(dataset))):
        assert len(each) == 5
        assert [each[index] for index in (0, 1, 2, 4)] == [0, 1, 2, 4]
        with pytest.raises(type(error)) as caught:
            each[3]
        assert caught.value.args == error.args
        assert error.__traceback__ is None, "the frames of the reader must not hang on the dataset"


@pytest.mark.parametrize("order", [[3, 2, 1, 0], [1, 3, 0, 2]])
def test_a_sequencer_forces_the_order(order: list[int]) -> None:
    """Whatever order the threads are started in, and though a block raises."""
    sequencer, passed = Sequencer(), []

    def pass_place(place: int) -> None:
        with suppress(ZeroDivisionError), sequencer(place):
            passed.append(place)
            raise ZeroDivisionError

    threads = [threading.Thread(target=pass_place, args=(place,)) for place in order]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert passed == [0, 1, 2, 3]


def test_a_place_whose_turn_never_comes_says_which_it_waits_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(testing, "_DEADLINE_SECONDS", 0.01)
    sequencer = Sequencer()
    with sequencer(0):
        pass
    with pytest.raises(TimeoutError, match=r"place 2 .* place 1"), sequencer(2):
        pytest.fail("entered out of turn")
    with sequencer(1):
        pass
    with pytest.raises(TimeoutError, match="place 0"), sequencer(0):  # a number is used once
        pytest.fail("entered twice")


def test_the_order_of_a_loaders_workers_can_be_forced() -> None:
    """What it is for: the second sample is read before the first."""
    sequencer, read = Sequencer(), []

    class Backwards(SlowDataset):
        def __getitem__(self, index: int) -> int:
            with sequencer(1 - index):
                read.append(index)
                return super().__getitem__(index)

    (batch,) = DataLoader(Backwards(2, seconds=0), 2, num_workers=2)
    assert batch.tolist() == [0, 1]
    assert read == [1, 0]
