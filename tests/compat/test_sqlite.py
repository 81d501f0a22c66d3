"""Promises:
- With sqlite3 and DuckDB, 8 workers read 2,048 right rows by connections that are opened at the first sample or in
  `worker_init_fn`.
- A connection or cursor of sqlite3 or DuckDB that is open at `iter()` is refused, and the error names its place.

A connection belongs to one thread, and a cursor holds the rows of its last query.
"""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import get_worker_info

from tests.compat.eight_workers import PAIRS, Holder, Pairs, filled, library, refused, wrong_pairs

# A connection that was opened at the first sample stays open; Python 3.13 warns of it.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed database:ResourceWarning")

QUERY = "SELECT value FROM records WHERE id = ?"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a database of `PAIRS` rows."""
    path: Path = tmp_path_factory.mktemp("sqlite") / "records.db"
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE records (id INTEGER PRIMARY KEY, value BLOB)")
        rows = ((i, filled(i).numpy().tobytes()) for i in range(PAIRS))
        connection.executemany("INSERT INTO records VALUES (?, ?)", rows)
    return path


class Rows(Pairs):
    """A row by a connection of the reader's own."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.connection: Any = None

    def connect(self) -> None:
        if self.connection is None:
            self.connection = sqlite3.connect(self.path)

    def read(self, index: int) -> bytes:
        self.connect()
        value: bytes = self.connection.execute(QUERY, (index,)).fetchone()[0]
        return value

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return filled(self.read(index)), filled(index)


def test_a_connection_opened_at_the_first_sample(store: Path) -> None:
    assert wrong_pairs(Rows(store)) == 0


def connect_this_worker(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    assert info.dataset.connection is None
    info.dataset.connect()


def test_a_connection_opened_in_worker_init_fn(store: Path) -> None:
    assert wrong_pairs(Rows(store), worker_init_fn=connect_this_worker) == 0


@pytest.mark.parametrize("kind", ["connection", "cursor"])
def test_what_is_open_is_refused(store: Path, kind: str) -> None:
    rows = Rows(store)
    with contextlib.closing(sqlite3.connect(store)) as connection:
        held = connection if kind == "connection" else connection.cursor()
        rows.transform = Holder(**{kind: held})
        with refused(rf"dataset\.transform\.{kind}"):
            wrong_pairs(rows, worker_method="thread")


class DuckRows(Rows):
    """A row of DuckDB, whose connection holds the rows of its last query."""

    def connect(self) -> None:
        duckdb = library("duckdb")
        if self.connection is None:
            self.connection = duckdb.connect(str(self.path), read_only=True)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        self.connect()
        self.connection.execute(QUERY, [index])
        return filled(self.connection.fetchone()[0]), filled(index)


def test_duckdb(tmp_path: Path) -> None:
    path = tmp_path / "records.duckdb"
    with library("duckdb").connect(str(path)) as connection:
        query = f"CREATE TABLE records AS SELECT range AS id, range AS value FROM range({PAIRS})"
        connection.execute(query)
    assert wrong_pairs(DuckRows(path)) == 0
    for kind in ("connection", "cursor"):
        rows = DuckRows(path)
        with library("duckdb").connect(str(path), read_only=True) as connection:
            held = connection if kind == "connection" else connection.cursor()
            rows.transform = Holder(**{kind: held})
            with refused(rf"dataset\.transform\.{kind}"):
                wrong_pairs(rows, worker_method="thread")
