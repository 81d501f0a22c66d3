"""The figures of loaders as metrics, which Prometheus reads at a port of this machine."""

from __future__ import annotations

import os
import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Any, Self

import torch.distributed as dist

from fastload.errors import needs
from fastload.telemetry.ranks import loader_name

_METRICS = {
    "samples": ("samples", "Samples handed to the loop."),
    "bytes": ("bytes", "Bytes of the tensors handed to the loop."),
    "errors": ("errors", "Samples that on_error skipped or replaced, and batches that raised."),
    "loop_wait_seconds": ("consumer_wait_s", "Seconds that the loop waited for batches."),
    "worker_busy_seconds": ("busy_s", "Thread-seconds of workers on samples and collating."),
    "ready_ratio": ("occupancy", "Share of the batches in flight that were ready, in the epoch."),
    "remote_requests": ("remote.requests", "Requests to object stores."),
    "remote_bytes": ("remote.bytes_fetched", "Bytes that came from object stores."),
    "remote_throttled": ("remote.throttled", "Requests that object stores throttled."),
    "gil_pressure_ratio": ("gil_pressure", "Wait for the GIL, of a switch interval, in the epoch."),
}
_SLOW = "Seconds for which this rank has been the slowest. Rank 0 says it, of a slow rank only."
_LABELS = ("rank", "loader")


def _figure(stats: Any, field: str) -> float:
    """Return a field, or a field of a part. It is 0 if the loader has no such part."""
    for name in field.split("."):
        stats = getattr(stats, name, 0)
    return float(stats)


class Metrics:
    """A running server of metrics. `serve_metrics` starts it.

    Examples:
        >>> with fastload.serve_metrics(loader, port=0) as metrics:
        ...     metrics.url.startswith("http://127.0.0.1:")
        True
    """

    def __init__(self, loaders: tuple[Any, ...], port: int, addr: str) -> None:
        try:
            from prometheus_client import CollectorRegistry, core, start_http_server
        except ModuleNotFoundError as error:
            raise needs("serve_metrics", "prometheus_client", "prometheus", error) from error
        names: Counter[str] = Counter()
        self._loaders = {loader_name(one, names): weakref.ref(one) for one in loaders}
        self._kinds: Any = core
        registry = CollectorRegistry()
        registry.register(self)
        self._server: Any
        self._server, self._thread = start_http_server(port, addr, registry)
        self.url = f"http://{addr}:{self._server.server_port}/metrics"
        _running.add(self)

    def collect(self) -> Iterator[Any]:
        """Yield the metrics. Prometheus's client calls this for each request."""
        grouped = dist.is_available() and dist.is_initialized()
        rank, alone = dist.get_rank() if grouped else 0, not grouped or dist.get_world_size() == 1
        found = {name: one for name, ref in self._loaders.items() if (one := ref()) is not None}
        # Of one time, so that the figures belong together.
        stats = {name: (one.stats(), one.stats(total=True)) for name, one in found.items()}
        for metric, (field, text) in _METRICS.items():
            total = not metric.endswith("_ratio")
            kind = self._kinds.CounterMetricFamily if total else self._kinds.GaugeMetricFamily
            family = kind(f"fastload_{metric}", text, labels=_LABELS)
            for name, now in stats.items():
                family.add_metric((str(rank), name), _figure(now[total], field))
            yield family
        slow = self._kinds.GaugeMetricFamily("fastload_slow_rank_seconds", _SLOW, labels=_LABELS)
        for name, loader in () if rank or alone else found.items():
            if (slowest := loader.stats(ranks=True).slowest) is not None:
                slow.add_metric((str(slowest.rank), name), slowest.since_s)
        yield slow

    def close(self) -> None:
        """Stop the server, and free its port."""
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.server_close()
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def serve_metrics(*loaders: Any, port: int, addr: str = "127.0.0.1") -> Metrics:
    """Serve the figures of loaders at http://127.0.0.1:PORT/metrics, for Prometheus, until `close()`.

    Needs `pip install 'torch-fastload[prometheus]'`. Each rank of a node needs a port of its own.

    Args:
        loaders: `fastload.DataLoader`s. Each has its name as a label: the class of its dataset, with a number if
            several have the same.
        port: the port. 0: any free one, which `Metrics.url` names.
        addr: the address. Others than the default let other machines read the figures.

    Returns:
        The running server. `close()` or the end of a `with` block stops it.

    Raises:
        NotInstalledError: prometheus_client is missing.
        OSError: the port is taken.

    Examples:
        >>> metrics = fastload.serve_metrics(loader, port=0)
        >>> metrics.close()
    """
    return Metrics(loaders, port, addr)


_running: weakref.WeakSet[Metrics] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    # The server is the parent's. A socket that stays open here would keep its port.
    for metrics in list(_running):
        if metrics._server is not None:
            metrics._server.socket.close()
            metrics._server = None


os.register_at_fork(after_in_child=_after_fork_in_child)
