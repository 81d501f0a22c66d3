"""Promises:
- A process that is killed 15 times at random loses none of 2,000 files. The test is marked slow.
- A process that is killed 6 times, beside a broker that stalls 3 times, loses none of 10,000 Kafka messages.

Each round starts a process that predicts, and kills it with SIGKILL. The last process is left to finish.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE

import pytest
from confluent_kafka import Consumer, Producer

from tests.children import Python
from tests.promises.reading import wait_until

FOLDER = """
import sys, torch, fastload
from fastload.stream import Folder, FolderSink
watched, out = sys.argv[1:]
answers = fastload.predict(
    lambda x: x * 2,
    Folder(watched),
    decode=lambda path: torch.tensor(int(path.read_text())),
    batch_size=16,
    num_workers=2,
)
answers.write_to(FolderSink(out))
"""

BROKER = """
import sys
from tests.stream.broker import mock_broker
with mock_broker() as servers:
    print(servers, flush=True)
    sys.stdin.read()
"""

KAFKA = """
import sys, time, torch, fastload
from fastload.stream import Kafka, KafkaSink
from tests.stream.broker import SOON
def decode(value):
    time.sleep(0.002)  # so that kills strike in the middle
    return torch.tensor(int(value))
[servers] = sys.argv[1:]
answers = fastload.predict(
    lambda x: x * 2,
    Kafka("in", group="g", servers=servers, config=SOON),
    decode=decode,
    num_workers=2,
)
answers.write_to(KafkaSink("out", servers=servers))
"""


def run_until(
    program: str, arguments: list[str], done: Callable[[], int], goals: list[int], seconds: float
) -> int:
    """Start the program once for each goal, and kill it when `done()` reaches the goal. Return the number of kills."""
    for goal in goals:
        process = Python(["-c", program, *arguments])
        try:
            wait_until(
                lambda goal=goal, process=process: done() >= goal or process.poll() is not None,
                f"{goal} are answered",
                seconds,
            )
            assert process.poll() is None, "it ended by itself"
        finally:
            process.kill()
            process.wait()
        assert goal == goals[-1] or done() < goals[-1], "the kill struck in the middle"
    return len(goals)


def goals_of(n: int, kills: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [*sorted(rng.sample(range(1, n), kills)), n]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_no_file_of_a_folder_is_lost_or_answered_with_another_value(tmp_path: Path) -> None:
    n = 2_000
    watched, out = tmp_path / "in", tmp_path / "out"
    watched.mkdir()
    out.mkdir()
    for k in range(n):
        (watched / f"{k:04}").write_text(str(k))

    def answered() -> int:
        return sum(not name.startswith(".") for name in os.listdir(out))

    kills = run_until(FOLDER, [str(watched), str(out)], answered, goals_of(n, 15, seed=1), 60)
    assert kills == 16
    found = {
        name: json.loads((out / name).read_text()) for name in os.listdir(out) if name[0] != "."
    }
    assert found == {f"{k:04}.json": 2 * k for k in range(n)}


@contextmanager
def kafka_broker() -> Iterator[tuple[str, Python]]:
    """Run librdkafka's mock broker in a process of its own. Yield its address, and the process."""
    with Python(["-c", BROKER], stdin=PIPE, stdout=PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip(), process
        finally:
            process.kill()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_none_of_ten_thousand_kafka_messages_is_lost() -> None:
    """The broker keeps messages in its memory, so it is not killed but stands still three times, for a second."""
    n = 10_000
    values: dict[bytes, int] = {}
    stops = [1_500, 4_500, 8_500]
    with kafka_broker() as (servers, broker):
        producer = Producer({"bootstrap.servers": servers, "log_level": 0})
        for k in range(n):
            producer.produce("in", str(k).encode())
        producer.flush()
        reader = Consumer(
            {
                "bootstrap.servers": servers,
                "group.id": "look",
                "auto.offset.reset": "earliest",
                "log_level": 0,
            }
        )
        reader.subscribe(["out"])

        def answered() -> int:
            for message in reader.consume(1000, 0.05):
                if message.error() is None:
                    values[message.key()] = json.loads(message.value())
            if stops and len(values) > stops[0]:
                stops.pop(0)
                broker.send_signal(signal.SIGSTOP)
                time.sleep(1.0)  # the outage
                broker.send_signal(signal.SIGCONT)
            return len(values)

        run_until(KAFKA, [servers], answered, goals_of(n, 6, seed=2), 120)
        reader.close()
    assert not stops
    assert sorted(values.values()) == [2 * k for k in range(n)]
