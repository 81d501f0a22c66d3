"""Promises:
- Each Kafka message is answered at least once: its offset is committed only after its answer is held.
- The Kafka reader fetches one message at a time.
- librdkafka's mock broker stands for Kafka, with one member of a group at a time.

The broker is librdkafka's own mock, in this process.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from confluent_kafka import Consumer, Producer, TopicPartition

import fastload
from fastload.errors import StreamError
from fastload.stream import Kafka, KafkaSink, Message
from tests.promises.reading import wait_until

SOON = {"session.timeout.ms": 6000, "heartbeat.interval.ms": 300}
"""The mock broker notices only by a time-out that a member has left."""


@pytest.fixture
def servers() -> Iterator[str]:
    """A mock broker; topics are made when they are used, with four partitions."""
    broker = Producer({"bootstrap.servers": "unused", "test.mock.num.brokers": 1, "log_level": 0})
    found = broker.list_topics(timeout=30).brokers
    yield ",".join(f"{one.host}:{one.port}" for one in found.values())
    broker.flush()


def produce(servers: str, topic: str, values: list[str], partition: int = -1) -> None:
    producer = Producer({"bootstrap.servers": servers})
    for value in values:
        producer.produce(topic, value.encode(), partition=partition)
    producer.flush()


def consume(servers: str, topic: str, n: int) -> list[Any]:
    consumer = Consumer(
        {"bootstrap.servers": servers, "group.id": "look", "auto.offset.reset": "earliest"}
    )
    consumer.subscribe([topic])
    got: list[Any] = []
    wait_until(
        lambda: got.extend(consumer.consume(100, 0.2)) or len(got) >= n, f"{n} are there", 60
    )
    consumer.close()
    return got


def committed(servers: str, topic: str, group: str, partition: int) -> int:
    consumer = Consumer({"bootstrap.servers": servers, "group.id": group})
    [found] = consumer.committed([TopicPartition(topic, partition)], timeout=30)
    consumer.close()
    return int(found.offset)


def decode(value: bytes) -> torch.Tensor:
    return torch.tensor(int(value))


def read(source: Kafka, n: int) -> list[Message]:
    got: list[Message] = []
    for message in source:
        got.append(message)
        if len(got) == n:
            break
    return got


def test_messages_of_a_partition_come_in_order_with_their_places(servers: str) -> None:
    produce(servers, "in", [str(k) for k in range(50)], partition=2)
    source = Kafka("in", group="g", servers=servers, config=SOON)
    got = read(source, 50)
    source.close()
    assert [message.value for message in got] == [str(k).encode() for k in range(50)]
    assert [message.key for message in got] == [f"in/2/{k}" for k in range(50)]


def test_only_what_was_acknowledged_is_committed(servers: str) -> None:
    produce(servers, "in", [str(k) for k in range(50)], partition=1)
    source = Kafka("in", group="g", servers=servers, config=SOON)
    source.acknowledge(read(source, 50)[:20])
    source.close()
    assert committed(servers, "in", "g", 1) == 20
    again = Kafka("in", group="g", servers=servers, config=SOON)
    assert [message.at[2] for message in read(again, 30)] == list(range(20, 50))
    again.close()


def test_a_stream_is_answered_and_stop_commits_all_of_it(servers: str) -> None:
    values = [str(k) for k in range(500)]
    produce(servers, "in", values)
    answers = fastload.predict(
        lambda x: x * 2,
        Kafka("in", group="g", servers=servers, config=SOON),
        decode=decode,
        max_wait_ms=5,
    )
    sink = KafkaSink("out", servers=servers)
    runs = threading.Thread(target=answers.write_to, args=(sink,))
    runs.start()
    wait_until(lambda: answers.answered == 500, "all are answered", 20)
    answers.stop()
    runs.join(30)
    assert not runs.is_alive()
    sink.close()
    got = consume(servers, "out", 500)
    assert sorted(json.loads(one.value()) for one in got) == [2 * k for k in range(500)]
    assert len({one.key() for one in got}) == 500
    left = Kafka("in", group="g", servers=servers, config=SOON)
    produce(servers, "in", ["-1"])
    assert [message.value for message in read(left, 1)] == [b"-1"], "nothing comes again"
    left.close()


def test_poison_is_acknowledged_after_it_went_aside(servers: str) -> None:
    produce(servers, "in", ["1", "no number", "3"], partition=0)
    aside: list[str] = []
    answers = fastload.predict(
        lambda x: x,
        Kafka("in", group="g", servers=servers, config=SOON),
        decode=decode,
        on_failed=lambda message, error: aside.append(message.key),
    )
    for key, _ in answers:
        if key == "in/0/2":
            answers.stop()
    assert aside == ["in/0/1"]
    assert committed(servers, "in", "g", 0) == 3


def test_no_more_is_read_than_the_loop_takes(servers: str) -> None:
    """A reader that waits with many messages polls too seldom, and the brokers would call it dead."""
    produce(servers, "in", [str(k) for k in range(50)], partition=0)
    source = Kafka("in", group="g", servers=servers, config=SOON)
    messages = iter(source)
    for k in range(3):
        assert next(messages).value == str(k).encode()
        [place] = source._consumer.position([TopicPartition("in", 0)])
        assert place.offset == k + 1
    source.stop()
    assert list(messages) == []
    source.close()


def test_keys_may_be_the_messages_own_and_decode_may_see_headers(servers: str) -> None:
    producer = Producer({"bootstrap.servers": servers})
    for key in (b"a", None, b"\xff"):
        producer.produce("in", b"1", key, partition=0, headers={"h": b"x"})
    producer.flush()
    source = Kafka("in", group="g", servers=servers, key="message", value="message", config=SOON)
    got = read(source, 3)
    source.acknowledge(got)
    source.close()
    assert [message.key for message in got] == ["a", "in/0/1", "\udcff"]
    assert got[0].value.headers() == [("h", b"x")]
    assert committed(servers, "in", "g", 0) == 3
    sink = KafkaSink("out", servers=servers)
    sink.write([(message, 1) for message in [*got, Message(7, b"")]])
    sink.close()
    keys = {one.key() for one in consume(servers, "out", 4)}
    assert keys == {b"a", b"in/0/1", b"\xff", b"7"}, "as they were"


def test_arguments_are_checked() -> None:
    for wrong in ({"key": "own"}, {"value": "text"}):
        with pytest.raises(ValueError, match="expected key="):
            Kafka("in", group="g", servers="unused", **wrong)  # type: ignore[arg-type]


def test_no_broker_is_an_error_that_names_the_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastload.stream.kafka._CONNECT_S", 1.0)
    with pytest.raises(StreamError, match=r"no Kafka broker at 127\.0\.0\.1:1 .*servers="):
        Kafka("in", group="g", servers="127.0.0.1:1", config={"log_level": 0})


def test_a_sink_that_cannot_deliver_raises(servers: str) -> None:
    sink = KafkaSink(
        "out", servers=servers, config={"message.timeout.ms": 1, "socket.timeout.ms": 10}
    )
    too_large = "x" * 2_000_000
    with pytest.raises((StreamError, Exception), match="(?i)size|timed out"):
        sink.write([(Message("k", b""), too_large)])
