"""librdkafka's mock broker, which stands for Kafka in tests."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import confluent_kafka

SOON = {"session.timeout.ms": 3000, "heartbeat.interval.ms": 300, "log_level": 0}
"""Settings of consumers. The mock broker notices only by the timeout that a member has left."""


@contextmanager
def mock_broker() -> Iterator[str]:
    """Run a broker in this process, and yield its address. A topic has four partitions from its first use on.

    A new group has its partitions at once instead of after three seconds, which only the library's C functions can set.
    """
    (path,) = Path(confluent_kafka.__file__).parents[1].glob("confluent_kafka.libs/librdkafka*")
    library = ctypes.CDLL(str(path))
    for name in ("rd_kafka_conf_new", "rd_kafka_new", "rd_kafka_mock_cluster_new"):
        getattr(library, name).restype = ctypes.c_void_p
    library.rd_kafka_mock_cluster_bootstraps.restype = ctypes.c_char_p
    error = ctypes.create_string_buffer(512)
    settings = ctypes.c_void_p(library.rd_kafka_conf_new())
    library.rd_kafka_conf_set(settings, b"log_level", b"0", error, ctypes.c_size_t(512))
    client = ctypes.c_void_p(library.rd_kafka_new(0, settings, error, ctypes.c_size_t(512)))
    assert client, error.value
    cluster = ctypes.c_void_p(library.rd_kafka_mock_cluster_new(client, 1))
    try:
        library.rd_kafka_mock_group_initial_rebalance_delay_ms(cluster, 0)
        yield library.rd_kafka_mock_cluster_bootstraps(cluster).decode()
    finally:
        library.rd_kafka_mock_cluster_destroy(cluster)
        library.rd_kafka_destroy(client)
