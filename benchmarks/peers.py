"""Promises:
- fastload is measured beside other loaders, each by its own recipe: rates, first batch, CPU, memory, cold cache.
  `scripts/bench --peers` runs it.
- Every run of `peers` checks what was delivered, and a loader that did less has no figure. See also
  `tests/test_peers.py`.

The images, crops, flips and batches are the same for each, by the recipe of its own documents.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any, Literal

import torch

from benchmarks._measure import NotMeasuredError
from benchmarks._report import Aim, Figures, Results, Row, best, row
from benchmarks._run import Case
from benchmarks.recipes import SIZE, Task, files, packed, tree
from benchmarks.recipes._judge import check, run_pass
from fastload.measure.page_cache import cached_share, prepare_cache
from fastload.measure.processes import tree_memory

TITLE = (
    "peers: 2,048 JPEGs, RandomResizedCrop(224), flip, uint8, batches of 64, shuffled; second and later epochs, files "
    "in the page cache unless the row says otherwise"
)
REPEATS = 5

PACKAGES = (
    *("torchdata", "grain", "spdl", "nvidia-dali-cuda120"),
    *("webdataset", "mosaicml-streaming", "litdata", "ffcv"),
)

COUNT, SMOKE_COUNT = 2048, 64
BATCH = 64
PASSES = 3
FIRST_BATCH_S = 0.1

Group = Literal["files", "encoded", "jpeg", "raw"]
GROUPS: dict[Group, str] = {
    "files": "JPEG files",
    "encoded": "packed, full-size JPEG",
    "jpeg": "packed, JPEG of 256 px",
    "raw": "packed, pixels of 256 px",
}


PACKED_GROUPS: tuple[Group, ...] = ("encoded", "jpeg", "raw")


@dataclass(frozen=True, slots=True)
class Contender:
    """One loader over one form of the images."""

    group: Group
    name: str
    recipe: str
    variant: str = ""
    how: str = "planes"
    workers: int = 2
    needs: str = "torchvision"
    """The module without which there is no figure."""
    kind: Literal["ours", "peer"] = "peer"
    cold: bool = False
    """Measured with a cold cache as well."""

    @property
    def title(self) -> str:
        return f"{GROUPS[self.group]}: {self.name}"


HOW = {
    "planes": "planes",
    "last": "channels-last",
    "planes whole": "planes, whole images decoded",
}


def _ours(group: Group, how: str, *, cold: bool = False) -> Contender:
    recipe, variant = ("fused", "") if group == "files" else ("packed_set", group)
    name = f"fastload, a plan, {HOW[how]}, 2 threads"
    return Contender(group, name, recipe, variant, how, needs="fastload", kind="ours", cold=cold)


DECODERS = {"torchvision": "torchvision decoder + v2", "pillow": "Pillow + v1"}


def _loose(loader: str, decoder: str, workers: int = 2) -> Contender:
    """Return a user's unmodified dataset, under either loader."""
    ours = loader == "fastload"
    readers = f"{workers} {'threads' if ours else 'processes'}" if workers else "serial"
    return Contender(
        "files",
        f"{loader}, {DECODERS[decoder]}, {readers}",
        "loose",
        f"{'thread' if ours else 'torch'}-{decoder}",
        workers=workers,
        kind="ours" if ours else "peer",
        cold=(loader, decoder, workers) == ("torch", "torchvision", 2),
    )


FUSED = _ours("files", "planes", cold=True)
PACKED = {group: _ours(group, "planes", cold=True) for group in PACKED_GROUPS}
FFCV: dict[Group, Contender] = {
    group: Contender(
        group,
        f"FFCV{' (encoded anew)' * (group == 'encoded')}, 2 threads",
        "ffcv",
        group,
        needs="ffcv",
        cold=group != "encoded",
    )
    for group in PACKED_GROUPS
}
TORCH = [_loose("torch", decoder, workers) for decoder in DECODERS for workers in (0, 2, 4)]
CONTENDERS = [
    FUSED,
    _ours("files", "last"),
    _ours("files", "planes whole"),
    *(_loose("fastload", decoder) for decoder in DECODERS),
    *TORCH,
    Contender("files", "torchdata.nodes, 2 threads", "nodes", needs="torchdata"),
    Contender("files", "Grain, 2 threads", "grain", needs="grain"),
    Contender("files", "SPDL, FFmpeg, 2 threads", "spdl", needs="spdl"),
    Contender("files", "DALI on the CPU, 2 threads", "dali", needs="nvidia.dali"),
    PACKED["encoded"],
    Contender(
        "encoded", "WebDataset, 2 processes", "webdataset", "encoded", needs="webdataset", cold=True
    ),
    Contender("encoded", "MosaicML Streaming, 2 processes", "mds", "encoded", needs="streaming"),
    Contender("encoded", "LitData, 2 processes", "litdata", "encoded", needs="litdata"),
    FFCV["encoded"],
    PACKED["jpeg"],
    _ours("jpeg", "last"),
    _ours("jpeg", "planes whole"),
    FFCV["jpeg"],
    PACKED["raw"],
    _ours("raw", "last"),
    FFCV["raw"],
]

COLD = "cold cache"


def cases(*, smoke: bool) -> list[Case]:
    found = []
    for it in CONTENDERS:
        options: dict[str, Any] = {
            "recipe": it.recipe,
            "variant": it.variant,
            "how": it.how,
            "workers": it.workers,
            "cache": "warm",
            "count": SMOKE_COUNT if smoke else COUNT,
            "batch": 4 if smoke else BATCH,
        }
        found.append(Case(it.title, options, watch_memory=True))
        if it.cold:
            found.append(Case(f"{it.title}; {COLD}", options | {"cache": "cold"}))
    return found


def prepare(*, smoke: bool) -> None:
    """Make images and packed sets, so that no measured process has to; import nothing of a peer."""
    root = tree(SMOKE_COUNT if smoke else COUNT)
    for it in CONTENDERS:
        if it.group == "files" or reason(it):
            continue
        try:
            packed(it.recipe, it.variant, root)
        except (
            subprocess.CalledProcessError
        ) as error:  # The case will fail of it, or say why it is left out.
            print(f"peers: {it.title}: packing failed: {error}", file=sys.stderr)


def measure(
    *,
    recipe: str,
    variant: str,
    how: str,
    workers: int,
    cache: Literal["warm", "cold"],
    count: int,
    batch: int,
) -> Figures:
    """Rates and costs of one contender. BenchError unless each epoch is shuffled random crops of all images."""
    try:
        module: Any = importlib.import_module(f"benchmarks.recipes.{recipe}")
    except ImportError as error:
        raise NotMeasuredError(str(error)) from error
    root = tree(count)
    source = packed(recipe, variant, root) if hasattr(module, "pack") else root
    read = [str(path) for path in source.rglob("*") if path.is_file()]
    prepare_cache(read, cache)
    cached = cached_share(read)
    if cache == "cold" and cached is None:
        raise NotMeasuredError("this system does not tell which files are cached")
    torch.manual_seed(0)
    began = perf_counter()
    task = Task(source, variant, count, batch, workers, how)
    with contextmanager(module.opened)(task) as batches:
        passes = [run_pass(batches) for _ in range(1 if cache == "cold" else PASSES)]
        memory = tree_memory(os.getpid())
    check(passes, files(root), shape=[batch, 3, SIZE, SIZE])
    first, last = passes[0], passes[-1]
    figures = {"first_batch_s": first.first_at - began}
    if cached is not None:
        figures["cached"] = cached
    if cache == "cold":
        # Not from the start: what is compiled or started before the first batch is in that batch's figure.
        return figures | {"rate": (count - batch) / (last.ended_at - first.first_at)}
    samples = count * (len(passes) - 1)
    return figures | {
        "rate": samples / (last.ended_at - first.ended_at),
        "cpu_ms": 1000 * (last.cpu_s - first.cpu_s) / samples,
        "peak_mib": (memory or 0) / 2**20,
    }


def rows(results: Results) -> list[Row]:
    return [
        *_rates(results),
        *_others(results, "first_batch_s", "s to the first batch"),
        *_others(results, "cpu_ms", "CPU ms/img"),
        *_others(results, "peak_mib", "MiB at most"),
        *_cold(results),
    ]


def _rates(results: Results) -> list[Row]:
    """Images per second: ours with their aims first, a row for each thing that they are held against."""
    peers = [it.title for it in CONTENDERS if (it.group, it.kind) == ("files", "peer")]
    decoder = best(results, [it.title for it in TORCH if "torchvision" in it.variant], "rate")
    best_peer = best(results, peers, "rate")
    aims: list[tuple[Contender, str, str, float]] = [
        (FUSED, best_peer, "best peer", 1.75),
    ]
    # Against FFCV; where it is not installed, against torch on the files, of whose rate FFCV's is 3 and 6 times.
    for it, of_ffcv, of_torch in ((PACKED["jpeg"], 1.8, 5.4), (PACKED["raw"], 4.0, 24.0)):
        if reason(FFCV[it.group]) is None:
            aims.append((it, FFCV[it.group].title, "FFCV", of_ffcv))
        else:
            aims.append((it, decoder, "torch, torchvision decoder, on the files", of_torch))
    rate = partial(row, results, key="rate", unit="img/s")
    found = []
    for it in CONTENDERS:
        own = [aim for aim in aims if aim[0] is it]
        found += [
            rate(it.title, against=(other, "rate"), reference=named, aim=Aim(">=", bound))
            for _, other, named, bound in own
        ] or [rate(it.title, name=_named(it))]
    return found


def _others(results: Results, key: str, unit: str) -> list[Row]:
    """Another figure of all that have it, but those whose only difference is in the number of workers."""
    aims: dict[str, Aim] = {}
    if key == "first_batch_s":
        aim = Aim("<=", FIRST_BATCH_S, of="figure")
        aims = {PACKED["jpeg"].title: aim, PACKED["raw"].title: aim}
    return [
        row(results, it.title, key, unit=unit, name=_named(it), aim=aims.get(it.title))
        for it in CONTENDERS
        if it.workers == 2
    ]


def _cold(results: Results) -> list[Row]:
    """Figures from a cold cache. Rates are held against the fused path's."""
    base = f"{FUSED.title}; {COLD}"
    found = []
    for it in CONTENDERS:
        if not it.cold:
            continue
        case = f"{it.title}; {COLD}"
        of = partial(row, results, case, name=f"{_named(it)}; {COLD}")
        if case == base:
            found.append(of("rate", unit="img/s"))
        else:
            found.append(
                of("rate", unit="img/s", against=(base, "rate"), reference="fused plan on files")
            )
        found.append(of("first_batch_s", unit="s to the first batch"))
        found.append(of("cached", unit="of it cached at start"))
    return found


def reason(it: Contender) -> str | None:
    """Why there is no figure of it on this machine; None where there should be one."""
    try:
        found = importlib.util.find_spec(it.needs)
    except ModuleNotFoundError:  # of the package that it would be in
        found = None
    return None if found else f"{it.needs} is not installed"


def _named(it: Contender) -> str:
    why = reason(it)
    return it.title if why is None else f"{it.title} ({why})"
