"""Ranks read one another's rows out of windows; each prints what it saw. See test_windows.py."""

from __future__ import annotations

import pickle
import sys
from typing import Any

import torch
from mpi4py import MPI

import fastload
from fastload.distributed import WindowDataset, init

init("gloo")  # so that a rank that fails ends the other
comm = MPI.COMM_WORLD
rank, size = comm.Get_rank(), comm.Get_size()


def columns(first: int, rows: int) -> dict[str, Any]:
    """Rows that say which they are, in each column; of several dtypes."""
    number = torch.arange(first, first + rows)
    return {
        "odd": number % 2 == 1,  # so that what follows lies at odd addresses
        "number": number.numpy(),
        "image": (number[:, None, None] + torch.arange(12).reshape(3, 4)) % 251,
        "half": (number[:, None] * torch.ones(5)).half(),
        "empty": torch.zeros(rows, 0),
    }


def expect_rows(samples: dict[str, torch.Tensor], numbers: list[int]) -> None:
    for k, number in enumerate(numbers):
        for name, expected in columns(number, 1).items():
            found = samples[name][k]
            assert torch.equal(found, torch.as_tensor(expected)[0]), (name, number, found)


def read(counts: list[int]) -> None:
    begin = sum(counts[:rank])
    dataset = WindowDataset(columns(begin, counts[rank]), comm)
    total = sum(counts)
    assert len(dataset) == total
    for index in range(total):
        expect_rows({name: value[None] for name, value in dataset[index].items()}, [index])
    expect_rows({name: value[None] for name, value in dataset[-1].items()}, [total - 1])
    for index in (total, -total - 1):
        try:
            dataset[index]
        except IndexError:
            continue
        raise AssertionError(index)
    assert dataset.__getitems__([]) == []

    loader = fastload.DataLoader(dataset, 16, shuffle=True, num_workers=2, seed=rank)
    for epoch in range(3):
        loader.set_epoch(epoch)
        seen: list[int] = []
        for batch in loader:
            numbers = batch["number"].tolist()
            expect_rows(batch, numbers)
            seen += numbers
        assert sorted(seen) == list(range(total))
    loader.close()
    try:
        pickle.dumps(dataset)
    except TypeError as error:
        assert "Load it in threads" in str(error)
    else:
        raise AssertionError("pickled")

    if rank == 1:  # waits there, while rank 0 goes on reading its rows
        dataset.close()
    else:
        expect_rows(
            torch.utils.data.default_collate(dataset.__getitems__(list(range(total)))),
            list(range(total)),
        )
    dataset.close()
    dataset.close()
    try:
        dataset[0]
    except ValueError as error:
        assert "closed" in str(error)
    else:
        raise AssertionError("read after close")


def refuse() -> None:
    """All ranks raise if one has other columns, or none."""
    for odd in (
        {"number": torch.arange(3.0)},
        {},
        {"a": torch.arange(3), "b": torch.arange(4)},
        {"number": torch.arange(3).bfloat16()},
    ):
        try:
            WindowDataset(odd if rank == 1 else {"number": torch.arange(3)}, comm)
        except ValueError as error:
            assert "rank 1" in str(error), error
        else:
            raise AssertionError(odd)


counts = {"uneven": [100, 37], "none": [0, 50]}[sys.argv[1]]
read(counts)
refuse()
print(f"rank {rank} of {size} read all rows", flush=True)
