"""Promises:
- A Dask frame, array, bag or delayed parts become a set, divided evenly among the workers, which write it.
- Two Dask workers with separate roots write 10 parts each.
- Text in place of numbers in a Dask frame is refused.
- `prepare` runs on a Dask client's executor. It continues if a worker is killed, and makes no complete part again.
- A source that Dask gives up is a PrepareError.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from functools import partial
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from fastload.datasets.manifest import read_index
from fastload.errors import PrepareError, StoreFullError
from fastload.store import get, prepare, put
from fastload.store.root import collect

distributed = pytest.importorskip("distributed")
import dask  # noqa: E402
import dask.array as da  # noqa: E402
import dask.bag as db  # noqa: E402
import dask.dataframe as dd  # noqa: E402


def frame_of(number: int) -> pd.DataFrame:
    images = [np.full((4, 4), number + row / 8) for row in range(5)]
    return pd.DataFrame({"x": images, "y": np.arange(5) + 5 * number})


def frames(count: int) -> Any:
    return dd.concat([dd.from_delayed(dask.delayed(frame_of)(n)) for n in range(count)])


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> None:
    """Leave out the check of open sockets: Dask's client keeps its connections from test to test."""


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return [tmp_path_factory.mktemp(f"node{number}") for number in range(2)]


def cluster_of(roots: list[Path]) -> Any:
    """Return a cluster of a worker for each root, which is not started again if it ends."""
    workers = {
        f"w{number}": {
            "cls": distributed.Nanny,
            "options": {
                "nthreads": 1,
                "env": {"FASTLOAD_STORE": str(root), "FASTLOAD_NODE": f"node{number}"},
            },
        }
        for number, root in enumerate(roots)
    }
    scheduler = {
        "cls": distributed.Scheduler,
        "options": {"dashboard_address": "127.0.0.1:0", "port": 0},
    }
    return distributed.SpecCluster(workers=workers, scheduler=scheduler)


@pytest.fixture(scope="module")
def client(roots: list[Path], forkserver: ForkServerContext) -> Iterator[Any]:
    """Start two workers. They are forks of a server that has torch, which saves its imports."""
    with (
        dask.config.set({"distributed.worker.multiprocessing-method": "forkserver"}),
        cluster_of(roots) as cluster,
        distributed.Client(cluster) as client,
    ):
        yield client


def left(root: Path) -> list[str]:
    return sorted(os.listdir(root / ".unsealed")) if (root / ".unsealed").is_dir() else []


@pytest.mark.slow
def test_twenty_partitions_lie_on_two_nodes(
    client: Any, roots: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = put(frames(20), "mnist", client=client)
    for number, root in enumerate(roots):
        path = root / "mnist"
        assert len(list(path.glob("*.arrow"))) == 10
        index = read_index(str(path))
        assert (index.id, len(index.shards)) == (made, 20)
        assert [shard.node for shard in index.shards] == ["node0"] * 10 + ["node1"] * 10
        monkeypatch.setenv("FASTLOAD_NODE", f"node{number}")
        rows = get("mnist", data="x", label="y", root=root)
        assert len(rows) == 50
        image, label = rows[7]
        assert label == 50 * number + 7
        assert torch.equal(image, torch.full((4, 4), 10 * number + 1 + 2 / 8).double())


def test_workers_with_one_root_share_a_folder(client: Any, tmp_path: Path) -> None:
    put(frames(4), "shared", root=tmp_path)  # the current client
    index = read_index(str(tmp_path / "shared"))
    assert [shard.name for shard in index.shards] == sorted(os.listdir(tmp_path / "shared"))[1:]
    assert len(index.shards) == 4
    labels = [int(label) for _, label in get("shared", data="x", label="y", root=tmp_path)]
    assert labels == list(range(20))


@pytest.mark.parametrize("kind", ["frame", "pandas", "array", "arrays", "bag", "delayed"])
def test_every_collection(client: Any, tmp_path: Path, kind: str) -> None:
    numbers = da.arange(12, chunks=4)
    images = da.from_array(np.arange(48.0).reshape(12, 2, 2), chunks=(4, 1, 2))
    rows = [{"x": np.full((2, 2), float(n)), "y": n} for n in range(12)]
    whole = pd.DataFrame({"x": [row["x"] for row in rows], "y": range(12)})
    data = {
        "frame": frames(3),
        "pandas": dd.from_pandas(whole, npartitions=3),  # converts text as it is built
        "array": images,
        "arrays": {"x": images, "y": numbers},
        "bag": db.from_sequence(rows, npartitions=3),
        "delayed": [dask.delayed(frame_of)(n) for n in range(3)],
    }[kind]
    put(data, "some", client=client, root=tmp_path)
    index = read_index(str(tmp_path / "some"))
    assert len(index.shards) == 3
    assert dict(index.schema)[index.schema[0][0]].startswith("extension<arrow.fixed_shape_tensor")


def test_text_among_numbers_raises_and_leaves_nothing(client: Any, roots: list[Path]) -> None:
    def bad(number: int) -> pd.DataFrame:
        frame = frame_of(number)
        if number == 2:
            frame.at[3, "x"] = "[[0. 0.]]"
        return frame

    meta = frame_of(0)
    data = dd.from_delayed([dask.delayed(bad)(n) for n in range(4)], meta=meta)
    with pytest.raises(ValueError, match="partition 2: column 'x', row 3: .* text"):
        put(data, "bad", client=client)
    wait_until_empty(client, roots)
    assert not any((root / "bad").exists() for root in roots)


def test_a_full_store_is_told_to_the_client(client: Any, tmp_path: Path) -> None:
    def fill() -> None:
        from fastload.store import room

        room.free_bytes = lambda path: 10

    def empty() -> None:
        import importlib

        from fastload.store import room

        importlib.reload(room)

    client.run(fill)
    try:
        with pytest.raises(StoreFullError) as caught:
            put(frames(2), "full", client=client, root=tmp_path)
    finally:
        client.run(empty)
    assert caught.value.free == 10
    wait_until_empty(client, [tmp_path])


def test_a_name_that_one_node_has_stays_free_on_the_other(client: Any, roots: list[Path]) -> None:
    put({"y": np.arange(3)}, "taken", root=roots[1])
    with pytest.raises(FileExistsError):
        put(frames(4), "taken", client=client)
    assert not (roots[0] / "taken").exists()
    wait_until_empty(client, roots)


def test_without_a_client_the_partitions_are_computed_here(tmp_path: Path) -> None:
    from fastload.store.dask import local_parts

    put(local_parts(frames(2)), "here", root=tmp_path)
    assert len(get("here", data="x", label="y", root=tmp_path)) == 10


def test_prepare_on_the_executor_of_a_client(client: Any, tmp_path: Path) -> None:
    done = prepare(frame_of, range(4), "prepared", executor=client.get_executor(), root=tmp_path)
    assert (done.rows, done.made) == (20, 4)


def dies_at_three(folder: Path, deaths: int, number: int) -> pd.DataFrame:
    """Log the call, and kill the worker at the source 3, `deaths` times."""
    with (folder / "calls").open("a") as calls:
        calls.write(f"{number}\n")
    if number == 3 and (folder / "calls").read_text().split().count("3") <= deaths:
        os.kill(os.getpid(), signal.SIGKILL)
    return frame_of(number)


@pytest.mark.slow
@pytest.mark.parametrize("deaths", [1, 4])  # Dask gives up a task at the fourth death
def test_prepare_goes_on_after_a_worker_of_dask_was_killed(deaths: int, tmp_path: Path) -> None:
    function = partial(dies_at_three, tmp_path, deaths)
    with (
        dask.config.set({"distributed.scheduler.allowed-failures": 3}),
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, dashboard_address="127.0.0.1:0", host="127.0.0.1"
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        run = partial(prepare, function, range(8), tmp_path / "set", executor=client.get_executor())
        if deaths == 4:
            with pytest.raises(
                PrepareError, match=r"gave up the source \d: KilledWorker.*Call prep"
            ):
                run()
            assert not (tmp_path / "set").exists()
        done = run()
    assert done.rows == 40
    assert get(tmp_path / "set", data="y").__getitems__(range(40)) == list(range(40))
    calls = (tmp_path / "calls").read_text().split()
    assert calls.count("3") == deaths + 1
    assert calls.count("0") == 1, "the part was complete, and is not made again"


def wait_until_empty(client: Any, roots: list[Path]) -> None:
    """Dask drops the folders a moment after the put has failed."""
    import time

    end = time.monotonic() + 10
    while any(left(root) for root in roots) and time.monotonic() < end:
        time.sleep(0.05)
    assert [left(root) for root in roots] == [[] for _ in roots]
    assert not any(collect(str(root)) for root in roots)
