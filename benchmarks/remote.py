"""Promise: Reads of object stores are measured beside other loaders at three latencies: rate, requests, CPU, memory.

A server of S3 and a proxy run beside all cases. The proxy begins each answer late, and counts requests and bytes. So a
new connection costs no more than an old one, and nothing bounds the bandwidth.
"""

from __future__ import annotations

import atexit
import importlib
import multiprocessing
import os
import tempfile
import threading
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any
from xmlrpc.client import ServerProxy
from xmlrpc.server import SimpleXMLRPCServer

import torch

from benchmarks._measure import NotMeasuredError
from benchmarks._report import Aim, Figures, Results, Row, row
from benchmarks._run import Case
from benchmarks.remote_recipes import BATCH, FILES, SETS, SIZE, WORKERS, Task, write
from fastload._kit.tables import columns
from fastload.bench.figures import BenchError
from fastload.measure.processes import cpu_seconds

TITLE = f"remote: objects of {SIZE // 1000} KB in S3, {WORKERS} workers, batches of {BATCH}, one epoch, nothing cached"
REPEATS = 3
PACKAGES = ("obstore", "s3fs", "s3torchconnector", "litdata", "mosaicml-streaming", "webdataset")

LATENCIES_MS = 20, 100, 0
COUNT, SMOKE_COUNT = 1920, 128
LIMIT_S = 100.0
"""The slowest case takes half of them. A worker that hangs, of whichever library, is killed then."""
DESK, MISSING = "FASTLOAD_BENCH_DESK", "FASTLOAD_BENCH_MISSING"
"""Variables by which a case finds the counts of the proxy, or why there is no server."""
RECIPES = {**FILES, **SETS}
FIGURES = {
    "rate": ("samples/s", ".0f"),
    "steady": ("after the first batch", ".0f"),
    "first_s": ("s to the first batch", ".2f"),
    "requests": ("requests/sample", ".3f"),
    "bytes": ("bytes/byte wanted", ".3f"),
    "cpu_s_gb": ("CPU s/GB", ".2f"),
    "peak_mib": ("MiB at most", ".0f"),
}
NOTE = """\
Server, proxy and clients share this machine's cores. So a rate says something of a loader only if latency bounds it: at
0 ms it is that of the server and the proxy. Requests, bytes and CPU say the same at each latency. Each time counts from
the making of the dataset on, listing and start of workers included, "after the first batch" apart."""


class Desk:
    """Tells cases, which are other processes, what the proxy counted."""

    def __init__(self, proxy: Any) -> None:
        self._proxy = proxy

    def begin(self, latency_s: float) -> bool:
        """Delay answers so long, and count anew."""
        self._proxy.latency_s = latency_s
        self._proxy.forget()
        return True

    def counts(self) -> tuple[int, float]:
        """Return the number of requests, and the bytes of objects in the answers, as a float: they are many."""
        return len(self._proxy.requests), float(self._proxy.bytes_sent)


def prepare(*, smoke: bool) -> None:
    """Start the server and the proxy, which end with this process, and fill the bucket."""
    import pytest

    from tests.remote.proxy import Proxy
    from tests.remote.servers import Bucket, SeaweedFS, environment

    stack = ExitStack()
    atexit.register(stack.close)
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    for name in ("server", "written"):
        (folder / name).mkdir()
    try:
        server = stack.enter_context(SeaweedFS(folder / "server"))
    except pytest.skip.Exception as missing:
        os.environ[MISSING] = str(missing)
        return
    task = Task(SMOKE_COUNT if smoke else COUNT, folder / "written")
    writer = multiprocessing.get_context("spawn").Process(target=write, args=(task,))
    writer.start()
    writer.join()
    if writer.exitcode:
        raise BenchError(f"writing the objects ended with {writer.exitcode}")
    for path in sorted(task.folder.rglob("*")):
        if path.is_file():
            Bucket(server).put(str(path.relative_to(task.folder)), path.read_bytes())
    proxy = stack.enter_context(Proxy(server))
    desk = SimpleXMLRPCServer(("127.0.0.1", 0), logRequests=False, allow_none=True)
    desk.register_instance(Desk(proxy))
    threading.Thread(target=desk.serve_forever, daemon=True).start()
    os.environ[DESK] = f"http://127.0.0.1:{desk.server_address[1]}"
    # MosaicML Streaming has a variable of its own.
    os.environ |= environment(proxy.url) | {"S3_ENDPOINT_URL": proxy.url}


def cases(*, smoke: bool) -> list[Case]:
    count = SMOKE_COUNT if smoke else COUNT
    return [
        Case(_case(name, ms), {"name": name, "ms": ms, "count": count}, True, limit_s=LIMIT_S)
        for ms, name in product((20,) if smoke else LATENCIES_MS, RECIPES)
    ]


def _case(name: str, ms: int) -> str:
    return f"{name}, {ms} ms"


def measure(*, name: str, ms: int, count: int) -> Figures:
    if MISSING in os.environ:
        raise NotMeasuredError(os.environ[MISSING])
    recipe = RECIPES[name]
    try:
        for module in recipe.modules.split():
            importlib.import_module(module)
    except ImportError as missing:
        raise NotMeasuredError(str(missing)) from missing
    desk: Any = ServerProxy(os.environ[DESK])
    with tempfile.TemporaryDirectory() as folder:
        desk.begin(ms / 1000)
        seen = []
        first = arrived = 0.0
        cpu, began = cpu_seconds() or 0, perf_counter()
        batches = iter(recipe.make(Task(count, Path(folder))))
        for batch in batches:
            arrived = perf_counter() - began
            first = first or arrived
            seen.append(batch if isinstance(batch, torch.Tensor) else batch[0])
        del batches
        cpu = (cpu_seconds() or 0) - cpu
        requests, sent = desk.counts()
    numbers = torch.cat(seen).tolist()
    if sorted(numbers) != [*range(count)]:
        raise BenchError(f"{len(numbers)} samples came, {len(set(numbers))} of {count} different")
    wanted = count * SIZE
    return {
        "rate": count / arrived,
        "steady": (count - len(seen[0])) / (arrived - first),
        "first_s": first,
        "requests": requests / count,
        "bytes": sent / wanted,
        "cpu_s_gb": cpu / wanted * 1e9,
        "peak_mib": 0.0,  # measured from outside
    }


def rows(results: Results) -> list[Row]:
    """Return what has an aim: at 20 ms."""
    files, packed = (_case(f"fastload, {of}", 20) for of in ("own dataset", "packed"))
    found = [
        row(results, files, "first_s", unit="s", aim=Aim("<=", 0.5, "figure")),
        row(results, files, "requests", unit="requests/sample", aim=Aim("<=", 1.05, "figure")),
    ]
    for ours, recipes, key, bound in (
        (files, FILES, "steady", 1.3),
        (packed, SETS, "rate", 1.5),  # a set may be there as a whole before the first batch comes
    ):
        for name in recipes:
            if not name.startswith("fastload"):
                aim = Aim(">=", 5 if name == "s3fs" else bound)
                against, unit = (_case(name, 20), key), "samples/s"
                found.append(row(results, ours, key, unit=unit, against=against, aim=aim))
    connector = _case("s3torchconnector", 20), "cpu_s_gb"
    unit, aim = "CPU s/GB", Aim("<=", 0.7)
    return [*found, row(results, files, "cpu_s_gb", unit=unit, against=connector, aim=aim)]


def text(results: Results) -> str:
    """Return a table for each latency and layout: medians, and the least and greatest rate."""
    lines: list[str] = []
    for ms, (layout, recipes) in product(LATENCIES_MS, (("an object each", FILES), ("sets", SETS))):
        table = [(f"{ms} ms, {layout}", *(head for head, _ in FIGURES.values()))]
        for name in recipes:
            runs = [of for of in results.get(_case(name, ms), ()) if of]
            table.append((name, *(_cell(key, runs) for key in FIGURES)))
        lines += [*columns(table, left=(0,)), ""]
    return "\n".join([*lines, NOTE])


def _cell(key: str, runs: list[Figures]) -> str:
    values = [of[key] for of in runs]
    if not values:
        return "-"
    kind = FIGURES[key][1]
    spread = f" ({min(values):{kind}}-{max(values):{kind}})" if key == "rate" else ""
    return f"{median(values):{kind}}{spread}"
