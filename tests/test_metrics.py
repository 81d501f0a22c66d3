"""Promises:
- `serve_metrics` serves eight metrics of loaders at a port of this machine, until it is closed. Counters go on over
  epochs. Each loader has its own labels.
- A fork of the process does not serve, and keeps no port. Without prometheus_client an error names the extra.
"""

from __future__ import annotations

import os
import sys
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import fastload
from fastload import DataLoader, serve_metrics
from fastload.engine import ranks as engine_ranks
from fastload.errors import NotInstalledError
from fastload.metrics import Metrics
from fastload.telemetry.ranks import Ranks, RankStats
from tests.fakes import Numbers

parser = pytest.importorskip("prometheus_client.parser")


@pytest.fixture
def loader() -> Iterator[DataLoader[Any]]:
    with DataLoader(Numbers(100), 10, num_workers=1, worker_method="thread") as loader:
        yield loader


def read(metrics: Metrics) -> dict[str, dict[str, float]]:
    """Return the values of each metric by the loader's name, as a client of Prometheus's reads them."""
    with urllib.request.urlopen(metrics.url, timeout=10) as answer:
        families = parser.text_string_to_metric_families(answer.read().decode())
        found: dict[str, dict[str, float]] = {}
        for family in families:
            of_it = found.setdefault(family.name, {})
            for sample in family.samples:
                assert sample.labels.keys() == {"rank", "loader"}
                of_it[f"{sample.labels['rank']} {sample.labels['loader']}"] = sample.value
        return found


def test_eleven_metrics_of_each_loader(loader: DataLoader[Any]) -> None:
    other, tensors = DataLoader(Numbers(7), 7), DataLoader(TensorDataset(torch.arange(6)), 6)
    with serve_metrics(loader, other, tensors, port=0) as metrics:
        for _ in range(3):
            list(loader)
        list(tensors)
        found = read(metrics)
        assert len(found) == 11
        assert all(name.startswith("fastload_") for name in found)
        samples = {"0 Numbers": 300, "0 Numbers 2": 0, "0 TensorDataset": 6}
        assert found["fastload_samples"] == samples
        assert found["fastload_bytes"]["0 Numbers"] == 2400
        total = loader.stats(total=True)
        assert found["fastload_worker_busy_seconds"]["0 Numbers"] == pytest.approx(total.busy_s)
        assert found["fastload_loop_wait_seconds"]["0 Numbers"] == total.consumer_wait_s > 0
        assert found["fastload_slow_rank_seconds"] == {}
        list(loader)
        assert read(metrics)["fastload_samples"]["0 Numbers"] == 400


def test_a_loader_that_is_gone_has_no_metrics() -> None:
    gone = DataLoader(Numbers(7), 7)
    with serve_metrics(gone, port=0) as metrics:
        assert read(metrics)["fastload_samples"] == {"0 Numbers": 0}
        del gone
        assert read(metrics)["fastload_samples"] == {}


def test_rank_0_names_the_slow_rank(
    loader: DataLoader[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The group is simulated here; `tests/telemetry/test_ranks.py` has real ranks."""
    ranks = tuple(RankStats(n, 0, 9, 9, 10, n / 2, "storage", "", 12.0, False) for n in (0, 1))
    monkeypatch.setattr(engine_ranks, "of_ranks", lambda _: Ranks("Numbers", 2, ranks))
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    for rank, slow in ((0, {"1 Numbers": 12}), (1, {})):
        monkeypatch.setattr("torch.distributed.get_rank", lambda rank=rank: rank)
        with serve_metrics(loader, port=0) as metrics:
            found = read(metrics)
        assert found["fastload_slow_rank_seconds"] == slow
        assert found["fastload_samples"] == {f"{rank} Numbers": 0}


def test_only_this_machine_is_served_until_the_close(loader: DataLoader[Any]) -> None:
    metrics = serve_metrics(loader, port=0)
    assert metrics.url.startswith("http://127.0.0.1:")
    port = int(metrics.url.split(":")[2].split("/")[0])
    with pytest.raises(OSError, match="in use"):
        serve_metrics(loader, port=port)
    metrics.close()
    metrics.close()
    with pytest.raises(OSError, match="refused"):
        read(metrics)
    serve_metrics(loader, port=port).close()


def test_a_fork_neither_serves_nor_keeps_the_port(loader: DataLoader[Any]) -> None:
    metrics = serve_metrics(loader, port=0)
    port = int(metrics.url.split(":")[2].split("/")[0])
    ready, go_on = os.pipe(), os.pipe()
    if (pid := os.fork()) == 0:
        metrics.close()  # it would wait for a thread that is not here
        os.write(ready[1], b".")
        os.close(go_on[1])
        os.read(go_on[0], 1)
        os._exit(0)
    try:
        os.read(ready[0], 1)
        assert len(read(metrics)) == 11
        metrics.close()
        serve_metrics(loader, port=port).close()
    finally:
        for end in (*ready, *go_on):
            os.close(end)
        os.waitpid(pid, 0)


def test_without_its_library_the_extra_is_named(
    loader: DataLoader[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(NotInstalledError, match=r"prometheus_client.*\[prometheus\]"):
        fastload.serve_metrics(loader, port=0)
