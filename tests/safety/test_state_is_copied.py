"""Promise: State that a sample stores in the dataset, a transform or a `collate_fn` is never seen by another worker.
This includes draws, indices, buffers, file positions, closures, partials and caches.

Two workers read a sample each, in a forced order: the first stores its value, the second stores its value, the first
reads, the second reads. Workers that share the state give the first sample the second's value. Where else state may be
held is in tests/safety/test_random_graphs.py.
"""

# ruff: noqa: SIM115 (files that stay open are the subject)

from __future__ import annotations

import functools
import io
import warnings
import zipfile
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import Dataset

import fastload
from tests.fakes import Sequencer


class InTurn(Sequencer):
    """Lets sample 0 store first, sample 1 store second, sample 0 read third and sample 1 read last.

    It works across copies, because all of them share it.
    """

    fastload_per_worker = ()

    def storing(self, index: int) -> AbstractContextManager[None]:
        return self(index)

    def reading(self, index: int) -> AbstractContextManager[None]:
        return self(2 + index)

    def __deepcopy__(self, memo: object) -> InTurn:
        return self  # `copy.deepcopy` refuses locks


class TwoSamples(Dataset[Any]):
    """The samples 0 and 1, each read by a worker of its own."""

    def __init__(self) -> None:
        self.in_turn = InTurn()

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Any:
        return index


def as_it_is(sample: Any) -> Any:
    return sample


def assert_samples(dataset: Any, wanted: list[Any], **options: Any) -> None:
    """Read the two samples in two workers: they are those that are wanted, and nothing is warned of."""
    arguments = {"batch_size": None, "collate_fn": as_it_is, "num_workers": 2, **options}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with fastload.DataLoader(dataset, **arguments) as loader:
            got = list(loader)
    assert (got, [str(warning.message) for warning in said]) == (wanted, [])


# ---- a buffer ----


class Collating:
    """Collects a batch in a buffer of its own."""

    def __init__(self) -> None:
        self.in_turn, self.buffer = InTurn(), np.zeros(1, int)

    def __call__(self, samples: list[int]) -> list[int]:
        (index,) = samples
        with self.in_turn.storing(index):
            self.buffer[0] = 100 + index
        with self.in_turn.reading(index):
            return self.buffer.tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("held", ["attribute", "closure", "partial"])
def test_a_buffer_of_collate_fn(held: str) -> None:
    collate = Collating()
    collate_fn = {
        "attribute": collate,
        "closure": lambda samples: collate(samples),
        "partial": functools.partial(Collating.__call__, collate),
    }[held]
    assert_samples(TwoSamples(), [[100], [101]], batch_size=1, collate_fn=collate_fn)


# ---- files ----

LINES = ["first line\n", "second line\n"]
PLACES = (0, len(LINES[0]))


class Lines(TwoSamples):
    """Seeks, then reads a line, in files that are open already. Of an archive too."""

    def __init__(self, files: list[Any]) -> None:
        super().__init__()
        self.files = files

    def __getitem__(self, index: int) -> list[str]:
        with self.in_turn.storing(index):
            for file in self.files:
                if isinstance(file, zipfile.ZipFile):
                    info = file.infolist()[index]
                    file.fp.seek(info.header_offset + 30 + len(info.filename))  # type: ignore[union-attr]
                else:
                    file.seek(PLACES[index])
        with self.in_turn.reading(index):
            lines = [getattr(file, "fp", file).readline() for file in self.files]
        return [line if isinstance(line, str) else line.decode() for line in lines]


def test_files_opened_early(tmp_path: Path) -> None:
    path = tmp_path / "lines.txt"
    path.write_text("".join(LINES))
    with zipfile.ZipFile(tmp_path / "lines.zip", "w") as archive:
        for line in LINES:
            archive.writestr(line, line)
    with ExitStack() as stack:
        files: list[Any] = [
            open(path),
            open(path, "rb"),
            open(path, "rb", buffering=0),
            io.TextIOWrapper(open(path, "rb")),
            io.BytesIO(path.read_bytes()),
            io.StringIO(path.read_text()),
            zipfile.ZipFile(tmp_path / "lines.zip"),
        ]
        for file in files:
            stack.enter_context(file)
        assert_samples(Lines(files), [[line] * len(files) for line in LINES])
        for file in files[:-1]:
            file.seek(0)
            assert len(file.readlines()) == 2, "the original reads on"
        assert [files[-1].read(info).decode() for info in files[-1].infolist()] == LINES
