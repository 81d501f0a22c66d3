"""Promise: Every exception of fastload can be pickled and copied. It keeps its type and its text, in torch's worker
processes too.
"""

from __future__ import annotations

import copy
import pickle

import pytest

from fastload import DataLoader, errors
from fastload.errors import DecodeError, FastloadError, PackedDataError
from tests.fakes import FailingDataset

KINDS = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and not issubclass(kind, Warning)
]


def test_all_of_them_are_here() -> None:
    assert {FastloadError, DecodeError, PackedDataError} < set(KINDS)
    assert all(issubclass(kind, FastloadError) for kind in KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_each_is_made_of_one_text_alone(kind: type[FastloadError]) -> None:
    """As torch does, of a text with the whole traceback."""
    error = kind("Caught it in a worker process.\nOriginal Traceback")
    assert str(error) == "Caught it in a worker process.\nOriginal Traceback"
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


@pytest.mark.parametrize(
    "error",
    [
        DecodeError("a/1.jpg", "the file is empty"),
        PackedDataError("set", "index.json is not JSON"),
        PackedDataError("set", "damaged", shard="shard-00001.arrow", record=3),
    ],
    ids=str,
)
def test_those_of_several_parts_keep_them_in_copies(error: FastloadError) -> None:
    error.add_note("a note")
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(again) is type(error)
        assert str(again) == str(error)
        assert vars(again) == vars(error)
    assert error.args == (vars(error)["path"], vars(error)["reason"])


@pytest.mark.parametrize("workers", [0, 1])
def test_the_type_comes_out_of_torch_s_worker_processes(workers: int) -> None:
    error = PackedDataError("set", "damaged", shard="shard-00001.arrow", record=3)
    dataset = FailingDataset([0], failures={0: error})
    batches = iter(DataLoader(dataset, num_workers=workers, worker_method="torch"))
    with pytest.raises(type(error)) as caught:
        next(batches)
    assert next(batches, None) is None  # torch's worker process ends at once
    assert str(error) in str(caught.value)
    assert vars(caught.value)["path"] == ("" if workers else vars(error)["path"])
