"""Promises:
- With lmdb, 8 threads read 2,048 right records if the environment is opened early, and 8 processes if it is opened at
  the first sample.
- lmdb transactions and cursors that are open at `iter()` are refused, and the error names their place.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.compat.eight_workers import PAIRS, Holder, Pairs, filled, library, refused, wrong_pairs

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

lmdb = library("lmdb")

IN_PROCESSES = {"worker_method": "process"}
"""An environment can be open only once in a process."""

READING = {"readonly": True, "lock": False, "readahead": False, "meminit": False}


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Return an environment of `PAIRS` records."""
    path = tmp_path / "records"
    with lmdb.open(str(path), map_size=2**26) as env, env.begin(write=True) as txn:
        for i in range(PAIRS):
            txn.put(key(i), filled(i).numpy().tobytes())
    return path


def key(index: int) -> bytes:
    return b"%08d" % index


class Records(Pairs):
    """A record of an environment that is opened at the first sample."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.env: Any = None

    def open(self) -> None:
        if self.env is None:
            self.env = lmdb.open(self.path, **READING)

    def read(self, index: int) -> Any:
        self.open()
        with self.env.begin() as txn:
            return txn.get(key(index))

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return filled(self.read(index)), filled(index)


def test_an_environment_opened_at_the_first_sample(store: Path) -> None:
    assert wrong_pairs(Records(store), **IN_PROCESSES) == 0


class ByCursor(Records):
    """A record found by a cursor, which is the reader's own and has a position."""

    cursor: Any = None

    def read(self, index: int) -> Any:
        self.open()
        if self.cursor is None:
            self.cursor = self.env.begin().cursor()
        assert self.cursor.set_key(key(index))
        return self.cursor.value()


def test_a_cursor_opened_after_the_environment(store: Path) -> None:
    records = ByCursor(store)
    records.open()
    assert wrong_pairs(records) == 0
    records.env.close()


@pytest.mark.parametrize("kind", ["txn", "cursor"])
def test_what_is_open_is_refused(store: Path, kind: str) -> None:
    records = Records(store)
    records.open()
    txn = records.env.begin()
    records.transform = Holder(**{kind: txn if kind == "txn" else txn.cursor()})
    with refused(rf"dataset\.transform\.{kind}"):
        wrong_pairs(records, worker_method="thread")
    records.transform = None
    txn.abort()
    records.env.close()
