"""Promises:
- Rows of `stats.csv` that several runs write at once are whole.
- A `stats.csv` with another header is refused before training starts. See also `tests/train/test_train.py`.
"""

from __future__ import annotations

import csv
import threading
from pathlib import Path

import pytest

from fastload.train.stats_file import StatsFileError, append_row, check_table
from tests.fakes import limited_files


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_rows_follow_one_header(tmp_path: Path) -> None:
    path = tmp_path / "new" / "stats.csv"
    append_row(path, {"world_size": 1, "model": "a, b", "loss": None})
    append_row(path, {"world_size": 2, "model": 'say "c"', "loss": 0.5})
    assert rows(path) == [
        {"world_size": "1", "model": "a, b", "loss": ""},
        {"world_size": "2", "model": 'say "c"', "loss": "0.5"},
    ]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (
            b"world_size,old\n4,1\n",
            r"stats\.csv.*only in the file: old; only in this run: new.*Move",
        ),
        (b"\x88\xff\n", r"stats\.csv.*ove the file away"),
        (b'"' + b"x" * 200_000, r"stats\.csv.*ove the file away"),
        (b"\n", r"stats\.csv.*ove the file away"),
    ],
    ids=["columns", "bytes", "long", "empty"],
)
def test_a_file_of_another_kind_is_named_and_left_as_it_is(
    tmp_path: Path, content: bytes, said: str
) -> None:
    path = tmp_path / "stats.csv"
    path.write_bytes(content)
    with pytest.raises(StatsFileError, match=said):
        append_row(path, {"world_size": 1, "new": 2})
    with pytest.raises(StatsFileError, match=said):
        check_table(path, ["world_size", "new"])
    assert path.read_bytes() == content


def test_a_row_that_a_crash_cut_off_stays_alone_on_its_line(tmp_path: Path) -> None:
    path = tmp_path / "stats.csv"
    path.write_text("a,b\n1,2\n3,")
    append_row(path, {"a": 5, "b": 6})
    assert path.read_text() == "a,b\n1,2\n3,\n5,6\n"


def test_rows_written_at_once_are_whole_and_have_one_header(tmp_path: Path) -> None:
    path, writers, each = tmp_path / "stats.csv", 8, 20
    start = threading.Barrier(writers)

    def write(number: int) -> None:
        start.wait()
        for row in range(each):
            append_row(path, {"writer": number, "row": row, "long": "x" * 5000})

    threads = [threading.Thread(target=write, args=(number,)) for number in range(writers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = rows(path)
    assert {(row["writer"], row["row"]) for row in found} == {
        (str(writer), str(row)) for writer in range(writers) for row in range(each)
    }
    assert len(found) == writers * each
    assert {row["long"] for row in found} == {"x" * 5000}


def test_a_row_for_which_there_is_no_room_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "stats.csv"
    with limited_files(1000), pytest.raises(OSError, match=r"File too large: .*stats\.csv"):
        append_row(path, {"long": "x" * 5000})
