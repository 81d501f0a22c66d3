"""Promises:
- The throughput of `fastload.predict` is measured beside the same loader over a list, and beside a plain loop of
  batch 1 with a `queue.Queue`.
- The latency of `fastload.predict` is measured at half load.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from queue import Queue
from statistics import median, quantiles
from threading import Thread
from time import perf_counter, sleep

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import Dataset

import fastload
from benchmarks._measure import seconds as seconds_of
from benchmarks._report import Aim, Figures, Results, Row, row
from benchmarks._run import Case
from benchmarks.images import sample_images
from fastload.bench.figures import BenchError

TITLE = (
    "stream: JPEG files as messages, resized to 64 x 64, a small convolutional network, batches of 64, 2 threads that "
    "decode; throughput: medians of 3 turns; latency: messages at even intervals at half the throughput, max_wait_ms 5"
)
REPEATS = 3

MAX_WAIT_S = 0.005
TURNS = 3
SECONDS = 8.0


def cases(*, smoke: bool) -> list[Case]:
    count = 64 if smoke else 1_000
    seconds = 0.5 if smoke else SECONDS
    return [
        Case("throughput", {"what": "throughput", "count": count, "seconds": seconds}),
        Case("latency", {"what": "latency", "count": count, "seconds": seconds}),
    ]


def measure(*, what: str, count: int, seconds: float) -> Figures:
    torch.set_num_threads(1)
    files = [Path(path).read_bytes() for path in sample_images(min(count, 256))]
    messages = [files[k % len(files)] for k in range(count)]
    net = network()
    if what == "throughput":
        return {
            name: median(run(messages, net) for _ in range(TURNS)) for name, run in RATES.items()
        }
    return latency(messages, net, seconds)


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 16, 3, 2), nn.ReLU(), nn.Conv2d(16, 32, 3, 2), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)).eval()


def decode(file: bytes) -> Tensor:
    """Return float32[3, 64, 64]."""
    with Image.open(io.BytesIO(file)) as image:
        small = image.convert("RGB").resize((64, 64))
    return torch.from_numpy(np.asarray(small).transpose(2, 0, 1) / np.float32(255))


class Files(Dataset[Tensor]):
    """The messages as a list."""

    def __init__(self, messages: Sequence[bytes]) -> None:
        self.messages = messages

    def __len__(self) -> int:
        return len(self.messages)

    def __getitem__(self, index: int) -> Tensor:
        return decode(self.messages[index])


def of_stream(messages: Sequence[bytes], net: nn.Module) -> Iterator[Tensor]:
    for _, answer in fastload.predict(net, messages, decode=decode, num_workers=2):
        yield answer


def of_list(messages: Sequence[bytes], net: nn.Module) -> Iterator[Tensor]:
    with fastload.DataLoader(Files(messages), 64, num_workers=2) as loader, torch.no_grad():
        for batch in loader:
            yield from net(batch)


def of_queue(messages: Sequence[bytes], net: nn.Module) -> Iterator[Tensor]:
    queue: Queue[bytes | None] = Queue(maxsize=64)

    def read() -> None:
        for message in messages:
            queue.put(message)
        queue.put(None)

    Thread(target=read).start()
    while (message := queue.get()) is not None:
        with torch.no_grad():
            yield net(decode(message)[None])[0]


def rate(way: Callable[..., Iterator[Tensor]], messages: Sequence[bytes], net: nn.Module) -> float:
    """Return the messages answered each second."""
    began = perf_counter()
    found = sum(1 for _ in way(messages, net))
    if found != len(messages):
        raise BenchError(f"{found} of {len(messages)} messages were answered")
    return len(messages) / (perf_counter() - began)


RATES = {
    "stream": partial(rate, of_stream),
    "list": partial(rate, of_list),
    "queue": partial(rate, of_queue),
}


def latency(messages: Sequence[bytes], net: nn.Module, seconds: float) -> Figures:
    def answer(message: bytes) -> None:
        with torch.no_grad():
            net(decode(message)[None])

    rate(of_stream, messages[:64], net)
    half = median(rate(of_stream, messages, net) for _ in range(TURNS)) / 2
    alone = median(seconds_of(partial(answer, message)) for message in messages[:20])
    found: Figures = {"half load": half, "bound": MAX_WAIT_S + 1.5 * alone}
    ways: dict[str, Callable[..., Iterator[Tensor]]] = {"stream": of_stream, "queue": of_queue}
    for name, way in ways.items():
        source = _Even(messages, half, round(half * seconds))
        waits = sorted(perf_counter() - source.sent[k] for k, _ in enumerate(way(source, net)))
        found[f"{name} p50"] = median(waits)
        found[f"{name} p99"] = quantiles(waits, n=100)[98]
    return found


class _Even:
    """Messages at even intervals. `sent` has when each was due."""

    def __init__(self, messages: Sequence[bytes], rate: float, count: int) -> None:
        self.messages, self.rate, self.count = messages, rate, count
        self.sent: list[float] = []

    def __iter__(self) -> Iterator[bytes]:
        began = perf_counter()
        for k in range(self.count):
            due = began + k / self.rate
            if (left := due - perf_counter()) > 0:
                sleep(left)
            self.sent.append(due)
            yield self.messages[k % len(self.messages)]


def rows(results: Results) -> list[Row]:
    answered = partial(row, results, "throughput", "stream", unit="messages/s")
    wait = partial(row, results, "latency", unit="s")
    return [
        answered(against="list", aim=Aim(">=", 0.9)),
        answered(against="queue"),
        wait("stream p99", name="stream p99 at half load", against="bound", aim=Aim("<=", 1.0)),
        wait("stream p50", name="stream p50 at half load", against="bound"),
        wait("stream p99", name="stream p99 at half load", against="queue p99"),
    ]
