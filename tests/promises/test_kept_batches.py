"""Promises:
- A batch that the user keeps is never written again. This holds for any way of keeping it: whole, a part or view,
  another library's array, a queue to another process.
- Memory of batches that are no longer kept is reused.
"""

from __future__ import annotations

import gc
import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from multiprocessing.reduction import ForkingPickler
from typing import Any

import covertable
import numpy as np
import pytest
import torch
import torch.multiprocessing
from torch.utils.data import Dataset

import fastload

SIZES = {"small": 5, "large": 20_000}  # floats of a row; large: 80 KB
LENGTH, BATCH, EPOCHS = 24, 4, 6
DEADLINE_S = 30.0  # only a deadlock waits that long


class Rows(Dataset[Any]):
    """Row i is full of 1000 * epoch + i, where `epoch` is set by the test: stale memory shows."""

    fastload_per_worker = ()  # one for all workers, to be told the epoch

    def __init__(self, size: int, *, length: int = LENGTH, as_array: bool = False) -> None:
        self.size = size
        self.length = length
        self.as_array = as_array
        self.epoch = 0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        value = float(1000 * self.epoch + index)
        row = torch.full((self.size,), value)
        return {"x": row.numpy() if self.as_array else row, "y": value}


def epochs(loader: fastload.DataLoader[Any], dataset: Rows, count: int = EPOCHS) -> Iterator[Any]:
    """Yield (values of the rows, batch); the values come from the labels, copied out of the batch at once.

    With persistent workers the next epoch is begun early, so `dataset.epoch` does not tell them.
    """
    for epoch in range(count):
        dataset.epoch = epoch
        for batch in loader:
            yield batch["y"].tolist(), batch


def loader_of(dataset: Dataset[Any], workers: int, **options: Any) -> fastload.DataLoader[Any]:
    return fastload.DataLoader(
        dataset,
        BATCH,
        shuffle=True,
        num_workers=workers,
        persistent_workers=workers > 0,
        **options,
    )


def check_rows(kept: Any, values: list[float]) -> None:
    """Check that a batch's rows, or parts of them, are full of the values."""
    array = kept.detach().numpy() if isinstance(kept, torch.Tensor) else np.asarray(kept)
    rows = array.reshape(len(values), -1)
    assert rows.size
    assert (rows == np.array(values)[:, None]).all()


# Ways to keep a batch: each makes an alias of `x`, and a function that copies what it shows.

Alias = Callable[[torch.Tensor], Callable[[], Any]]


def capsule(x: torch.Tensor) -> Callable[[], Any]:
    """Keep a DLPack capsule that nobody takes before the end."""
    alias = torch.utils.dlpack.to_dlpack(x)
    taken: list[torch.Tensor] = []

    def take() -> torch.Tensor:
        if not taken:
            taken.append(torch.utils.dlpack.from_dlpack(alias))
        return taken[0]

    return take


def in_a_graph(x: torch.Tensor) -> Callable[[], Any]:
    """Keep the batch only as what a backward pass will need."""
    weight = torch.ones_like(x, requires_grad=True)
    loss = (weight * x).sum()

    def gradient() -> Any:
        (grad,) = torch.autograd.grad(loss, weight, retain_graph=True)
        return grad

    return gradient


def in_a_cycle(x: torch.Tensor) -> Callable[[], Any]:
    holder: dict[str, Any] = {"x": x}
    holder["self"] = holder
    return lambda: holder["x"]


def whole_storage(x: torch.Tensor) -> Callable[[], Any]:
    storage, shape = x.untyped_storage(), x.shape
    return lambda: torch.empty(0).set_(storage, 0, shape)


def of_what_is_shared(x: torch.Tensor) -> Callable[[], Any]:
    """Keep an array of a view, and put the tensor into a queue, which exchanges the memory of its storage."""
    alias = x[:].numpy()
    ForkingPickler.dumps(x)
    return lambda: alias


def as_it_is(alias: Any) -> Callable[[], Any]:
    return lambda: alias


ALIASES: dict[str, Alias] = {
    "the batch": as_it_is,
    "rows": lambda x: (lambda rows: lambda: torch.stack(rows))(list(x)),
    "view": lambda x: as_it_is(x.view(-1)),
    ".data": lambda x: as_it_is(x.data),
    "storage": whole_storage,
    ".numpy()": lambda x: as_it_is(x.numpy()),
    "tensor over .numpy()": lambda x: as_it_is(torch.from_numpy(x.numpy())[:, :1]),
    "memoryview": lambda x: as_it_is(memoryview(x.numpy())),
    "NumPy by DLPack": lambda x: as_it_is(np.from_dlpack(x)),
    "torch by NumPy's DLPack": lambda x: as_it_is(torch.from_dlpack(x.numpy())),
    "capsule": capsule,
    "buffer": lambda x: as_it_is(torch.frombuffer(x.numpy(), dtype=torch.float32)),
    "graph": in_a_graph,
    "cycle": in_a_cycle,
}


EXCHANGED = {".numpy() of what is shared": of_what_is_shared}
"""Not with the small tensors of threads, whose memory is torch's own: torch frees it."""


@pytest.mark.parametrize(("size", "workers"), [("large", 0), ("large", 2), ("small", 2)])
def test_what_is_kept_stays(size: str, workers: int) -> None:
    """Every second batch is kept by an alias alone, twice by each of them, and the others are let go."""
    dataset = Rows(SIZES[size])
    ways = list((ALIASES if size == "small" else ALIASES | EXCHANGED).items())
    kept: list[tuple[str, Callable[[], Any], list[float]]] = []
    with loader_of(dataset, workers) as loader:
        for number, (values, batch) in enumerate(epochs(loader, dataset, 16)):
            check_rows(batch["x"], values)
            if number % 2:
                name, keep = ways[number // 2 % len(ways)]
                kept.append((name, keep(batch["x"]), values))
            del batch
        for _, alias, values in kept:
            check_rows(alias(), values)
    del loader
    assert len(kept) >= 2 * len(ways)
    for _, alias, values in kept:  # and the loader's end takes nothing away
        check_rows(alias(), values)


# What the user does to a batch is the user's.

CHANGES: dict[str, Callable[[torch.Tensor], Any]] = {
    "zeroed": lambda x: x.zero_(),
    "grown": lambda x: x.resize_(x.numel() * 3),
    "storage given up": lambda x: x.untyped_storage().resize_(0),
    "transposed in place": lambda x: x.t_(),
    "moved to other memory": lambda x: setattr(x, "data", torch.full((3,), -1.0)),
    "wanting a gradient": lambda x: (x.requires_grad_() * 2).sum().backward(),
    "shared": lambda x: x.share_memory_(),
}

RESIZING = {"grown", "storage given up", "storage shrunk"}  # NumPy's memory is not torch's


@pytest.mark.parametrize(("size", "workers"), [("large", 0), ("large", 2), ("small", 2)])
def test_what_the_user_changed_and_let_go_changes_no_later_batch(size: str, workers: int) -> None:
    """Each change is made to two batches."""
    dataset, changes = Rows(SIZES[size]), list(CHANGES.items())
    with loader_of(dataset, workers) as loader:
        for number, (values, batch) in enumerate(epochs(loader, dataset, 5)):
            x = batch["x"]
            assert x.shape == (BATCH, SIZES[size])
            assert x.is_contiguous()
            assert not x.requires_grad
            assert x.grad is None
            check_rows(x, values)
            name, change = changes[number % len(changes)]
            with suppress(RuntimeError) if name in RESIZING else nullcontext():  # refused or done
                change(x)
            del x, batch


def test_let_go_on_another_thread() -> None:
    """The last alias may end anywhere, while the loader is writing."""
    dataset = Rows(SIZES["large"], length=100)
    handed: queue.Queue[Any] = queue.Queue()
    failures = []

    def keep_for_a_while() -> None:
        kept = []
        while (entry := handed.get(timeout=DEADLINE_S)) is not None:
            kept.append(entry)
            if len(kept) > 5:
                alias, values = kept.pop(0)
                if not (alias[:, 0] == np.array(values, np.float32)).all():
                    failures.append(values)
                del alias
            del entry

    thread = threading.Thread(target=keep_for_a_while)
    thread.start()
    with loader_of(dataset, 3) as loader:
        for values, batch in epochs(loader, dataset, 3):
            handed.put((batch["x"].numpy(), values))
            del batch
    handed.put(None)
    thread.join()
    assert not failures


# Sent to another process.


def receive(queue: Any, finish: Any, answers: Any) -> None:
    """Keep what comes until `finish`, then answer with first, middle and last value of each row."""
    kept = []
    while (entry := queue.get()) is not None:
        kept.append(entry)
    finish.wait()
    columns = [(x[:, 0].tolist(), x[:, x.shape[1] // 2].tolist(), x[:, -1].tolist()) for x in kept]
    answers.put(columns)


@pytest.mark.parametrize("as_array", [False, True])
def test_what_waits_in_a_queue_to_another_process_stays(as_array: bool) -> None:
    """The child starts before any thread does; the parent lets every batch go as soon as it is sent.

    torch moves a tensor's memory when the queue's own thread gets to it: an unknown time later.
    """
    fork = torch.multiprocessing.get_context("fork")
    sending, finish, answers = fork.Queue(), fork.Event(), fork.SimpleQueue()
    child = fork.Process(target=receive, args=(sending, finish, answers), daemon=True)
    child.start()
    dataset = Rows(SIZES["large"], as_array=as_array)
    sent = []
    with loader_of(dataset, 2) as loader:
        for number, (values, batch) in enumerate(epochs(loader, dataset)):
            if number % 2:
                sending.put(batch["x"])
                sent.append(values)
            del batch
        sending.put(None)
        for _ in loader:
            pass
    finish.set()
    received = answers.get()
    child.join()
    for end in (sending, answers):
        end.close()
    sending.join_thread()
    assert received == [(values, values, values) for values in sent]


# Nobody keeps it: then the memory is reused.


def addresses(
    loader: fastload.DataLoader[Any], count: int, keep: Callable[[Any], Any] = lambda batch: None
) -> list[int]:
    """Return where each batch lay.

    After each batch is let go, memory of the same size is taken and held: what the loader gave back
    to the allocator is gone, so that an address can come again only if the loader itself kept it.
    """
    thieves, found, kept = [], [], []
    while len(found) < count:
        for batch in loader:
            found.append(batch["x"].data_ptr())
            kept.append(keep(batch))
            shape = batch["x"].shape
            del batch
            thieves.append(torch.empty(shape))
            if len(found) == count:
                break
    return found


@pytest.mark.parametrize(("workers", "as_array"), [(0, True), (1, False), (3, True)])
def test_memory_that_nobody_keeps_is_reused_and_no_other(workers: int, as_array: bool) -> None:
    dataset = Rows(250_000, length=40, as_array=as_array)  # 4 MB a batch
    with loader_of(dataset, workers) as loader:
        found = addresses(loader, 30)
        # In flight, in the loop's hands, being filled. Without the GIL, a worker returns memory when it runs next.
        late = 0 if loader.stats().gil else workers
        assert len(set(found)) <= loader.stats().depth + 2 + late
        assert len(set(addresses(loader, 20, keep=lambda batch: batch["x"]))) == 20


# An error may be kept for long, in a list of what failed. Its traceback holds frames of the loader.


class TornError(OSError):
    """To which a weak reference can be made, unlike to OSError itself."""


class Torn(Dataset[torch.Tensor]):
    """Rows of `size` floats, of which 1 and 9 cannot be read; `given` refers weakly to the others."""

    fastload_per_worker = ()  # one for all workers, to be looked at

    def __init__(self, size: int) -> None:
        self.size = size
        self.given: dict[int, weakref.ref[torch.Tensor]] = {}

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> torch.Tensor:
        if index in (1, 9):
            raise TornError(f"row {index} is torn")
        row = torch.full((self.size,), float(index))
        self.given[index] = weakref.ref(row)
        return row


def no_stand_in(index: int, error: Exception) -> Any:
    raise ValueError(f"no stand-in for row {index}")


class Keeping:
    """Keeps the errors that `on_error` is given and those that come out of `next()`."""

    def __init__(self, way: str) -> None:
        self.errors: list[Exception] = []
        self.way = way
        self.option = "raise" if way == "raise" else self

    def __call__(self, index: int, error: Exception) -> Any:
        self.errors.append(error)
        return no_stand_in(index, error) if self.way == "on_error raises" else fastload.SKIP

    def next(self, iterator: Iterator[torch.Tensor]) -> weakref.ref[torch.Tensor] | None:
        """Return a weak reference to the next batch, or None after its error was kept."""
        try:
            return weakref.ref(next(iterator))
        except (OSError, ValueError) as error:
            self.errors.append(error)
            return None
        finally:
            del iterator  # this frame too is in the traceback


WAYS = {"raise": 2, "skip": 2, "on_error raises": 4}  # and the number of errors to be kept


def alive(refs: Any) -> int:
    return sum(ref is not None and ref() is not None for ref in refs)


FORMS = {"small": ("small", None), "large": ("large", None), "stacked": ("small", torch.stack)}


@pytest.mark.parametrize(
    ("workers", "way", "form"), covertable.make([[0, 1, 3], [*WAYS], [*FORMS]])
)
def test_errors_that_are_kept_keep_no_batch_and_no_sample(
    workers: int, way: str, form: str
) -> None:
    size, collate_fn = FORMS[form]
    keeping, dataset = Keeping(way), Torn(SIZES[size])
    loader = fastload.DataLoader(
        dataset, BATCH, num_workers=workers, collate_fn=collate_fn, on_error=keeping.option
    )
    iterator = iter(loader)
    batches = [keeping.next(iterator) for _ in range(LENGTH // BATCH)]
    assert len(keeping.errors) == WAYS[way]
    gc.collect()
    assert alive(batches) == 0, "in the middle, with all threads there"
    assert next(iterator, None) is None
    gc.collect()
    assert dataset.given
    assert (alive(batches), alive(dataset.given.values())) == (0, 0)
    assert all(error.__traceback__ for error in keeping.errors), "or nothing was kept"
