"""Promise: Each shard is acknowledged once, in any interleaving of claims, beats, acknowledgements and deaths."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from fastload.elastic.protocol import ShardRecord

WORKERS = st.integers(1, 3)
SHARDS = st.integers(0, 3)
MAX_TRIES = 4


class Model(RuleBasedStateMachine):
    """A store of texts, and workers that read and compare-and-set at any moments.

    A worker that is suspected may well be alive: it goes on, and its late changes must fail.
    """

    def __init__(self) -> None:
        super().__init__()
        self.store = dict.fromkeys(range(4), "")
        self.read: dict[tuple[int, int], str] = {}  # what a worker saw before it acts
        self.held: dict[tuple[int, int], ShardRecord] = {}
        self.suspects: set[tuple[int, int]] = set()  # (worker, the one that it takes for dead)
        self.acknowledged: list[int] = []

    def compare_set(self, shard: int, expected: str, desired: str) -> bool:
        if self.store[shard] != expected:
            return False
        self.store[shard] = desired
        return True

    @rule(worker=WORKERS, shard=SHARDS)
    def looks(self, worker: int, shard: int) -> None:
        self.read[worker, shard] = self.store[shard]

    @rule(worker=WORKERS, shard=SHARDS)
    def leases(self, worker: int, shard: int) -> None:
        text = self.read.get((worker, shard), "")
        wanted = ShardRecord.parse(text).leased_by(
            worker, lambda other: (worker, other) in self.suspects, max_tries=MAX_TRIES
        )
        if wanted is not None and self.compare_set(shard, text, str(wanted)):
            self.held.pop((worker, shard), None)
            if wanted.status == "leased":
                self.held[worker, shard] = wanted

    @rule(worker=WORKERS, shard=SHARDS)
    def acknowledges(self, worker: int, shard: int) -> None:
        lease = self.held.pop((worker, shard), None)
        if lease and self.compare_set(shard, str(lease), str(lease.acknowledged())):
            self.acknowledged.append(shard)

    @rule(worker=WORKERS, shard=SHARDS, failed=st.booleans())
    def gives_back(self, worker: int, shard: int, failed: bool) -> None:
        lease = self.held.pop((worker, shard), None)
        if lease:
            self.compare_set(shard, str(lease), str(lease.given_back(failed=failed)))

    @rule(worker=WORKERS, other=WORKERS)
    def suspects_another(self, worker: int, other: int) -> None:
        if worker != other:
            self.suspects ^= {(worker, other)}

    @rule(worker=WORKERS)
    def dies(self, worker: int) -> None:
        for key in [key for key in self.held if key[0] == worker]:
            del self.held[key]

    @invariant()
    def a_shard_is_acknowledged_at_most_once(self) -> None:
        assert len(self.acknowledged) == len(set(self.acknowledged))

    @invariant()
    def what_is_done_was_acknowledged(self) -> None:
        done = {k for k, text in self.store.items() if ShardRecord.parse(text).status == "done"}
        assert done == set(self.acknowledged)

    @invariant()
    def a_failed_shard_had_all_its_tries(self) -> None:
        for text in self.store.values():
            found = ShardRecord.parse(text)
            assert 0 <= found.tries <= MAX_TRIES
            assert found.status != "failed" or found.tries == MAX_TRIES

    def teardown(self) -> None:
        """Any worker that suspects all others can end the epoch."""
        for text in self.store.values():
            found = ShardRecord.parse(text)
            wanted = found.leased_by(9, lambda _: True, max_tries=MAX_TRIES)
            assert (wanted is None) == (found.status in ("done", "failed"))


TestModel = Model.TestCase
TestModel.settings = settings(stateful_step_count=60)


def test_texts_are_read_back() -> None:
    assert str(ShardRecord()) == ""
    assert ShardRecord.parse("") == ShardRecord()
    found = ShardRecord("leased", 3, 2, 128)
    assert ShardRecord.parse(str(found)) == found


@pytest.mark.parametrize("status", ["done", "failed"])
def test_nothing_leaves_an_end(status: str) -> None:
    found = ShardRecord(status, 1, 1)  # type: ignore[arg-type]
    assert found.leased_by(2, lambda _: True, max_tries=9) is None


def test_a_lease_of_a_worker_that_lives_is_left_alone() -> None:
    found = ShardRecord("leased", 1, 1)
    assert found.leased_by(2, lambda _: False, max_tries=3) is None
    taken = found.leased_by(2, lambda _: True, max_tries=3)
    assert taken == ShardRecord("leased", 2, 2)


def test_rows_that_were_trained_before_a_checkpoint_stay_so_in_other_hands() -> None:
    taken = ShardRecord(begin=128).leased_by(1, lambda _: False, max_tries=3)
    assert taken is not None
    assert taken.begin == 128
    assert taken.given_back(failed=True).begin == 128


def test_a_lease_that_was_given_back_in_good_order_is_no_try() -> None:
    taken = ShardRecord().leased_by(1, lambda _: False, max_tries=1)
    assert taken is not None
    again = taken.given_back(failed=False).leased_by(2, lambda _: False, max_tries=1)
    assert again is not None
    assert again.status == "leased"
    failed = taken.given_back(failed=True).leased_by(2, lambda _: False, max_tries=1)
    assert failed is not None
    assert failed.status == "failed"
