"""Sources and sinks by their address: -, a file, or a folder."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

from fastload.errors import UsageError
from fastload.stream.folder_sink import FolderSink
from fastload.stream.json_lines import JSONLines, JSONLinesSink
from fastload.stream.message import Sink, Source


def open_source(address: str, *, key: str | None = None) -> Source:
    """Return the source at an address.

    Args:
        address: "-" (standard input), a file of JSON lines, or a folder to watch.
        key: name of the key in JSON lines, see `JSONLines`.

    Raises:
        UsageError: the address is none of these.
        ModuleNotFoundError: watchdog is not installed, and a folder needs it.

    Examples:
        >>> with open("messages.jsonl", "w") as file:
        ...     _ = file.write("[1, 2]")
        >>> [message.value for message in fastload.stream.open_source("messages.jsonl")]
        [[1, 2]]
    """
    if key is not None and os.path.isdir(address):
        raise UsageError(
            f"{address} is a folder, whose keys are names of files. Remove the key {key!r}"
        )
    if os.path.isdir(address):
        from fastload.stream.folder import Folder

        return Folder(address)
    if address != "-" and not os.path.exists(address):
        raise UsageError(
            f"the source {address} does not exist. Give a file of JSON lines, a folder, or - for standard input. For "
            "Kafka, see docs/predict.md"
        )
    return JSONLines(None if address == "-" else address, key=key)


def open_sink(address: str) -> Sink:
    """Return the sink at an address: "-", a file that gets JSON lines, or a folder.

    A path that does not exist becomes a file if the name has a suffix, such as .jsonl, else a folder.

    Args:
        address: the address.

    Raises:
        UsageError: the address is that of a Kafka topic, which earlier versions took.

    Examples:
        >>> fastload.stream.open_sink("answers.jsonl").close()
    """
    if address.startswith("kafka:"):
        raise UsageError(f"{address} is not a file or a folder. For Kafka, see docs/predict.md")
    if address == "-":
        return JSONLinesSink(None)
    is_new_folder = not os.path.exists(address) and not os.path.splitext(address)[1]
    if is_new_folder or os.path.isdir(address):
        return FolderSink(address)
    return JSONLinesSink(address)


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
