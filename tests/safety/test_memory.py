"""Promises:
- Memory that worker processes would share, workers share too, under an array, a tensor or a subclass of one. A cache
  that samples fill there is full in the next epoch.
- Memory of this process alone is copied for each worker. See also `tests/safety/test_random_graphs.py` for
  views of it, which stay views of one copy.
- Large memory below a class that copies itself exists once.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import multiprocessing
import multiprocessing.shared_memory
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

import fastload
from fastload.safety import Survey

N = 8
MIB = 1 << 20
LARGE = 16 * MIB + 16  # more than a worker gets its own copy of

# Made here, because multiprocessing keeps the file that it takes them from. ctypes keeps their classes, which belong to
# the module that needed them first.
_ = multiprocessing.RawArray(ctypes.c_float, N), multiprocessing.RawValue("i")


class OwnTensor(torch.Tensor):
    """A tensor of the user's, as torchvision's `TVTensor`: it copies itself, and asks no memo."""

    def __deepcopy__(self, memo: Any) -> Any:
        return self.detach().clone().as_subclass(OwnTensor)


class OwnArray(np.ndarray):
    """An array of the user's."""


class Holder(Dataset[Any]):
    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)

    def __len__(self) -> int:
        return N


def own(**attributes: Any) -> Any:
    """Return a worker's copy of a dataset with these attributes."""
    return Survey(Holder(**attributes)).own().dataset


# ---- memory that processes share ----


def locked(folder: Path, stack: ExitStack) -> Any:
    return np.ctypeslib.as_array(multiprocessing.Array(ctypes.c_float, N).get_obj())


def raw(folder: Path, stack: ExitStack) -> Any:
    return multiprocessing.RawArray(ctypes.c_float, N)


def segment(folder: Path, stack: ExitStack) -> Any:
    memory = multiprocessing.shared_memory.SharedMemory(create=True, size=4 * N)
    stack.callback(memory.close)
    memory.unlink()
    return torch.frombuffer(memory.buf, dtype=torch.float32)


def mapped(folder: Path, stack: ExitStack) -> Any:
    return np.memmap(folder / "mapped", np.float32, "w+", shape=N)


def shared(folder: Path, stack: ExitStack) -> Any:
    return torch.zeros(N).share_memory_()  # type: ignore[no-untyped-call]


def with_a_name(tensor: Any) -> Any:
    tensor.called = "cache"
    return tensor


SHARED: dict[str, Callable[[Path, ExitStack], Any]] = {
    "array over an mp.Array": locked,
    "tensor over a RawArray": lambda *where: torch.frombuffer(raw(*where), dtype=torch.float32),
    "tensor over SharedMemory": segment,
    "memmap": mapped,
    "tensor over a memmap": lambda *where: torch.from_numpy(mapped(*where)),
    "array of the user's over a memmap": lambda *where: mapped(*where).view(OwnArray),
    "tensor in shared memory": shared,
    "tensor of the user's in shared memory": lambda *where: shared(*where).as_subclass(OwnTensor),
    "tensor with an attribute in shared memory": lambda *where: with_a_name(shared(*where)),
}


class Filled(Holder):
    """Fills its caches in its first epoch, and reads them in later ones."""

    caches: dict[str, Any]
    full = False

    def __getitem__(self, index: int) -> dict[str, float]:
        if not self.full:
            for cache in self.caches.values():
                cache[index] = index + 1
        return {kind: float(cache[index]) for kind, cache in self.caches.items()}


def test_a_cache_that_samples_fill_is_full_in_the_next_epoch(tmp_path: Path) -> None:
    def epochs(caches: dict[str, Any]) -> list[list[dict[str, float]]]:
        dataset = Filled(caches=caches)
        read = []
        # Shuffled, so that no worker reads ahead into the next epoch.
        with fastload.DataLoader(dataset, None, shuffle=True, num_workers=2) as loader:
            for _ in range(2):
                read.append(sorted(loader, key=lambda sample: max(sample.values())))
                dataset.full = True
        return read

    with ExitStack() as stack:
        caches = {}
        for number, (kind, make) in enumerate(SHARED.items()):
            (folder := tmp_path / str(number)).mkdir()
            caches[kind] = make(folder, stack)
        expected = [dict.fromkeys(SHARED, float(k + 1)) for k in range(N)]
        assert epochs(caches) == [expected] * 2
        caches.clear()
        gc.collect()  # what lies over the memory, before that is closed


# ---- memory of this process alone ----


def private_map(folder: Path) -> Any:
    memory = mmap.mmap(-1, 4 * N, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(memory, np.float32)


def private_file(folder: Path) -> Path:
    np.zeros(N, np.float32).tofile(folder / "file")
    return folder / "file"


PRIVATE: dict[str, Callable[[Path], Any]] = {
    "tensor over ctypes": lambda _: torch.frombuffer((ctypes.c_float * N)(), dtype=torch.float32),
    "array over a private map": private_map,
    "tensor over a private map": lambda folder: torch.from_numpy(private_map(folder)),
    "memmap, copied on write": lambda folder: np.memmap(private_file(folder), np.float32, "c"),
}


@pytest.mark.parametrize("kind", PRIVATE)
def test_memory_of_this_process_alone_is_copied(kind: str, tmp_path: Path) -> None:
    x = PRIVATE[kind](tmp_path)
    mine = own(x=x).x
    assert type(mine) is type(x)
    mine[0] = 7
    assert (mine[0], x[0]) == (7, 0)


# ---- classes that copy themselves ----


class Store:
    """Would copy itself, as the stores of torch_geometric and the variables of xarray do."""

    __slots__ = ("values",)

    def __init__(self, **values: Any) -> None:
        self.values = values

    def __deepcopy__(self, memo: Any) -> Any:
        raise AssertionError("user code ran")


def array(size: int) -> Any:
    return np.zeros(size, np.uint8)


def tensor(size: int) -> Any:
    return torch.zeros(size, dtype=torch.uint8)


def with_a_gradient(size: int) -> Any:
    x = torch.zeros(size // 4, requires_grad=True)
    x.grad = torch.zeros(1).expand(size // 4)
    return x


def itself(x: Any) -> Any:
    return x


THEMSELVES: dict[str, tuple[Callable[[int], Any], Callable[[Any], Any]]] = {
    "array below a class": (lambda size: Store(x=array(size)), lambda x: x.values["x"]),
    "tensor below a class": (lambda size: Store(x=tensor(size)), lambda x: x.values["x"]),
    "view below a class": (lambda size: Store(x=tensor(size)[:5]), lambda x: x.values["x"]),
    "masked array": (lambda size: np.ma.masked_array(array(size)), itself),
    "array of the user's": (lambda size: array(size).view(OwnArray), itself),
    "tensor of the user's": (lambda size: tensor(size).as_subclass(OwnTensor), itself),
    "tensor with an attribute": (lambda size: with_a_name(tensor(size)), itself),
    "tensor with a gradient": (with_a_gradient, itself),
}


def address(x: Any) -> int:
    return x.ctypes.data if isinstance(x, np.ndarray) else x.data_ptr()


@pytest.mark.parametrize("kind", THEMSELVES)
def test_large_memory_of_what_copies_itself_exists_once(kind: str) -> None:
    make, find = THEMSELVES[kind]
    large, small = make(LARGE), make(1024)
    mine = own(large=large, small=small)
    assert type(mine.large) is type(large)
    # Numbers alone: a failure would print the bytes otherwise.
    there = [address(find(x)) for x in (large, mine.large)]
    assert there[0] == there[1]
    there = [address(find(x)) for x in (small, mine.small)]
    assert there[0] != there[1]


def test_graphs_of_pyg_in_a_list_are_data_although_they_can_be_called() -> None:
    """Simulated: a class by the name of PyG's, and with its methods."""
    space = {"__module__": "torch_geometric.data.data", "__call__": lambda self: iter(())}
    graph = type("BaseData", (Store,), space)
    data = type("Data", (graph,), {"__module__": "torch_geometric.data.data"})
    for records in [data(x=array(MIB)) for _ in range(16)], [data()] * 1_001:
        is_shared = own(records=records).records is records
        assert is_shared


# ---- weights ----


def tied() -> torch.nn.Module:
    """A model two of whose layers share their weights."""
    model = torch.nn.Sequential(
        torch.nn.Linear(3, 3), torch.nn.Linear(3, 3, bias=False), torch.nn.BatchNorm1d(3)
    )
    model[1].weight = model[0].weight
    return model


def test_a_model_is_copied_with_its_weights_and_gradients() -> None:
    model = tied()
    copied = own(model=model).model
    assert copied[1].weight is copied[0].weight
    for mine, weight in zip(copied.parameters(), model.parameters(), strict=True):
        assert type(mine) is torch.nn.Parameter
        assert mine.data_ptr() != weight.data_ptr()
        assert mine.requires_grad
    copied(torch.ones(2, 3)).sum().backward()
    assert copied[0].weight.grad is not None
    assert model[0].weight.grad is None
    assert int(copied[2].num_batches_tracked) == 1
    assert int(model[2].num_batches_tracked) == 0
