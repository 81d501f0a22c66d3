"""Promises:
- Prefetch of table rows beside compute and push, both simulated, is measured against a loop that pulls by itself.
- Pulls from a parameter server are measured beside torch's RPC.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from statistics import median
from time import perf_counter, sleep
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed import rpc
from torch.utils.data import Dataset

from benchmarks._measure import NotMeasuredError, in_turns, seconds
from benchmarks._report import Aim, Figures, Results, Row, row
from benchmarks._run import Case
from fastload import DataLoader
from fastload.bench.figures import BenchError
from fastload.parameters import Embedding, Optimizer, PSClient, Server, TableInfo, connect
from fastload.parameters.flight import ParameterServer
from fastload.parameters.transport import Answer, Stub

TITLE = (
    "parameters: rows of 64 numbers, one server in another process, over Arrow Flight on loopback; prefetch: 2,048 ids "
    "a step of 100,000 by Zipf's law, 4 threads, simulated: a step of 10 ms that sleeps, 5 ms more for each request; "
    "pull: distinct rows, beside torch.distributed.rpc; medians of steps or calls"
)
REPEATS = 3

DIM, ROWS, IDS = 64, 100_000, 2_048
COMPUTE_S, LATENCY_S = 0.010, 0.005
TURNS = 3
PULLS = (2_000, 16_000)
ANSWER_S = 120.0


def cases(*, smoke: bool) -> list[Case]:
    steps, calls = (8, 5) if smoke else (150, 600)
    return [
        Case("prefetch", {"what": "prefetch", "count": steps}),
        Case("pull", {"what": "pull", "count": calls}),
    ]


def measure(*, what: str, count: int) -> Figures:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return {"prefetch": prefetch, "pull": pull}[what](count)
    finally:
        torch.set_num_threads(before)


# ---- prefetch ----


class Slow:
    """A stub whose answers arrive `LATENCY_S` later. Requests of several threads do not wait for one another."""

    def __init__(self, stub: Stub) -> None:
        self._stub = stub
        self.name = stub.name
        self.close = stub.close

    def start(self, method: str, arguments: Mapping[str, Any]) -> Callable[[], Answer]:
        finish = self._stub.start(method, arguments)

        def later() -> Answer:
            answer = finish()
            sleep(LATENCY_S)
            return answer

        return later


class Batches(Dataset[Tensor]):
    """Each sample is a batch of ids."""

    def __init__(self, count: int) -> None:
        drawn = torch.rand(count, IDS, generator=torch.Generator().manual_seed(0))
        self.ids = (ROWS**drawn).long() - 1

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> Tensor:
        return self.ids[index]


def prefetch(steps: int) -> Figures:
    """Return the seconds of a step in each way, and what a step and a push take alone."""
    found: dict[str, list[float]] = {}
    with serving() as address:
        client = PSClient([Slow(stub) for stub in connect(address)])
        train(client, steps, None)  # every row is made, every connection is open
        for turn in range(TURNS):
            ways: list[tuple[str, Literal[0, 1] | None]] = [
                ("no prefetch", None),
                ("staleness 0", 0),
                ("staleness 1", 1),
            ]
            for name, staleness in ways if turn % 2 == 0 else ways[::-1]:
                taken, pushes = train(client, steps, staleness)
                found.setdefault(name, []).extend(taken)
                if staleness == 0:
                    found.setdefault("push", []).extend(pushes)
        client.close()
    figures = {name: median(each) for name, each in found.items()}
    compute = median(seconds(lambda: sleep(COMPUTE_S)) for _ in range(max(steps // 4, 3)))
    figures["compute + push"] = compute + figures["push"]
    figures["max(compute, push)"] = max(compute, figures["push"])
    return figures


def train(
    client: PSClient, steps: int, staleness: Literal[0, 1] | None
) -> tuple[list[float], list[float]]:
    """Train; return the seconds of each step and of each push. `staleness` None: without prefetch."""
    taken, pushes = [], []
    with Embedding("t", DIM, client=client, rows=ROWS, staleness=staleness or 0) as table:
        collate: Callable[[Any], Any] = (
            _same if staleness is None else table.prefetching(_same, _same)
        )
        with DataLoader(
            Batches(steps),
            None,
            num_workers=4,
            prefetch_batches=8,
            collate_fn=collate,
        ) as loader:
            began = perf_counter()
            for ids in loader:
                rows = table(ids)
                sleep(COMPUTE_S)
                rows.sum().backward()
                pushes.append(seconds(lambda: table.push(0.01)))
                ended = perf_counter()
                taken.append(ended - began)
                began = ended
        if staleness is not None and table.counts()["prefetched"] != steps:
            raise BenchError(f"of {steps} batches only {table.counts()} were prefetched")
    return taken[1:], pushes[1:]


def _same(batch: Tensor) -> Tensor:
    return batch


# ---- pull ----


def pull(calls: int) -> Figures:
    """Return the pulls of each size in a second, and torch's calls that return the same rows.

    In a process of its own, because torch's RPC leaves files open.
    """
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(beside_rpc, calls).result()


def beside_rpc(calls: int) -> Figures:
    torch.set_num_threads(1)
    figures: Figures = {}
    with tempfile.TemporaryDirectory() as folder, serving(f"file://{folder}/rpc") as address:
        client = PSClient(connect(address))
        client.push_embedding_table_infos([TableInfo("t", DIM)])
        for count in PULLS:
            ids = torch.randperm(ROWS, generator=torch.Generator().manual_seed(0))[:count]
            ways = {
                "flight": lambda ids=ids: client.pull_embedding_vectors("t", ids),
                "rpc": lambda ids=ids: rpc.rpc_sync("server", rows_of, (ids,)),
            }
            if not torch.equal(*(way() for way in ways.values())):
                raise BenchError("the rows that came by RPC are others")
            taken = in_turns(ways, calls)
            figures |= {f"{name} {count:,}": 1 / each for name, each in taken.items()}
        client.close()
    return figures


# ---- the server ----

_served: list[Server] = []
"""In the server's process, the server."""


def rows_of(ids: Tensor) -> Tensor:
    """Return rows of the server of this process."""
    rows: Tensor = _served[0].answer("rows", {"table": "t", "ids": ids})["rows"]
    return rows


@contextmanager
def serving(meeting: str = "") -> Iterator[str]:
    """Run a server in a process of its own; yield its address. `meeting`: this process and the server meet by RPC."""
    context = get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=serve, args=(there, meeting), daemon=True)
    process.start()
    there.close()
    try:
        if not here.poll(ANSWER_S):
            raise BenchError(f"the server has not started within {ANSWER_S:g} s")
        address = here.recv()
        if meeting:
            _meet("worker", 0, meeting)
        yield address
        here.send("end")
        if meeting:
            rpc.shutdown()
        process.join(ANSWER_S)
    finally:
        process.kill()
        process.join()
        process.close()
        here.close()


def serve(pipe: Connection, meeting: str) -> None:
    """Serve, until the other process ends it."""
    torch.set_num_threads(1)
    _served.append(Server(optimizer=Optimizer(name="adagrad")))
    front = ParameterServer(_served[0])
    pipe.send(front.address("127.0.0.1"))
    if meeting:
        _meet("server", 1, meeting)
    pipe.recv()
    if meeting:
        rpc.shutdown()
    front.shutdown()


def _meet(name: str, rank: int, meeting: str) -> None:
    if not rpc.is_available():
        raise NotMeasuredError("this torch has no RPC")
    options = rpc.TensorPipeRpcBackendOptions(init_method=meeting, rpc_timeout=ANSWER_S)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "You are using a Backend")  # torch's, of torch's RPC
        rpc.init_rpc(name, rank=rank, world_size=2, rpc_backend_options=options)


def rows(results: Results) -> list[Row]:
    def step(key: str, bound: str, aim: Aim | None = None) -> Row:
        name = f"{key}, a step"
        return row(results, "prefetch", key, name=name, unit="s", against=bound, aim=aim)

    pull = partial(row, results, "pull", unit="pulls/s", reference="torch's RPC")
    return [
        step("no prefetch", "compute + push"),
        step("staleness 0", "compute + push", Aim("<=", 1.25)),
        step("staleness 1", "max(compute, push)", Aim("<=", 1.25)),
        pull("flight 2,000", name="2,000 rows", against="rpc 2,000", aim=Aim(">=", 2.0)),
        pull("flight 16,000", name="16,000 rows", against="rpc 16,000", aim=Aim(">=", 1.2)),
    ]
