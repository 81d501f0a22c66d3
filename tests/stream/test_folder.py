"""Promises:
- Each complete file of a watched folder is a message once, until it is answered, also if it is exchanged before that.
- A file of a watched folder that fails (poison) goes to `failed`.
- Answers to a watched folder are whole files, for any key.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
import torch

import fastload
from fastload.stream import Folder, FolderSink, Message, folder
from tests.contracts.sources import Place, Sinks, Sources, Stream
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


class Watched(Stream):
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.opening = f"stream.Folder({str(folder)!r})"

    def put(self, values: Iterable[int]) -> None:
        for k in values:
            (self.folder / f".{k}").write_text(str(k))
            os.rename(self.folder / f".{k}", self.folder / f"{k:03}")

    def left(self) -> list[int]:
        """Open the folder again: what was not answered is moved nowhere."""
        with closing(self.open()) as source:
            count = sum(path.is_file() for path in self.folder.iterdir())
            return [int(message.key) for message in islice(source, count)]


class TestSource(Sources):
    @pytest.fixture
    def stream(self, tmp_path: Path) -> Stream:
        (tmp_path / "in").mkdir()
        return Watched(tmp_path / "in")


class Written(Place):
    keeps_one = True

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.opening = f"stream.FolderSink({str(folder)!r})"

    def held(self) -> list[tuple[str, Any]]:
        files = self.folder.iterdir()
        return [(unquote(path.stem), json.loads(path.read_text())) for path in files]


class TestSink(Sinks):
    @pytest.fixture
    def place(self, tmp_path: Path) -> Place:
        return Written(tmp_path / "out")


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


def replaced(path: Path, text: str) -> None:
    """Write a file as a producer does."""
    hidden = path.with_name("." + path.name)
    hidden.write_text(text)
    os.rename(hidden, path)


@pytest.mark.parametrize("newest", ["2", "3"])
def test_a_file_that_is_exchanged_between_the_look_and_the_move_is_a_message_again(
    tmp_path: Path, newest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").write_text("1")
    reader = Reader(Folder(tmp_path))
    reader.wait("a")
    look = folder._as_it_is

    def exchanged(path: Path) -> Any:
        found = look(path)
        if threading.current_thread() is threading.main_thread():
            if path == tmp_path / "a":
                replaced(path, "2")
            elif newest == "3":
                replaced(tmp_path / "a", "3")
        return found

    with monkeypatch.context() as patch:
        patch.setattr(folder, "_as_it_is", exchanged)
        reader.source.acknowledge(reader.messages[:1])
    wait_until(lambda: reader.names == ["a", "a"], "the new file is read")
    assert (tmp_path / "a").read_text() == newest
    assert os.listdir(tmp_path / "done") == []
    reader.source.acknowledge(reader.messages[1:])
    reader.end()
    assert (tmp_path / "done" / "a").read_text() == newest


def test_a_file_that_failed_is_moved_to_another_folder(tmp_path: Path) -> None:
    for name, text in [("a", "1"), ("b", "no"), ("c", "3")]:
        (tmp_path / name).write_text(text)

    def on_failed(message: Message, error: Exception) -> None:
        assert message.value.read_text() == "no", "it is moved afterwards"

    answers = fastload.predict(
        lambda x: x,
        Folder(tmp_path),
        decode=lambda path: torch.tensor(float(path.read_text())),
        on_failed=on_failed,
        num_workers=1,
    )
    for key, _ in answers:
        if key == "c":
            answers.stop()
    assert sorted(os.listdir(tmp_path / "done")) == ["a", "c"]
    assert os.listdir(tmp_path / "failed") == ["b"]
    assert sorted(os.listdir(tmp_path)) == ["done", "failed"]


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("é あ", "é あ.json"),
        ("topic/0/17", "topic%2F0%2F17.json"),
        (os.fsdecode(b"caf\xe9"), "caf%E9.json"),
        ("\x7f%", "%7F%25.json"),
        (7, "7.json"),
        ("x" * 240, "x" * 240 + ".json"),
    ],
)
def test_an_answers_file_is_named_by_its_key(tmp_path: Path, key: str | int, name: str) -> None:
    FolderSink(tmp_path).write([(Message(key, b""), 1)])
    assert os.listdir(tmp_path) == [name]


@pytest.mark.parametrize("char", ["x", "あ", "%"])
def test_any_name_of_a_file_can_be_a_key(tmp_path: Path, char: str) -> None:
    """Long names end with a hash, so they stay different."""
    longest = 255 // len(char.encode())
    keys = [char * longest, char * (longest - 1) + "y"]
    FolderSink(tmp_path).write([(Message(key, b""), key) for key in keys])
    assert sorted(json.loads(path.read_text()) for path in tmp_path.iterdir()) == sorted(keys)
