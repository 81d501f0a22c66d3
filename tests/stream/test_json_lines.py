"""Promises:
- Lines of JSON are messages, in any chunks. A line that is not JSON is poison, and ends nothing.
- Answers in JSON and the list of failed messages are whole lines.
- A sink of JSON lines destroys no file that it did not write.
- `stop` takes effect at the next line of JSON.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from fastload.errors import StreamError
from fastload.stream import JSONLines, JSONLinesSink, Message, Poison, SideList, json_lines
from tests.contracts.sources import Place, Sinks, Sources, Stream


class Lines(Stream):
    is_endless = False

    def __init__(self, path: Path) -> None:
        self.path = path
        self.opening = f"stream.JSONLines({str(path)!r})"

    def put(self, values: Iterable[int]) -> None:
        with self.path.open("a") as file:
            file.writelines(f"{k}\n" for k in values)


class Pipe(Stream):
    comes_again = False
    most_read = 60

    def __init__(self, reading: int, writing: int) -> None:
        self.inherited = [reading]
        self.writing = writing
        self.opening = f"stream.JSONLines('/dev/fd/{reading}')"

    def put(self, values: Iterable[int]) -> None:
        os.write(self.writing, b"".join(b"%d\n" % k for k in values))


class TestFile(Sources):
    @pytest.fixture
    def stream(self, tmp_path: Path) -> Stream:
        return Lines(tmp_path / "in.jsonl")


class TestPipe(Sources):
    @pytest.fixture
    def stream(self) -> Iterator[Stream]:
        reading, writing = os.pipe()
        yield Pipe(reading, writing)
        os.close(reading)
        os.close(writing)


class Written(Place):
    def __init__(self, path: Path) -> None:
        self.path = path
        self.opening = f"stream.JSONLinesSink({str(path)!r})"

    def held(self) -> list[tuple[str, Any]]:
        lines = [json.loads(line) for line in self.path.read_text().splitlines()]
        return [(str(line["key"]), line["answer"]) for line in lines]


class TestSink(Sinks):
    @pytest.fixture
    def place(self, tmp_path: Path) -> Place:
        return Written(tmp_path / "out.jsonl")


def pairs(source: JSONLines) -> list[tuple[str, Any]]:
    with_text = []
    for key, value, _ in source:
        with_text.append((key, value.text if isinstance(value, Poison) else value))
    source.close()
    return with_text


def test_lines_come_in_order_and_the_last_needs_no_end(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"a": 1}\n\n  \n[2]\n"three"')
    assert pairs(JSONLines(path)) == [("line 1", {"a": 1}), ("line 4", [2]), ("line 5", "three")]


def test_keys_are_those_of_the_objects(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"id": 7}\n{"id": "x"}\n{"other": 1}\n[1]\n')
    got = pairs(JSONLines(path, key="id"))
    assert got[:2] == [(7, {"id": 7}), ("x", {"id": "x"})]
    assert got[2:] == [("line 3", '{"other": 1}'), ("line 4", "[1]")], "poison, with its text"


@pytest.mark.parametrize("line", [b"{", b"nul", b"\xff\xfe", b"1 2", b'{"a": }', b"[" * 100_000])
def test_a_line_that_is_no_json_is_poison_and_the_next_is_read(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"1\n" + line + b"\n3\n")
    with closing(JSONLines(path)) as source:
        first, poison, last = source
    assert (first.value, last.value) == (1, 3)
    assert isinstance(poison.value, Poison)
    assert "line 2 is not a message" in str(poison.value.error)


@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
def test_chunks_do_not_matter(tmp_path: Path, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_lines, "_CHUNK", chunk)
    values = [{"k": k, "text": "é" * k} for k in range(20)]
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps(value, ensure_ascii=False) + "\n" for value in values))
    assert [value for _, value in pairs(JSONLines(path))] == values


def test_stop_reads_a_line_to_its_end_and_leaves_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(json_lines, "_CHUNK", 7)
    reading, writing = os.pipe()
    os.write(writing, b'1\n{"a": 2}\n3\n')
    with os.fdopen(reading, "rb", buffering=0) as pipe:
        source = JSONLines(f"/dev/fd/{reading}")
        messages = iter(source)
        assert next(messages).value == 1  # of the first chunk, which ends within the second line
        source.stop()
        assert [message.value for message in messages] == [{"a": 2}]
        source.close()
        assert pipe.read(100) == b"3\n"
    os.close(writing)


def test_a_line_whose_rest_does_not_come_is_poison_after_stop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(json_lines, "_REST_MS", 0)
    reading, writing = os.pipe()
    os.write(writing, b'1\n{"a":')
    source = JSONLines(f"/dev/fd/{reading}")
    messages = iter(source)
    assert next(messages).value == 1
    source.stop()
    (half,) = messages
    source.close()
    os.close(reading)
    os.close(writing)
    assert isinstance(half.value, Poison)
    assert half.value.text == '{"a":'


def test_answers_are_appended_and_half_a_line_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text('{"key": "a", "answer": 1}\n{"key": "b", "ans')
    sink = JSONLinesSink(path)
    sink.write([(Message("b", 0), torch.tensor([1.5, 2.0])), (Message("c", 0), {"p": (1, 2)})])
    sink.close()
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"key": "a", "answer": 1},
        {"key": "b", "answer": [1.5, 2.0]},
        {"key": "c", "answer": {"p": [1, 2]}},
    ]


@pytest.mark.parametrize("text", ["my notes", "a,b\n1,2", '{\n  "all": 1\n }x'])
@pytest.mark.parametrize("kind", [JSONLinesSink, SideList])
def test_a_file_of_another_kind_is_refused_and_stays(tmp_path: Path, text: str, kind: Any) -> None:
    path = tmp_path / "notes"
    path.write_text(text)
    with pytest.raises(StreamError, match="notes is not a file of JSON lines: it ends with"):
        kind(path)
    assert path.read_text() == text


def test_the_side_list_has_key_error_and_value(tmp_path: Path) -> None:
    path = tmp_path / "failed.jsonl"
    aside = SideList(path)
    values: list[Any] = [{"a": 1}, b"\xff\x00", Path("x.jpg"), Poison("{", ValueError("w")), {1, 2}]
    for k, value in enumerate(values):
        aside(Message(f"k{k}", value), ValueError("wrong"))
    aside.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["key"] for line in lines] == [f"k{k}" for k in range(5)]
    assert {line["error"] for line in lines} == {"ValueError: wrong"}
    assert [line["value"] for line in lines] == [
        {"a": 1},
        r"b'\xff\x00'",
        "x.jpg",
        "{",
        "{1, 2}",
    ]
