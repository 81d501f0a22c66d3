"""Promises:
- `get_worker_info()` works in worker threads however it was imported, and returns None in `collate_fn`. See also
  `tests/contracts/workers.py` and `tests/test_torch_private.py`.
- Samples and `collate_fn` run in the modes of `iter()` (no_grad, autocast), with `num_workers=0` too. Inference mode
  counts as no_grad.
- A loader can be pickled and deep-copied. Several loaders run at once, nested and beside torch's process loader.
- A process may fork after the threads started, also while they work.
- fastload itself changes neither torch's number of threads nor any global random state. A dataset that draws from
  global state in threads may. See also `tests/test_workers.py`, `tests/promises/test_randomness.py`.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import covertable
import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader

from fastload import DataLoader
from tests.children import Ended, run_script
from tests.fakes import Numbers


class Squares(Numbers):
    def __init__(self, length: int = 40) -> None:
        super().__init__(length)

    def __getitem__(self, index: int) -> int:
        return index * index


def add_one(samples: list[int]) -> list[int]:
    return [sample + 1 for sample in samples]


def plain(batches: Any) -> list[Any]:
    return [batch.tolist() if isinstance(batch, torch.Tensor) else batch for batch in batches]


# ---- pickle and deep copy ----

COPIES: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda loader: pickle.loads(pickle.dumps(loader)),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
}


@pytest.mark.parametrize(("how", "workers"), [("pickle", 2), ("deepcopy", 0), ("copy", 2)])
def test_a_copy_in_mid_epoch_is_a_loader_of_its_own(how: str, workers: int) -> None:
    options: dict[str, Any] = {"collate_fn": add_one, "seed": 3, "shuffle": True}
    options |= {"num_workers": workers, "persistent_workers": workers > 0, "drop_last": True}
    original = DataLoader(Squares(), 7, prefetch_batches=3, on_error="skip", **options)
    original.set_epoch(5)
    iterator = iter(original)
    begun = [next(iterator), next(iterator)]

    other = COPIES[how](original)
    assert type(other) is DataLoader
    for name in ("batch_size", "drop_last", "num_workers", "persistent_workers", "seed"):
        assert getattr(other, name) == getattr(original, name), name
    assert (other.prefetch_batches, other.on_error, other.collate_fn) == (3, "skip", add_one)

    other.set_epoch(5)
    ours = list(other)
    other.close()
    assert begun + list(iterator) == ours, "the original goes on, and the copy has the same epoch"
    assert len(ours) == 5
    original.close()


# ---- more than one ----


@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (2, False), (2, True)])
def test_a_loop_inside_a_loop(workers: int, persistent: bool) -> None:
    """Training with a validation epoch after every step."""
    train = DataLoader(Squares(12), 4, num_workers=workers, persistent_workers=persistent)
    validation = DataLoader(Squares(9), 3, num_workers=workers, persistent_workers=persistent)
    for batch, start in zip(train, (0, 4, 8), strict=True):
        assert batch.tolist() == [k * k for k in range(start, start + 4)]
        assert plain(validation) == [[0, 1, 4], [9, 16, 25], [36, 49, 64]]
    assert (train.stats().samples, validation.stats().samples) == (12, 9)
    validation.close()
    assert plain(train) == plain(DataLoader(Squares(12), 4)), "closing one leaves the other alone"
    train.close()


def test_torch_process_loader_beside_it() -> None:
    """Torch forks its workers in the middle of our epoch, and both go on; also with ours inside a worker of torch's."""
    ours = DataLoader(Squares(24), 4, num_workers=2)
    theirs = TorchLoader(Squares(24), 4, num_workers=1)
    iterator = iter(ours)
    first = next(iterator)
    assert plain(theirs) == [first.tolist(), *plain(iterator)]


class Nested(Numbers):
    """Reads each sample with a loader of its own."""

    def __getitem__(self, index: int) -> int:
        inner = DataLoader(
            Squares(6), 2, num_workers=2, worker_method="thread"
        )  # torch's are daemons
        return int(sum(batch.sum() for batch in inner)) + index


@pytest.mark.parametrize("loader", [TorchLoader, DataLoader])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_inside_a_worker(loader: type[TorchLoader[int]], workers: int) -> None:
    assert plain(loader(Nested(3), 3, num_workers=workers)) == [[55, 56, 57]]


# ---- forks ----


def fine(ended: Ended) -> str:
    assert ended.code == 0, ended
    assert ended.err == "", ended
    return ended.out


FORK = """
loader = fastload.DataLoader(
    Reads(40), 4, num_workers=3, persistent_workers={persistent}, worker_method="thread"
)
iterator = iter(loader)
assert next(iterator).tolist() == [0, 1, 2, 3]
fill(loader)
pid = os.fork()
if pid == 0:
    {child}
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 6
assert [b.tolist()[0] for b in iterator] == list(range(4, 40, 4)), "the parent goes on"
print("PARENT")
"""
FORK_CHILD = {
    "goes on alone": """
    del iterator
    loader.close()
    again = fastload.DataLoader(Reads(12), 4, num_workers=2, worker_method="thread")
    assert [b.tolist() for b in again] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert len(list(loader)) == 10, "the loader itself begins a new epoch with new threads"
    loader.close()
    assert not threads()
    sys.exit(6)
""",
    "uses the parent's iterator": """
    for _ in range(2):
        try:
            next(iterator)
            sys.exit(1)
        except fastload.errors.LoaderClosedError as error:
            assert "process" in str(error) or "fork" in str(error), error
    sys.exit(6)
""",
}


@pytest.mark.parametrize(
    ("what", "persistent"),
    [
        ("goes on alone", True),
        ("uses the parent's iterator", False),
    ],
)
def test_fork_in_mid_epoch(what: str, persistent: bool) -> None:
    script = FORK.format(persistent=persistent, child=FORK_CHILD[what])
    assert "PARENT" in fine(run_script(script))


def test_forks_while_the_threads_are_at_work() -> None:
    """Whichever lock a thread holds at the moment of the fork, the child can exit and load for itself."""
    out = fine(
        run_script(
            """
loader = fastload.DataLoader(Reads(10**9), 2, num_workers=4)
iterator = iter(loader)
for _ in range(10):
    for _ in range(20):
        next(iterator)
    pid = os.fork()
    if pid == 0:
        signal.alarm(30)
        again = fastload.DataLoader(Reads(8), 4, num_workers=2)
        assert len(list(again)) == 2
        os._exit(6)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 6
print("PARENT")
"""
        )
    )
    assert "PARENT" in out


# ---- the modes of the loop ----

MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
}


def modes() -> tuple[bool, bool, bool]:
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
    )


class Moded(Numbers):
    """A sample is a product, whose dtype depends on autocast, and the modes in which it was read."""

    def __getitem__(self, index: int) -> Any:
        return torch.ones(2, 2) @ torch.ones(2, 2) * index, torch.tensor(modes())


class ModedBatches(Moded):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


def collate_in_modes(samples: list[Any]) -> Any:
    return torch.stack([x @ torch.ones(2, 2) for x, _ in samples]), torch.tensor(modes())


def begin_in(expected: tuple[bool, bool, bool], worker: int) -> None:
    assert modes() == expected


@pytest.mark.parametrize(
    ("mode", "kind", "dataset"),
    covertable.make([[*MODES], ["none", "thread", "process"], [Moded, ModedBatches]]),
)
def test_samples_are_read_in_the_modes_of_iter(mode: str, kind: str, dataset: type[Moded]) -> None:
    """As in torch's forked workers. In threads inference mode is no_grad: batches lie in memory that is used again.

    The modes of the loop are what they were, after every batch, after an error and after the end.
    """
    workers: dict[str, Any] = {"num_workers": 2, "worker_method": kind} if kind != "none" else {}
    collate = collate_in_modes if dataset is Moded else None
    with MODES[mode]():
        inside = modes()
        seen = (inside[0], inside[1] and kind != "thread", inside[2])
        init = partial(begin_in, seen) if workers else None
        batches = iter(
            DataLoader(dataset(8), 4, collate_fn=collate, worker_init_fn=init, **workers)
        )
        for product, said in batches:
            assert modes() == inside
            assert product.dtype is (torch.bfloat16 if inside[2] else torch.float32)
            assert product.is_inference() == (inside[1] and kind == "none")
            assert (said == torch.tensor(seen)).all()
        assert modes() == inside
        failing = DataLoader(dataset(8), 4, sampler=[0, "x"], **workers)  # type: ignore[list-item]
        with pytest.raises(TypeError):
            list(failing)
        assert modes() == inside
        batches = iter(DataLoader(dataset(8), 4, **workers))
    assert modes() == (True, False, False)
    assert (next(batches)[1] == torch.tensor(seen)).all(), "the modes of next(), not of iter()"


def test_an_iterator_cannot_be_pickled_and_says_so() -> None:
    """Torch's cannot either; a loader can."""
    iterator = iter(DataLoader(Squares(), 4, num_workers=2))
    with pytest.raises(TypeError, match="Pickle its loader"):
        pickle.dumps(iterator)
    next(iterator)
    del iterator
