"""Prediction on streams of messages: `fastload.predict`, with its sources and sinks.

answers: the loop. batches: the threads that read and decode, and the deadline. message: messages, sources and sinks.
json_lines: standard input, files and the list of failed messages. folder: a watched folder. folder_sink: a folder of
answers. addresses: sources and sinks by their names on a command line.
"""

from typing import TYPE_CHECKING, Any

from fastload.stream.addresses import json_to_tensors, open_sink, open_source
from fastload.stream.answers import Answers, predict
from fastload.stream.folder_sink import FolderSink
from fastload.stream.json_lines import JSONLines, JSONLinesSink, SideList
from fastload.stream.message import Message, Poison, Sink, Source

if TYPE_CHECKING:
    from fastload.stream.folder import Folder

__all__ = [
    "Answers",
    "Folder",
    "FolderSink",
    "JSONLines",
    "JSONLinesSink",
    "Message",
    "Poison",
    "SideList",
    "Sink",
    "Source",
    "json_to_tensors",
    "open_sink",
    "open_source",
    "predict",
]


if not TYPE_CHECKING:  # one that sees it takes each name for one that exists

    def __getattr__(name: str) -> Any:  # its library is optional
        if name == "Folder":
            from fastload.stream.folder import Folder

            return Folder
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
