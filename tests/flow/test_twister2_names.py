"""Promises:
- Twister2's names give data and targets in the same batches: all rows but an incomplete last batch, equally many on
  each rank.
- Another number of ranks than a Twister2 program wants is an error that says how to start.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fastload import datasets
from fastload.compat import ranks, twister2flow
from fastload.compat.twister2 import Collector, SourceFunc, TSetContext, Twister2Environment
from fastload.compat.twister2deepnet import (
    MNIST,
    ArrowUtils,
    DataUtil,
    FileUtils,
    MnistDistributed,
    UtilPanda,
    distributed,
    utils,
)
from fastload.datasets.synthetic import generate_digits
from fastload.distributed import detect_rank, shutdown
from fastload.errors import RankError

TRAIN, TEST = 203, 50


@pytest.fixture(autouse=True)
def leave_no_group() -> Iterator[None]:
    yield
    shutdown()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the splits where the programs look for them."""
    path = tmp_path_factory.mktemp("mnist")
    for split in ("train", "test"):
        generate_digits(path / split, train=TRAIN, test=TEST)
    return path


@pytest.mark.parametrize("world_size", [1, 2, 4, 7, 20])
def test_ranks_have_equally_many_rows_and_each_row_with_its_label(
    folder: Path, world_size: int
) -> None:
    """No two of these images are equal, so an image says which row it is."""
    for split, batch_size in (("train", 128), ("test", 16)):
        whole = datasets.MNIST(folder / split, train=split == "train")
        number = {image.numpy().tobytes(): k for k, image in enumerate(whole.data)}
        assert len(number) == len(whole)
        seen: list[int] = []
        lengths = set()
        for rank in range(world_size):
            mnist = MnistDistributed(folder, parallelism=world_size, world_rank=rank)
            images, labels, batch = mnist.train_data if split == "train" else mnist.test_data
            assert (images.dtype, images.shape[1:], labels.dtype) == (np.uint8, (784,), np.int64)
            assert batch == max(1, batch_size // world_size)
            rows = [number[image.tobytes()] for image in images]
            assert labels.tolist() == whole.targets[rows].tolist()
            lengths.add(len(images))
            seen += rows
        assert len(lengths) == 1, "or training would hang"
        assert set(seen) == set(range(len(whole)))
        assert len(seen) - len(whole) < world_size
        assert seen != sorted(seen)


@pytest.mark.parametrize("batch", [1, 32, 33, 100])
def test_batches_of_data_and_of_targets_have_the_same_rows(batch: int) -> None:
    rows = 100
    data = np.arange(rows * 784, dtype=np.float32).reshape(rows, 784)
    target = np.arange(rows)[:, None]
    batches = DataUtil.generate_minibatches(data=data, minibatch_size=batch)
    targets = DataUtil.generate_minibatches(data=target, minibatch_size=batch)
    whole = rows // batch
    assert batches.shape == (whole, batch, 784)
    assert batches.dtype == torch.float32
    assert targets.flatten().tolist() == list(range(whole * batch)), "only the last are left out"
    assert torch.equal(batches[:, :, 0], targets[:, :, 0] * 784.0)
    assert torch.equal(utils.format_data(batches)[:, :, 0, 27], batches[:, :, 27])
    assert torch.equal(utils.format_target(targets), targets[:, :, 0])


def test_batches_divide_the_global_batch_among_ranks() -> None:
    one = np.arange(15000)
    batches = utils.generate_minibatches(input_data=one, world_size=4, init_batch_size=128)
    assert batches.shape == (468, 32)
    assert utils.generate_minibatches(one, world_size=500, init_batch_size=16).shape == (15000, 1)
    column = utils.fix_array_shape(one)
    assert column.shape == (15000, 1)
    assert utils.fix_array_shape(column) is column


def test_rows_that_make_no_batch_are_an_error() -> None:
    for rows, batch in ((31, 32), (10, 0)):
        with pytest.raises(ValueError, match=f"{rows} rows are too few for a batch of {batch}"):
            DataUtil.generate_minibatches(np.zeros(rows), batch)
    with pytest.raises(ValueError, match="783 pixels"):
        utils.format_data(torch.zeros(2, 3, 783))


def test_a_download_that_is_not_needed_needs_no_network(folder: Path) -> None:
    with pytest.warns(UserWarning, match="synthetic digits"):
        found = MNIST(source_dir=folder / "test", train=False, transform=None).download()
    assert len(found) == TEST


def test_arrays_come_back_from_parquet_as_they_were(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    FileUtils.mkdir_branch_with_access(folder)
    FileUtils.mkdir_branch_with_access(folder)
    assert folder.stat().st_mode & 0o777 == 0o777 & ~_umask()
    data = np.random.default_rng(0).integers(0, 256, (20, 784), np.uint8)
    for array in (data, np.arange(20)):
        frame = UtilPanda.convert_numpy_to_pandas(array)
        table = ArrowUtils.create_to_table(dataFrame=frame)
        ArrowUtils.write_to_table(table=table, save_path=folder / "0.data")
        found = ArrowUtils.read_from_table(folder / "0.data").to_numpy()
        assert found.dtype == array.dtype
        assert np.array_equal(found, array.reshape(20, -1))
    assert os.listdir(folder) == ["0.data"], "no temporary file is left"


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


class Words(SourceFunc):
    def __init__(self) -> None:
        self.words = ["one", "two"]

    def has_next(self) -> bool:
        return bool(self.words)

    def next(self) -> Any:
        return self.words.pop(0)


def test_a_source_is_read_once_and_computed_when_needed() -> None:
    env = Twister2Environment(resources=[{"cpu": 1, "ram": 512, "instances": 1}], mpi_aware=True)
    assert env.worker_id == 0
    source = env.create_source(Words(), 1)
    calls = []

    def upper(words: Iterator[str], collector: Collector, context: TSetContext) -> None:
        calls.append((context.index, context.parallelism))
        for word in words:
            collector.collect(word.upper())

    computed = source.compute(upper)
    assert not calls
    assert list(computed.cache()) == ["ONE", "TWO"]
    assert list(computed) == ["ONE", "TWO"]
    assert calls == [(0, 1)]
    assert [str(word) for word in utils.tset_to_numpy(source.cache())] == ["one", "two"]


def test_another_parallelism_than_the_ranks_is_an_error() -> None:
    with pytest.raises(RankError, match="runs on 1 ranks, but the resources have 4 instances"):
        Twister2Environment(resources=[{"instances": 3}, {"cpu": 1}])
    with pytest.raises(RankError, match="mpiexec -n 2 python"):
        Twister2Environment().create_source(Words(), 2)


def test_the_stand_in_for_torch_distributed_works_alone() -> None:
    distributed.init_process_group("mpi", rank=0, world_size=1)
    assert (distributed.get_rank(), distributed.get_world_size()) == (0, 1)
    tensor = torch.tensor(3.0)
    assert distributed.all_reduce(tensor, op=distributed.ReduceOp.SUM) is tensor
    assert tensor.item() == 3
    assert distributed.is_gloo_available is torch.distributed.is_gloo_available
    with pytest.raises(RankError, match="rank 1 of 4"):
        distributed.init_process_group("mpi", rank=1, world_size=4)


def test_the_variables_of_open_mpi_are_set_under_others_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
    for name in names:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    added: dict[str, str] = {}
    monkeypatch.setattr(ranks, "_added", added)
    ranks.set_variables()
    assert not added, "processes that this one starts would inherit them"
    own = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    ranks.set_variables()
    assert [os.environ[name] for name in names] == ["1", "4"]
    assert str(detect_rank().rank) == "rank 1 of 4"


def test_all_names_are_those_of_twister2flow_too() -> None:
    assert twister2flow.MnistDistributed is MnistDistributed
    assert twister2flow.utils is utils
    assert twister2flow.Twister2Environment is Twister2Environment
    with pytest.raises(AttributeError):
        twister2flow.nothing  # noqa: B018
