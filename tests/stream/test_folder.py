"""Promise: each file of a watched folder is a message once, when it is complete, until its answer is held."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import fastload
from fastload.stream import Folder, FolderSink, Message
from tests.promises.reading import wait_until


class Reader:
    """Reads a source in a thread."""

    def __init__(self, source: Folder) -> None:
        self.source = source
        self.messages: list[Message] = []
        self._thread = threading.Thread(target=lambda: self.messages.extend(self._each()))
        self._thread.start()

    def _each(self) -> Iterator[Message]:
        for message in self.source:
            self.messages.append(message)
        yield from ()

    @property
    def names(self) -> list[str]:
        return [message.key for message in self.messages]

    def wait(self, *names: str) -> None:
        wait_until(lambda: set(names) <= set(self.names), f"{names} are read")

    def end(self) -> None:
        self.source.close()
        self._thread.join(10)
        assert not self._thread.is_alive()


def test_files_come_by_name_and_then_as_they_are_closed_or_moved_in(tmp_path: Path) -> None:
    watched = tmp_path / "in"
    watched.mkdir()
    for name in ("b", "a", ".hidden", "c.tmp"):
        (watched / name).write_text(name)
    reader = Reader(Folder(watched))
    reader.wait("a", "b")
    with open(watched / "slow", "w") as file:
        file.write("half")
        file.flush()
        (watched / "quick").write_text("quick")
        reader.wait("quick")
        assert "slow" not in reader.names
        file.write("whole")
    reader.wait("slow")
    (watched / "later.tmp").write_text("x")
    os.rename(watched / "later.tmp", watched / "later")
    (tmp_path / "outside").write_text("y")
    os.rename(tmp_path / "outside", watched / "from outside")
    reader.wait("later", "from outside")
    reader.end()
    assert reader.names[:2] == ["a", "b"]
    assert sorted(reader.names) == ["a", "b", "from outside", "later", "quick", "slow"]


def test_only_names_of_the_pattern(tmp_path: Path) -> None:
    for name in ("a.jpg", "b.txt", "c.jpg"):
        (tmp_path / name).touch()
    reader = Reader(Folder(tmp_path, "*.jpg"))
    reader.wait("a.jpg", "c.jpg")
    reader.end()
    assert reader.names == ["a.jpg", "c.jpg"]


def test_an_answered_file_is_moved_and_an_unanswered_one_comes_again(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / name).write_text(name)
    reader = Reader(Folder(tmp_path))
    reader.wait("a", "b", "c")
    reader.source.acknowledge(reader.messages[:2])
    reader.end()
    assert sorted(os.listdir(tmp_path / "done")) == ["a", "b"]
    again = Reader(Folder(tmp_path))
    again.wait("c")
    again.end()
    assert again.names == ["c"]


def test_a_file_that_was_written_again_before_its_answer_is_a_message_again(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("old")
    reader = Reader(Folder(tmp_path))
    reader.wait("a")
    (tmp_path / "a").write_text("newer")
    (tmp_path / "b").touch()
    reader.wait("b")
    assert reader.names == ["a", "b"], "not while the first is unanswered"
    reader.source.acknowledge(reader.messages[:1])
    wait_until(lambda: reader.names == ["a", "b", "a"], "the new file is read")
    reader.source.acknowledge(reader.messages[2:])
    reader.end()
    assert (tmp_path / "done" / "a").read_text() == "newer"


def test_a_file_that_is_gone_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a")
    reader = Reader(Folder(tmp_path))
    reader.wait("a")
    (tmp_path / "a").unlink()
    reader.source.acknowledge(reader.messages)
    reader.end()
    assert os.listdir(tmp_path / "done") == []


def test_stop_wakes_a_reader_that_waits(tmp_path: Path) -> None:
    reader = Reader(Folder(tmp_path))
    began = time.perf_counter()
    reader.end()
    assert time.perf_counter() - began < 5


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotADirectoryError, match="nowhere"):
        Folder(tmp_path / "nowhere")


def test_a_sink_has_a_whole_file_for_each_key(tmp_path: Path) -> None:
    sink = FolderSink(tmp_path)
    sink.write([(Message("topic/0/17", b""), torch.tensor([1, 2])), (Message("a b.jpg", b""), 3)])
    sink.write([(Message("a b.jpg", b""), 4)])
    sink.close()
    assert sorted(os.listdir(tmp_path)) == ["a b.jpg.json", "topic%2F0%2F17.json"]
    assert json.loads((tmp_path / "a b.jpg.json").read_text()) == 4


def test_a_thousand_files_are_each_answered_once(tmp_path: Path) -> None:
    watched, out = tmp_path / "in", tmp_path / "out"
    watched.mkdir()
    for k in range(500):
        (watched / f"{k:03}").write_text(str(k))
    read: list[str] = []

    def decode(path: Path) -> torch.Tensor:
        read.append(path.name)
        return torch.tensor(int(path.read_text()))

    def write() -> None:
        for k in range(500, 1000):
            (watched / f".{k}").write_text(str(k))
            os.rename(watched / f".{k}", watched / f"{k:03}")
        wait_until(lambda: len(os.listdir(watched / "done")) == 1000, "all are answered")
        answers.stop()

    answers = fastload.predict(lambda x: x * 2, Folder(watched), decode=decode)
    writer = threading.Thread(target=write)
    writer.start()
    answers.write_to(FolderSink(out))
    writer.join()
    assert len(os.listdir(out)) == 1000
    assert json.loads((out / "999.json").read_text()) == 1998
