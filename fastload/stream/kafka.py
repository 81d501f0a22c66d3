"""Kafka: messages from topics, and answers to one, by librdkafka."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from queue import SimpleQueue
from typing import Any, Literal

from fastload.errors import StreamError, needs
from fastload.stream.message import Message, to_json

try:
    from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition
except ModuleNotFoundError as error:
    raise needs("fastload.stream.Kafka", "confluent-kafka", "stream", error) from error

_POLL_S = 0.1
_CONNECT_S = 30.0
_PASSING = {
    KafkaError._PARTITION_EOF,
    KafkaError._TRANSPORT,
    KafkaError._ALL_BROKERS_DOWN,
    KafkaError._TIMED_OUT,
}


class Kafka:
    """Messages from Kafka topics, as a member of a consumer group.

    The offset of a message is stored after the sink has its answer, and committed every second and at the end. So
    messages are answered *at least once*. After a kill, messages since the last commit come again. Messages of a
    partition that moves to another member go there. While the brokers are unreachable, librdkafka waits for them.

    The reader asks for one message at a time. If the model needs longer than `max.poll.interval.ms` for one batch
    (default of librdkafka: five minutes), the brokers give its messages to another member. Increase it in `config`.

    Args:
        topics: one name, or several.
        group: name of the consumer group, which shares the partitions.
        servers: "host:port,host:port".
        key: "place": the key is "topic/partition/offset". "message": the key of the message as text, or its place if it
            has no key. Keys of messages may repeat.
        value: "bytes": `decode` gets the value of the message. "message": it gets the `confluent_kafka.Message`, with
            headers and time.
        config: more settings of librdkafka.

    Raises:
        StreamError: no broker answers within 30 s. The iteration raises it if the brokers refuse the topic or the
            group.
    """

    def __init__(
        self,
        topics: str | Sequence[str],
        *,
        group: str,
        servers: str,
        key: Literal["place", "message"] = "place",
        value: Literal["bytes", "message"] = "bytes",
        config: dict[str, Any] | None = None,
    ) -> None:
        if key not in ("place", "message") or value not in ("bytes", "message"):
            raise ValueError(
                f'expected key="place" or "message" and value="bytes" or "message", got key={key!r} and '
                f"value={value!r}"
            )
        self._own_key, self._whole = key == "message", value == "message"
        self._topics = [topics] if isinstance(topics, str) else [*topics]
        self._stopped = self._closed = False
        self._answered: SimpleQueue[dict[tuple[str, int], int]] = SimpleQueue()
        self._consumer = Consumer(
            {
                "bootstrap.servers": servers,
                "group.id": group,
                "auto.offset.reset": "earliest",
                "auto.commit.interval.ms": 1000,
                **(config or {}),
                "enable.auto.commit": True,
                "enable.auto.offset.store": False,
            }
        )
        try:
            self._consumer.list_topics(timeout=_CONNECT_S)
        except KafkaException as found:
            self._consumer.close()
            raise StreamError(
                f"no Kafka broker at {servers} answers ({found.args[0]}). Check servers="
            ) from found
        self._consumer.subscribe(self._topics)

    def __iter__(self) -> Iterator[Message]:
        while not self._stopped:
            self._store()
            # librdkafka has no call that wakes a waiting consumer, so this checks for `stop` ten times a second.
            if (found := self._consumer.poll(_POLL_S)) is None:
                continue
            if (error := found.error()) is not None:
                if error.fatal() or not (error.retriable() or error.code() in _PASSING):
                    raise StreamError(f"Kafka, {', '.join(self._topics)}: {error.str()}")
                continue
            at = (found.topic(), found.partition(), found.offset())
            key = "/".join(map(str, at))
            if self._own_key and (own := found.key()) is not None:
                key = own.decode(errors="surrogateescape")
            yield Message(key, found if self._whole else found.value(), at)

    def acknowledge(self, messages: Sequence[Message]) -> None:
        """Store the offsets after these messages, at the next poll."""
        self._answered.put({message.at[:2]: message.at[2] + 1 for message in messages})

    def _store(self) -> None:
        """Store the offsets of acknowledged messages, between two polls.

        The lock of the consumer is not fair. A second thread that stores offsets could wait as long as this one polls.
        """
        after: dict[tuple[str, int], int] = {}
        while not self._answered.empty():
            after |= self._answered.get()
        for (topic, partition), offset in after.items():
            try:
                self._consumer.store_offsets(offsets=[TopicPartition(topic, partition, offset)])
            except KafkaException as found:
                # The partition has moved to another member, which gets these messages again.
                if found.args[0].code() != KafkaError._STATE:
                    raise

    def stop(self) -> None:
        """End the iteration within a tenth of a second."""
        self._stopped = True

    def close(self) -> None:
        """Commit the stored offsets and leave the group."""
        if not self._closed:
            self._closed = True
            self._store()
            self._consumer.close()


class KafkaSink:
    """Answers to a Kafka topic, as JSON, each with the key of its message. A write ends when all replicas have them.

    A repeated answer has the same key. So the effect is *exactly once* in a compacted topic, or for a reader that keeps
    one answer per key.

    Args:
        topic: name of the topic.
        servers: "host:port,host:port".
        config: more settings of librdkafka.
    """

    def __init__(self, topic: str, *, servers: str, config: dict[str, Any] | None = None) -> None:
        self._topic = topic
        self._errors: list[str] = []
        self._producer = Producer(
            {
                "bootstrap.servers": servers,
                "enable.idempotence": True,
                "linger.ms": 0,
                **(config or {}),
            }
        )

    def write(self, answers: Sequence[tuple[Message, Any]]) -> None:
        """Write the answers, and return when the brokers have all.

        Raises:
            StreamError: the brokers refuse an answer.
        """
        for message, answer in answers:
            key = str(message.key).encode(errors="surrogateescape")
            self._produce(key, to_json(message, answer).encode())
        self._producer.flush()
        errors, self._errors = self._errors, []
        if errors:
            raise StreamError(f"Kafka, {self._topic}: {errors[0]}")

    def _produce(self, key: bytes, value: bytes) -> None:
        try:
            self._producer.produce(self._topic, value, key, on_delivery=self._delivered)
        except BufferError:  # librdkafka's own queue is full
            self._producer.flush()
            self._producer.produce(self._topic, value, key, on_delivery=self._delivered)

    def _delivered(self, error: KafkaError | None, _: Any) -> None:
        if error is not None:
            self._errors.append(error.str())

    def close(self) -> None:
        """Send the remaining answers."""
        self._producer.flush()
