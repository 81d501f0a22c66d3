"""Promises:
- Each token of a packed dataset is in one row, at one place. Segments, positions and `cu_seqlens` say which sample it
  belongs to.
- Other keys, such as labels, are packed beside the tokens if they are named, with a padding of their own.
- Long samples are split into segments, truncated or an error. Samples without tokens are in no row.
- Batches of packed rows equal the rows, for threads and processes, and in a resumed epoch.
- A sample of another length than planned is an error that names sample and lengths. An error of the packed dataset
  passes through, with a note that names the row.
- A loader does not resume on rows that were packed from other lengths, or otherwise.

See also `tests/sequences/test_packing.py`.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Dataset

from fastload import DataLoader, sample_rng
from fastload.errors import SequenceError, StateError
from fastload.sequences import Packed
from tests.contracts.filled_rows import FilledRows, Source
from tests.promises.equal import check_same


class Documents(Dataset[Any]):
    """Samples of these lengths. No token occurs twice: those of sample `k` begin at `1000 * k + 1`."""

    def __init__(self, lengths: Sequence[int], kind: str = "array") -> None:
        self.lengths, self.kind = list(lengths), kind

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Any:
        ids = np.arange(1_000 * index + 1, 1_000 * index + 1 + self.lengths[index])
        kinds = {"array": lambda: ids.astype(np.uint32), "list": ids.tolist}
        kinds |= {"tensor": lambda: torch.from_numpy(ids)}
        kinds |= {"dict": lambda: {"text": "ignored", "ids": torch.from_numpy(ids)}}
        return kinds[self.kind]()


class Together(Documents):
    """Is read by `__getitems__` alone."""

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("read one by one")

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        return [super(Together, self).__getitem__(index) for index in indices]


SIZES = [(7 * k) % 31 + 1 for k in range(100)]


class TestRows(FilledRows):
    @pytest.fixture(params=["array", "long"])
    def source(self, request: pytest.FixtureRequest) -> Source:
        longer = 30 if request.param == "long" else 0
        return lambda: Packed(Documents([size + longer for size in SIZES]), 40)


def unpacked(row: dict[str, Any], packed: Packed) -> list[list[int]]:
    """Return the segments of a row, after a check of all that describes them."""
    length, tokens = packed.length, row["tokens"].tolist()
    kinds = {"tokens": torch.int64, "segments": torch.int32, "positions": torch.int64}
    assert {name: row[name].dtype for name in kinds} == kinds
    assert row["cu_seqlens"].dtype is torch.int32
    assert len(row["cu_seqlens"]) == packed.max_segments + 2
    count = int(row["segments"].max())
    ends = row["cu_seqlens"].tolist()
    assert ends[0] == 0
    assert ends[count + 1 :] == [length] * (packed.max_segments + 1 - count)
    parts, segments, positions = [], [], []
    for number in range(count):
        parts.append(tokens[ends[number] : ends[number + 1]])
        segments += [number + 1] * len(parts[-1])
        positions += range(len(parts[-1]))
    padding = length - len(segments)
    assert tokens[len(segments) :] == [packed.pad] * padding
    assert row["segments"].tolist() == segments + [0] * padding
    assert row["positions"].tolist() == positions + [0] * padding
    assert all(parts)
    return parts


LENGTHS = st.lists(st.integers(0, 60), min_size=1, max_size=60).filter(any)


@given(
    LENGTHS,
    st.integers(1, 50),
    st.sampled_from(["split", "truncate"]),
    st.sampled_from(["array", "list", "tensor", "dict"]),
    st.integers(0, 9),
)
def test_every_token_is_in_one_row(
    lengths: list[int], length: int, long: Any, kind: str, seed: int
) -> None:
    dataset = Documents(lengths, kind)
    key = "ids" if kind == "dict" else None
    packed = Packed(dataset, length, key=key, long=long, pad=-7, seed=seed)
    found = [part for row in range(len(packed)) for part in unpacked(packed[row], packed)]
    expected, plain = [], Documents(lengths, "list")
    for index, size in enumerate(lengths):
        kept = size if long == "split" else min(size, length)
        expected += [plain[index][k : min(k + length, kept)] for k in range(0, kept, length)]
    assert sorted(found) == sorted(expected)
    tokens = sum(map(len, expected))
    assert packed.useful_share == tokens / (len(packed) * length)


class Labelled(Documents):
    """Dicts of tokens and labels. The label of a token is its negative."""

    def __getitem__(self, index: int) -> Any:
        ids = super().__getitem__(index)
        return {"ids": ids, "labels": -ids.astype(np.int64), "text": "left out"}


@given(LENGTHS, st.integers(1, 50), st.sampled_from(["split", "truncate"]))
def test_labels_are_beside_their_tokens(lengths: list[int], length: int, long: Any) -> None:
    packed = Packed(Labelled(lengths), length, key="ids", also={"labels": -100}, long=long)
    for row in map(packed.__getitem__, range(len(packed))):
        assert [*row] == ["tokens", "labels", "segments", "positions", "cu_seqlens"]
        assert row["labels"].dtype is torch.int64
        expected = torch.where(row["segments"] > 0, -row["tokens"], -100)
        assert row["labels"].tolist() == expected.tolist()


def test_a_dataset_that_reads_together_is_read_so() -> None:
    for length in (40, 10):
        one, other = Packed(Documents(SIZES), length), Packed(Together(SIZES), length)
        assert [row["tokens"].tolist() for row in map(other.__getitem__, range(len(other)))] == [
            row["tokens"].tolist() for row in map(one.__getitem__, range(len(one)))
        ]


def test_the_seed_makes_other_rows() -> None:
    one, other = (Packed(Documents([5] * 40), 10, seed=seed) for seed in (1, 2))
    rows = [[*map(tuple, (p[k]["tokens"].tolist() for k in range(len(p))))] for p in (one, other)]
    assert {*rows[0]} != {*rows[1]}


# ---- workers ----


def test_copies_have_the_same_rows() -> None:
    packed = Packed(Documents(SIZES), 40)
    for other in (copy.deepcopy(packed), pickle.loads(pickle.dumps(packed))):
        check_same(
            [other[row] for row in range(len(packed))], [packed[row] for row in range(len(packed))]
        )


class Drawn(Documents):
    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index) + sample_rng().integers(0, 5, dtype=np.uint32)


@pytest.mark.parametrize("workers", [0, 2])
def test_random_samples_are_those_of_the_row_s_stream(workers: int) -> None:
    packed = Packed(Drawn(SIZES), 40, lengths=SIZES)
    with DataLoader(packed, 4, seed=1) as loader:
        expected = [*loader]
    with DataLoader(packed, 4, seed=1, num_workers=workers) as loader:
        check_same([*loader], expected)
    with DataLoader(packed, 4, seed=2, num_workers=workers) as loader:
        assert next(iter(loader))["tokens"].tolist() != expected[0]["tokens"].tolist()


# ---- states ----


def test_a_state_is_of_one_plan() -> None:
    def loader(sizes: Sequence[int] = SIZES, length: int = 40, **options: Any) -> DataLoader[Any]:
        return DataLoader(Packed(Documents(sizes), length, **options), 4, shuffle=True)

    state = loader().state_dict()
    loader().load_state_dict(state)
    swapped = [SIZES[1], SIZES[0], *SIZES[2:]]
    for other in (loader(swapped), loader(seed=1), loader(pad=1), loader(long="truncate")):
        with pytest.raises(StateError, match="set"):
            other.load_state_dict(state)


# ---- faults ----


def test_a_sample_of_another_length_than_planned() -> None:
    for planned, found in ((5, 6), (6, 5), (5, 0)):
        packed = Packed(Documents([9, found, 3]), 20, lengths=[9, planned, 3])
        said = f"sample 1: planned were {planned} tokens, found {found}"
        with pytest.raises(SequenceError, match=said) as raised:
            packed[0]
        assert raised.value.__notes__ == [f"in row 0 of {packed!r}"]
        with (
            DataLoader(packed, 1, num_workers=2) as loader,
            pytest.raises(SequenceError, match=said),
        ):
            next(iter(loader))


class Broken(Documents):
    def __getitem__(self, index: int) -> Any:
        if index == 3:
            raise KeyError("a fault of its own")
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_of_the_dataset_passes_through(workers: int) -> None:
    packed = Packed(Broken(SIZES), 40, lengths=SIZES)
    failed = []
    with DataLoader(packed, 5, num_workers=workers, on_error="skip") as loader:
        rows = sum(len(batch["tokens"]) for batch in loader)
    assert rows == len(packed) - 1
    for row in range(len(packed)):
        try:
            packed[row]
        except KeyError as error:
            failed.append(row)
            assert error.args == ("a fault of its own",)
            assert error.__notes__ == [f"in row {row} of {packed!r}"]
    assert len(failed) == 1


def test_arguments_that_cannot_be_used() -> None:
    documents = Documents([3, 50, 2])
    given: list[tuple[dict[str, Any], str]] = [
        ({"length": 0}, "length must be from 1"),
        ({"length": 1 << 31}, "length must be from 1"),
        ({"long": "cut"}, "got 'cut'"),
        ({"long": "error"}, "sample 1 has 50 tokens, but rows have 10. Pass long="),
        ({"lengths": [3, 50]}, "a length for each of 3 samples, got 2"),
        ({"lengths": [3, 50, -1]}, "expected 0 or more, got -1 for sample 2"),
        ({"lengths": [3.0, 50.0, 2.0]}, "expected integers in one dimension"),
        ({"lengths": [0, 0, 0]}, "found 0"),
        ({"also": {"labels": -100}}, "also names keys beside key"),
        ({"also": {"labels": -100}, "key": "labels"}, "also names keys beside key"),
        ({"also": {"tokens": 0}, "key": "ids"}, "none of .'tokens', "),
        ({"also": {"labels": 0.5}, "key": "ids"}, "also.'labels'. must be"),
    ]
    for options, said in given:
        with pytest.raises((TypeError, ValueError), match=said):
            Packed(documents, **{"length": 10, **options})
    with pytest.raises(ValueError, match="found 0"):
        Packed([], 10)
    packed = Packed(documents, 10)
    for row in (-1, len(packed)):
        with pytest.raises(IndexError, match=f"row {row} of Packed"):
            packed[row]
