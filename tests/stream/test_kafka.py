"""Promises:
- Each Kafka message is answered at least once: its offset is committed only after its answer is held.
- The Kafka reader fetches one message at a time.
- librdkafka's mock broker stands for Kafka, with one member of a group at a time.

The broker is librdkafka's own mock, in this process.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from confluent_kafka import Consumer, Producer, TopicPartition

import fastload
from fastload.stream import Kafka, KafkaSink
from tests.contracts.sources import Place, Sinks, Sources, Stream
from tests.promises.reading import wait_until
from tests.stream.broker import SOON, mock_broker


@pytest.fixture(scope="module")
def servers() -> Iterator[str]:
    with mock_broker() as address:
        yield address


@pytest.fixture
def topic(tmp_path: Path) -> str:
    """The name of a topic that no other test has."""
    return tmp_path.name


def open_kafka(servers: str, topic: str, **options: Any) -> Kafka:
    return Kafka(topic, group=topic, servers=servers, config=SOON, **options)


def produce(servers: str, topic: str, values: Iterable[int], partition: int = -1) -> None:
    producer = Producer({"bootstrap.servers": servers})
    for value in values:
        producer.produce(topic, str(value).encode(), partition=partition)
    producer.flush()


def consume(servers: str, topic: str) -> list[Any]:
    """Return the messages of a topic."""
    consumer = Consumer({"bootstrap.servers": servers, "group.id": "look"})
    partitions = consumer.list_topics(topic, timeout=30).topics[topic].partitions
    places = [TopicPartition(topic, k, 0) for k in partitions]
    count = sum(consumer.get_watermark_offsets(place, timeout=30)[1] for place in places)
    consumer.assign(places)
    got = consumer.consume(count, timeout=30) if count else []
    consumer.close()
    return got


def committed(servers: str, topic: str, partition: int) -> int:
    consumer = Consumer({"bootstrap.servers": servers, "group.id": topic})
    [found] = consumer.committed([TopicPartition(topic, partition)], timeout=30)
    consumer.close()
    return max(0, found.offset)


class Partition(Stream):
    """One partition of a topic."""

    def __init__(self, servers: str, topic: str) -> None:
        self.servers, self.topic, self.count = servers, topic, 0
        self.opening = (
            f"stream.Kafka({topic!r}, group={topic!r}, servers={servers!r}, config={SOON})"
        )

    def put(self, values: Iterable[int]) -> None:
        given = [*values]
        self.count += len(given)
        produce(self.servers, self.topic, given, partition=2)

    def left(self) -> list[int]:
        """Return the values from the committed offset on. Another member would get them after seconds."""
        return [*range(committed(self.servers, self.topic, 2), self.count)]


class TestSource(Sources):
    @pytest.fixture
    def stream(self, servers: str, topic: str) -> Stream:
        return Partition(servers, topic)


class Written(Place):
    def __init__(self, servers: str, topic: str) -> None:
        self.servers, self.topic = servers, topic
        self.opening = f"stream.KafkaSink({topic!r}, servers={servers!r})"

    def held(self) -> list[tuple[str, Any]]:
        found = consume(self.servers, self.topic)
        return [(one.key().decode(), json.loads(one.value())) for one in found]


class TestSink(Sinks):
    @pytest.fixture
    def place(self, servers: str, topic: str) -> Place:
        return Written(servers, topic)


def test_messages_of_a_partition_come_in_order_with_their_places(servers: str, topic: str) -> None:
    produce(servers, topic, range(50), partition=2)
    source = open_kafka(servers, topic)
    got = [*islice(source, 50)]
    source.close()
    assert [message.value for message in got] == [str(k).encode() for k in range(50)]
    assert [message.key for message in got] == [f"{topic}/2/{k}" for k in range(50)]


def test_a_stream_of_four_partitions_is_answered_and_nothing_comes_again(
    servers: str, topic: str
) -> None:
    for partition in range(4):
        produce(servers, topic, range(partition, 200, 4), partition)
    answers = fastload.predict(
        lambda x: x * 2,
        open_kafka(servers, topic),
        decode=lambda value: torch.tensor(int(value)),
        max_wait_ms=5,
    )
    sink = KafkaSink(f"{topic}-out", servers=servers)
    runs = threading.Thread(target=answers.write_to, args=(sink,))
    runs.start()
    wait_until(lambda: answers.answered == 200, "all are answered", 20)
    answers.stop()
    runs.join(30)
    assert not runs.is_alive()
    sink.close()
    got = consume(servers, f"{topic}-out")
    assert sorted(json.loads(one.value()) for one in got) == [2 * k for k in range(200)]
    assert len({one.key() for one in got}) == 200
    left = open_kafka(servers, topic)
    produce(servers, topic, [-1])
    assert [message.value for message in islice(left, 1)] == [b"-1"]
    left.close()


def test_no_more_is_read_than_the_loop_takes(servers: str, topic: str) -> None:
    """A reader that waits with many messages polls too seldom, and the brokers would call it dead."""
    produce(servers, topic, range(50), partition=0)
    source = open_kafka(servers, topic)
    messages = iter(source)
    for k in range(3):
        assert next(messages).value == str(k).encode()
        [place] = source._consumer.position([TopicPartition(topic, 0)])
        assert place.offset == k + 1
    source.stop()
    assert list(messages) == []
    source.close()
