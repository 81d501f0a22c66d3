"""Sources and sinks by their address: -, a file, a folder, or kafka://SERVERS/TOPIC."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import torch

from fastload.errors import UsageError
from fastload.stream.folder_sink import FolderSink
from fastload.stream.json_lines import JSONLines, JSONLinesSink
from fastload.stream.message import Sink, Source


def open_source(address: str, *, key: str | None = None) -> Source:
    """Return the source at an address.

    Args:
        address: "-" (standard input), a file of JSON lines, a folder to watch, or "kafka://SERVERS/TOPIC?group=GROUP".
            Several topics are separated by commas.
        key: name of the key in JSON lines, see `JSONLines`.

    Raises:
        UsageError: the address is none of these.
        ModuleNotFoundError: its library is not installed. Errors of the source are raised as they are.

    Examples:
        >>> with open("messages.jsonl", "w") as file:
        ...     _ = file.write("[1, 2]")
        >>> [message.value for message in fastload.stream.open_source("messages.jsonl")]
        [[1, 2]]
    """
    of_kafka = address.startswith("kafka:")
    if key is not None and (of_kafka or os.path.isdir(address)):
        raise UsageError(
            f"the key {key!r} works only for JSON lines, but {address} has none. Remove the key. Files and messages "
            "of Kafka have keys of their own"
        )
    if of_kafka:
        servers, topics, group = _of_kafka(address)
        if not group:
            raise UsageError(
                f"{address} has no consumer group. Add one: kafka://SERVERS/TOPIC?group=GROUP"
            )
        from fastload.stream.kafka import Kafka

        return Kafka(topics.split(","), group=group, servers=servers)
    if os.path.isdir(address):
        from fastload.stream.folder import Folder

        return Folder(address)
    if address != "-" and not os.path.exists(address):
        raise UsageError(
            f"the source {address} does not exist. Give a file of JSON lines, a folder, - for standard input, or "
            "kafka://SERVERS/TOPIC?group=GROUP"
        )
    return JSONLines(None if address == "-" else address, key=key)


def open_sink(address: str) -> Sink:
    """Return the sink at an address: "-", a file that gets JSON lines, a folder, or "kafka://SERVERS/TOPIC".

    A path that does not exist becomes a file if the name has a suffix, such as .jsonl, else a folder.

    Args:
        address: the address.

    Raises:
        UsageError: see `open_source`.

    Examples:
        >>> fastload.stream.open_sink("answers.jsonl").close()
    """
    if address.startswith("kafka:"):
        servers, topic, _ = _of_kafka(address)
        from fastload.stream.kafka import KafkaSink

        return KafkaSink(topic, servers=servers)
    if address == "-":
        return JSONLinesSink(None)
    is_new_folder = not os.path.exists(address) and not os.path.splitext(address)[1]
    if is_new_folder or os.path.isdir(address):
        return FolderSink(address)
    return JSONLinesSink(address)


def _of_kafka(address: str) -> tuple[str, str, str]:
    """Return the servers, the topic, and the group or ""."""
    parts = urlsplit(address)
    query, topic = parse_qs(parts.query), parts.path.strip("/")
    if not parts.netloc or not topic or "/" in topic or query.keys() - {"group"}:
        raise UsageError(
            f"expected kafka://SERVERS/TOPIC?group=GROUP, such as kafka://host:9092/in?group=g, got {address!r}"
        )
    return parts.netloc, topic, query.get("group", [""])[0]


def json_to_tensors(value: Any) -> Any:
    """Return a sample from JSON. Numbers and lists of numbers become float32 tensors, within objects too.

    Args:
        value: a JSON value, bytes of JSON, or the path of a file of JSON.

    Examples:
        >>> fastload.stream.json_to_tensors(b'{"x": [1, 2]}')
        {'x': tensor([1., 2.])}
    """
    if isinstance(value, os.PathLike):
        value = Path(value).read_bytes()
    return _tensors(json.loads(value) if isinstance(value, bytes) else value)


def _tensors(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _tensors(member) for name, member in value.items()}
    return (
        torch.tensor(value, dtype=torch.float32) if isinstance(value, int | float | list) else value
    )
