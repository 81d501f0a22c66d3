"""Promise: With text, TIFF and NumPy files, 8 workers read 2,048 right records, whether a file is opened early or at
the first sample.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.compat.eight_workers import Pairs, filled, library, wrong_pairs

# A file that was opened at the first sample stays open.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")

RECORDS = 64


class Records(Pairs):
    """Records of a file: `opened(path)`, then `read(index)` moves in it."""

    opened: Callable[[Any], Any]

    def __init__(self, path: Path, early: bool) -> None:
        self.path = path
        self.file = self.opened() if early else None

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        if self.file is None:
            self.file = self.opened()
        return self.read(index % RECORDS), self.right(index % RECORDS)

    @abstractmethod
    def read(self, index: int) -> Any:
        """Return the record, read through `self.file`."""

    def right(self, index: int) -> Any:
        return filled(index)

    def close(self) -> None:
        if self.file is not None:
            self.file.close()


class Lines(Records):
    """A line at an offset, as tables of text are read."""

    def opened(self) -> Any:
        return open(self.path, encoding="utf-8")

    def read(self, index: int) -> str:
        self.file.seek(index * 16)
        line: str = self.file.readline()
        return line

    def right(self, index: int) -> str:
        return f"{index:015d}\n"


class Npz(Records):
    def opened(self) -> Any:
        return np.load(self.path)

    def read(self, index: int) -> Any:
        return filled(self.file[f"{index}"].tobytes())


class Pages(Records):
    """A page of an image, by Pillow, which moves to it."""

    def opened(self) -> Any:
        return library("PIL.Image").open(self.path)

    def read(self, index: int) -> Any:
        self.file.seek(index)
        return filled(np.array(self.file).astype(np.int64).tobytes())


class TiffPages(Records):
    """A page of an image, by tifffile."""

    def opened(self) -> Any:
        return library("tifffile").TiffFile(self.path)

    def read(self, index: int) -> Any:
        return filled(self.file.pages[index].asarray().astype(np.int64).tobytes())


def write_npz(path: Path, records: list[bytes]) -> None:
    with path.open("wb") as file:
        np.savez(file, **{f"{i}": np.frombuffer(r, np.int64) for i, r in enumerate(records)})


def write_pages(path: Path, records: list[bytes]) -> None:
    pages = [np.full((8, 8), i, np.uint8) for i in range(len(records))]
    first, *rest = map(library("PIL.Image").fromarray, pages)
    first.save(path, format="TIFF", save_all=True, append_images=rest)


def lines(path: Path, _: list[bytes]) -> None:
    path.write_text("".join(f"{i:015d}\n" for i in range(RECORDS)), encoding="utf-8")


WRITTEN_BY: dict[type[Records], Callable[[Path, list[bytes]], None]] = {
    Lines: lines,
    Npz: write_npz,
    Pages: write_pages,
    TiffPages: write_pages,
}


def written(tmp_path: Path, kind: type[Records]) -> Path:
    path = tmp_path / "records"
    WRITTEN_BY[kind](path, [filled(i).numpy().tobytes() for i in range(RECORDS)])
    if kind is TiffPages:
        library("tifffile")  # here, because a worker cannot skip the test
    return path


@pytest.mark.parametrize("kind", WRITTEN_BY, ids=lambda kind: kind.__name__)
def test_a_file_opened_at_the_first_sample(tmp_path: Path, kind: type[Records]) -> None:
    assert wrong_pairs(kind(written(tmp_path, kind), early=False)) == 0


@pytest.mark.filterwarnings("ignore:This DataLoader will create 8 worker processes")
@pytest.mark.parametrize(
    "kind", [k for k in WRITTEN_BY if k is not Pages], ids=lambda kind: kind.__name__
)
def test_a_file_opened_early(tmp_path: Path, kind: type[Records]) -> None:
    """Each worker has a position of its own, and the dataset's own file keeps its."""
    records = kind(written(tmp_path, kind), early=True)
    records[5]
    assert wrong_pairs(records, worker_method="process") == 0
    found, right = records[7]
    assert np.array_equal(found, right)
    records.close()
