"""Promises:
- Sets in shared memory are measured beside `np.save`, `np.load`, `shared_memory` and `torch.load`. An epoch stands
  beside tensors in memory.
- The memory that more readers cost is measured.
- The time of `prepare` is measured beside the bare executor.
"""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch.utils.data import Dataset, TensorDataset

from benchmarks._measure import Epoch, NotMeasuredError, in_turns, open_readers, rate, run_epochs
from benchmarks._report import Aim, Figures, Results, Row, row
from benchmarks._run import Case
from fastload import DataLoader, store
from fastload.bench.figures import BenchError
from fastload.measure.processes import tree_memory
from fastload.store.columns import record_batch
from fastload.store.parts import write_part
from fastload.store.root import SHARED_MEMORY

TITLE = (
    "store: sets in shared memory; float32[784] a row, 250 MB; 1 GB of them for memory; epochs of 60,000 x uint8[784] "
    "and labels, batches of 128, shuffled, 0 workers, second to sixth; medians of 9 turns in each process"
)
REPEATS = 3

WIDTH = 784
BATCH = 128
TURNS, EPOCHS = 9, 6
READERS = 4
PARTS = 20
EPOCH_PARTS = (1, 20, 200)


def cases(*, smoke: bool) -> list[Case]:
    scale = 100 if smoke else 1
    return [
        Case(what, {"what": what, "rows": rows // scale}) for what, (_, rows) in MEASURES.items()
    ]


def measure(*, what: str, rows: int) -> Figures:
    if not os.path.isdir(SHARED_MEMORY):
        raise NotMeasuredError(f"there is no {SHARED_MEMORY}")
    needed, free = 3 * rows * WIDTH * 4, shutil.disk_usage(SHARED_MEMORY).free
    if needed > free:
        raise NotMeasuredError(f"it needs {needed:,} bytes of shared memory, {free:,} are free")
    with tempfile.TemporaryDirectory(prefix="fastload-bench-", dir=SHARED_MEMORY) as folder:
        return MEASURES[what][0](Path(folder), rows)


def floats(rows: int) -> torch.Tensor:
    """Return float32[rows, WIDTH]."""
    return torch.rand(rows, WIDTH, generator=torch.Generator().manual_seed(0))


# ---- what is measured ----


def measure_open(folder: Path, rows: int) -> Figures:
    """Seconds until data are open and a loader has given the first of their batches, shuffled."""
    values = floats(rows)
    store.put({"x": values}, folder / "set")
    np.save(folder / "x.npy", values.numpy())
    torch.save(values, folder / "x.pt")
    shared = SharedMemory(create=True, size=values.nbytes)
    np.ndarray(values.shape, np.float32, shared.buf)[:] = values.numpy()
    attached: list[SharedMemory] = []

    def attach() -> Dataset[Any]:
        attached.append(SharedMemory(shared.name))
        return _tensors(np.ndarray(values.shape, np.float32, attached[-1].buf))

    def detach() -> None:
        gc.collect()  # the loader, which has views of it
        while attached:
            attached.pop().close()

    def first(opened: Callable[[], Dataset[Any]]) -> torch.Tensor:
        (batch,) = next(iter(DataLoader(opened(), BATCH, shuffle=True, seed=0)))
        return batch  # type: ignore[no-any-return]

    ways: dict[str, Callable[[], Dataset[Any]]] = {
        "get": lambda: store.get(folder / "set", data=["x"]),
        "np.load": lambda: _tensors(np.load(folder / "x.npy", mmap_mode="c")),
        "shared_memory": attach,
        "torch.load": lambda: TensorDataset(torch.load(folder / "x.pt", mmap=True)),
    }
    expected = first(lambda: TensorDataset(values))
    for name, way in ways.items():
        if not torch.equal(first(way), expected):
            raise BenchError(f"{name} gave another batch")
    found = in_turns({name: partial(first, way) for name, way in ways.items()}, TURNS, after=detach)
    shared.close()
    shared.unlink()
    return found


def _tensors(array: np.ndarray[Any, Any]) -> Dataset[Any]:
    return TensorDataset(torch.from_numpy(array))


def measure_put(folder: Path, rows: int) -> Figures:
    """Seconds to write a tensor to shared memory."""
    values = floats(rows)

    def remove() -> None:
        shutil.rmtree(folder / "set", ignore_errors=True)
        (folder / "x.npy").unlink(missing_ok=True)

    ways = {
        "put": lambda: store.put({"x": values}, folder / "set", checksums=False),
        "put, checksums": lambda: store.put({"x": values}, folder / "set", checksums=True),
        "np.save": lambda: np.save(folder / "x.npy", values.numpy()),
    }
    return in_turns(ways, TURNS, after=remove)


def measure_memory(folder: Path, rows: int) -> Figures:
    """Bytes that reading a set adds to the memory of one reader, and to that of several together."""
    store.put(({"x": part} for part in floats(rows).chunk(PARTS)), folder / "set")
    one, arrow = _added(folder / "set", 1)
    several, _ = _added(folder / "set", READERS)
    return {
        "one": one / 2**20,
        "more": (several - one) / (rows * WIDTH * 4),
        "arrow": arrow,
    }


def _added(path: Path, readers: int) -> tuple[int, int]:
    """Return by how much the PSS of `readers` processes grows if each reads all rows, and the bytes of Arrow."""
    context = get_context("spawn")
    pipes = [context.Pipe() for _ in range(readers)]
    processes = [context.Process(target=_read, args=(str(path), end)) for _, end in pipes]
    for process in processes:
        process.start()

    def answers() -> list[Any]:
        """Wait for all readers, and let none go on before."""
        found = [ours.recv() for ours, _ in pipes]
        for ours, _ in pipes:
            ours.send(None)
        return found

    before, _, after, arrow = (answers() for _ in range(4))
    for process in processes:
        process.join()
    return sum(after) - sum(before), max(arrow)


def _read(path: str, pipe: Connection) -> None:
    def tell(found: int) -> None:
        pipe.send(found)
        pipe.recv()

    dataset = store.get(path, data="x")
    with open_readers("none", dataset, 0, batch_size=BATCH, shuffle=True) as loader:
        next(iter(loader))
        tell(_own_bytes())
        tell(sum(len(batch) for batch in loader))
        tell(_own_bytes())
    tell(pa.total_allocated_bytes())


def _own_bytes() -> int:
    memory = tree_memory(os.getpid())
    if memory is None:
        raise NotMeasuredError(
            "memory is read from /proc/PID/smaps_rollup, which this system does not have"
        )
    return memory


def measure_epoch(folder: Path, rows: int) -> Figures:
    """Rows per second of a loader over tensors, and over sets of the same rows."""
    labels = torch.arange(rows)
    pixels = (labels[:, None] * 31 + torch.arange(WIDTH)).to(torch.uint8)
    datasets: dict[str, Dataset[Any]] = {"tensors": TensorDataset(pixels, labels)}
    for parts in EPOCH_PARTS:
        pairs = zip(pixels.chunk(parts), labels.chunk(parts), strict=True)
        store.put(({"x": x, "y": y} for x, y in pairs), folder / f"set-{parts}")
        datasets[f"parts {parts}"] = store.get(folder / f"set-{parts}", data="x", label="y")
    epochs: dict[str, list[Epoch]] = {name: [] for name in datasets}
    for _ in range(EPOCHS):
        for name, dataset in datasets.items():
            with open_readers("none", dataset, 0, batch_size=BATCH, shuffle=True) as loader:
                epochs[name] += run_epochs(loader, count=2, indices=range(rows))[1:]
    return {name: rate(found) for name, found in epochs.items()}


def measure_prepare(folder: Path, rows: int) -> Figures:
    """Seconds in which the same processes make and write the same parts, with `prepare` and without."""
    make = partial(_columns, rows // PARTS)

    def prepare() -> None:
        store.prepare(make, range(PARTS), folder / "set", executor=pool, checksums=False)

    def bare() -> None:
        (folder / "bare").mkdir()
        list(pool.map(partial(_write, folder / "bare", make), range(PARTS)))

    def remove() -> None:
        for name in ("set", "bare"):
            shutil.rmtree(folder / name, ignore_errors=True)

    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        return in_turns({"prepare": prepare, "bare": bare}, TURNS, after=remove)


def _columns(rows: int, number: int) -> dict[str, Any]:
    return {"x": np.random.default_rng(number).random((rows, WIDTH), np.float32)}


def _write(folder: Path, make: Callable[[int], Any], number: int) -> None:
    batch = record_batch(make(number))
    write_part(str(folder / str(number)), batch, checksums=False)


MEASURES: dict[str, tuple[Callable[[Path, int], Figures], int]] = {
    "open": (measure_open, 80_000),
    "put": (measure_put, 80_000),
    "memory": (measure_memory, 320_000),
    "epoch": (measure_epoch, 60_000),
    "prepare": (measure_prepare, 80_000),
}
"""What is measured, with the number of rows."""


def rows(results: Results) -> list[Row]:
    of = partial(row, results)
    get = partial(of, "open", "get", name="get and the first batch", unit="s")
    epochs = {f"parts {n}": f"an epoch of {n} part{'s' * (n > 1)}" for n in EPOCH_PARTS}
    arrow, more = "Arrow's own memory", f"what {READERS} readers take more, of the set"
    return [
        get(against="np.load", aim=Aim("<=", 1.2)),
        get(against="shared_memory", aim=Aim("<=", 1.2)),
        get(against="torch.load", aim=Aim("<=", 0.5)),
        of("put", "put", unit="s", against="np.save", aim=Aim("<=", 1.3)),
        of("put", "put, checksums", name="put with checksums", unit="s", against="np.save"),
        of("memory", "one", name="one reader", unit="MiB"),
        of("memory", "more", name=more, unit="", aim=Aim("<=", 0.05, of="figure")),
        of("memory", "arrow", name=arrow, unit="bytes", aim=Aim("<=", 0, of="figure")),
        *(
            of("epoch", key, name=name, unit="rows/s", against="tensors", aim=Aim(">=", 0.9))
            for key, name in epochs.items()
        ),
        of("prepare", "prepare", unit="s", against="bare", aim=Aim("<=", 1.1)),
    ]
