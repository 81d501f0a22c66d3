"""Promises:
- `fastload predict` answers lines of JSON, and files.
- SIGTERM and Ctrl-C end the source of `fastload predict`. Messages that were read are answered, and the rest stays in
  the pipe.
- Ctrl-C more than 2 s after the first signal ends `fastload predict` at once.
- Poison goes to the file of `--failed`, or ends `fastload predict` with exit code 1.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from fastload.cli import main
from fastload.stream import (
    json_lines,
)
from tests.children import Python
from tests.promises.reading import wait_until

MODULE = """
import torch

def double(x):
    return x * 2

class Sum(torch.nn.Module):
    def forward(self, x):
        return x.sum(1)

def make():
    return Sum()

def of_object(value):
    return torch.tensor(value["x"])

def of_file(path):
    return torch.tensor(float(path.read_text()))

number = 3
"""


@contextmanager
def forgotten(module: str) -> Iterator[None]:
    """Forget a module after the block: each test has its own."""
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.modules.pop(module, None)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, with a module."""
    (tmp_path / "project.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    with forgotten("project"):
        yield tmp_path


def call(*arguments: str) -> Any:
    return CliRunner().invoke(main, ["predict", *arguments])


@contextmanager
def started(folder: Path, *arguments: str, **given: Any) -> Iterator[Python]:
    """Run the command in a process."""
    process = Python(["-m", "fastload", "predict", *arguments], cwd=folder, **given)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# ---- messages and answers ----


def test_lines_go_through_a_pipe(project: Path) -> None:
    pipe = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with started(project, "project:Sum", "-b", "2", **pipe) as process:
        answers, said = process.communicate(b"[1, 2]\n\n[3.5, 4]\n[5, 6]\n", timeout=60)
    assert process.returncode == 0
    assert [json.loads(line) for line in answers.splitlines()] == [
        {"key": "line 1", "answer": 3},
        {"key": "line 3", "answer": 7.5},
        {"key": "line 4", "answer": 11},
    ]
    assert re.match(r"messages: 3 answered, \d", said.decode().splitlines()[-1])
    assert "Traceback" not in said.decode()


def test_poison_goes_to_the_side_list_and_without_one_ends_the_command(project: Path) -> None:
    (project / "in.jsonl").write_text('{"id": "a", "x": [1, 2]}\nno\n{"id": "c", "x": [3, 4]}\n')
    given = ["project:make", "--source", "in.jsonl", "--sink", "out.jsonl"]
    given += ["--decode", "project:of_object", "--key", "id"]
    result = call(*given, "--failed", "failed.jsonl")
    assert result.exit_code == 0, result.output
    assert "2 answered, 1 failed, " in result.stderr
    assert lines(project / "out.jsonl") == [{"key": "a", "answer": 3}, {"key": "c", "answer": 7}]
    (failed,) = lines(project / "failed.jsonl")
    assert (failed["key"], failed["value"]) == ("line 2", "no")

    result = call(*given)
    assert result.exit_code == 1
    assert len(re.findall("^Error: ", result.stderr, re.MULTILINE)) == 1
    assert "message line 2 has no answer" in result.stderr
    assert "Give --failed FILE to continue after such messages" in result.stderr
    assert "1 answered, " in result.stderr
    assert len(lines(project / "out.jsonl")) == 3, "what came before the poison is answered"


def test_without_watchdog_answers_still_go_to_a_folder_and_a_watched_one_names_what_to_install(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "watchdog.events", None)
    monkeypatch.delitem(sys.modules, "fastload.stream.folder", raising=False)
    (project / "in.jsonl").write_text("1\n2\n")
    result = call("project:double", "--source", "in.jsonl", "--sink", "answers")
    assert result.exit_code == 0, result.stderr
    assert len(list(project.glob("answers/*.json"))) == 2
    (project / "inbox").mkdir()
    result = call("project:double", "--source", "inbox", "--sink", "answers")
    assert result.exit_code == 1
    assert (
        "needs watchdog, which is not installed. Run pip install 'torch-fastload[stream]'"
        in result.stderr
    )


def test_a_folder_is_answered_until_a_signal_comes(project: Path) -> None:
    pytest.importorskip("watchdog")
    (project / "inbox").mkdir()
    for number in range(5):
        (project / "inbox" / f"{number}.txt").write_text(str(number))
    given = ["--source", "inbox", "--sink", "answers", "--decode", "project:of_file"]
    with started(project, "project:double", *given, stderr=subprocess.PIPE) as process:
        wait_until(lambda: len(list(project.glob("inbox/done/*.txt"))) == 5, "all are done", 60)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 0
    assert said.decode().splitlines()[-1].startswith("messages: 5 answered, ")
    found = {path.name: json.loads(path.read_text()) for path in project.glob("answers/*.json")}
    assert found == {f"{number}.txt.json": 2 * number for number in range(5)}


# ---- signals ----


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("chunk", [5, 16, 64])
def test_a_signal_ends_the_source_and_what_was_read_is_answered(
    project: Path, number: signal.Signals, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model sends the signal twice at its first batch. Nothing else ends the command, as the pipe has no end."""
    (project / "signalling.py").write_text(
        "import signal\n"
        "def model(x):\n"
        "    if x[0, 0] == 0:\n"
        f"        signal.raise_signal({int(number)})\n"
        f"        signal.raise_signal({int(number)})\n"
        "    return x[:, 0]\n"
    )
    monkeypatch.setattr(json_lines, "_CHUNK", chunk)
    before = [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)]
    reading, writing = os.pipe()
    os.write(writing, b"".join(b"[%d, 10]\n" % k for k in range(1000)))
    with forgotten("signalling"):
        result = call(
            *("signalling:model", "-b", "2", "-w", "1"),
            *("--source", f"/dev/fd/{reading}", "--sink", "out.jsonl"),
        )
    left = os.read(reading, 2**16)
    os.close(reading)
    os.close(writing)
    assert result.exit_code == 0, result.output
    answers = lines(project / "out.jsonl")
    assert [answer["answer"] for answer in answers] == list(range(len(answers)))
    assert left == b"".join(b"[%d, 10]\n" % k for k in range(len(answers), 1000))
    assert 2 <= len(answers) <= 3 * 2 + chunk
    assert f"{len(answers)} answered, " in result.stderr
    assert [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)] == before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_what_was_read_is_answered_and_the_rest_stays_in_the_pipe(
    project: Path, number: signal.Signals
) -> None:
    """Lines of 1 to 3,000 numbers fill the pipe, so the signal strikes within a line."""
    reading, writing = os.pipe()
    written: list[bytes] = []

    def write() -> None:
        for k in range(100_000):
            line = json.dumps([k] * (1 + k * 7919 % 3000)).encode() + b"\n"
            try:
                os.write(writing, line)
            except BrokenPipeError:
                break
            written.append(line)
        os.close(writing)

    out = project / "out.jsonl"
    out.touch()
    given = ["-b", "1", "--sink", str(out), "-w", "1"]
    with started(project, "project:Sum", *given, stdin=reading, stderr=subprocess.PIPE) as process:
        writer = threading.Thread(target=write)
        writer.start()
        try:
            wait_until(lambda: out.read_bytes().count(b"\n") > 20, "some are answered", 60)
            process.send_signal(number)
            _, said = process.communicate(timeout=60)
        finally:
            left = os.read(reading, 2**16)
            os.close(reading)
            writer.join()
    assert process.returncode == 0, said.decode()
    answers = lines(out)
    assert [answer["key"] for answer in answers] == [f"line {k + 1}" for k in range(len(answers))]
    assert said.decode().splitlines()[-1].startswith(f"messages: {len(answers):,} answered, ")
    assert left == b"".join(written[len(answers) :])[: len(left)]
    assert left.startswith(json.dumps([len(answers)]).encode()[:-1]), "no line was lost"


def test_a_later_ctrl_c_ends_the_command_at_once(project: Path) -> None:
    (project / "slow.py").write_text(
        "import os, threading\n"
        "from fastload._kit import guard\n"
        "guard.TOGETHER_S = -1.0\n"  # each signal is a later one
        "takes = guard.Request.takes\n"
        "def noted(request, number):\n"
        "    taken = takes(request, number)\n"
        "    os.write(1, b'signal\\n')\n"  # the next signal may strike here, and could not print
        "    return taken\n"
        "guard.Request.takes = noted\n"
        "def model(x):\n"
        "    print('begun', flush=True)\n"
        "    threading.Event().wait()\n"
    )
    pipe = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with started(project, "slow:model", "--sink", "out.jsonl", **pipe) as process:
        assert process.stdin
        assert process.stdout
        process.stdin.write(b"1\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"begun\n"
        for _ in range(2):
            process.send_signal(signal.SIGTERM)
            assert process.stdout.readline() == b"signal\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130


# ---- addresses, and what is refused ----


FILE = ["--source", "project.py"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["project:double", "project:Sum"], "The set for the answers has no name. Give --name"),
        (
            ["project:double", "--name", "x"],
            "--name works only with a dataset. Give DATASET after MODEL",
        ),
        (["project:double", "d:d", "--sink", "-"], "--sink works only with a stream of messages"),
        (["project:number"], "project:number cannot be used as a model. .* is of type int"),
        (["project"], "expected MODULE:NAME"),
        (["project:nothing"], "cannot import project:nothing"),
        (["project:double", "--decode", "nothing:x"], "cannot import nothing:x"),
        (
            ["project:double", "--source", "nothing"],
            "the source nothing does not exist. Give a file",
        ),
        (["project:double", "--source", "kafka://host:9/in"], "For Kafka, see docs/predict.md"),
        (
            ["project:double", *FILE, "--sink", "kafka://host:9/in"],
            "For Kafka, see docs/predict.md",
        ),
        (["project:double", "--device", "nowhere"], "--device nowhere is not a device"),
        (["project:double", "project:Sum", "--name", "x"], "project:Sum: expected a dataset with"),
        (["project:double", "project:make", "--name", "?"], "project:make: expected a dataset"),
        (["project:double", "--max-wait-ms", "nan"], "is not a finite number"),
    ],
)
def test_a_users_error_is_one_line(project: Path, arguments: list[str], message: str) -> None:
    result = call(*arguments)
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("Error: ")
    assert re.search(message, result.stderr), result.stderr
