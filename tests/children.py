"""Python processes for tests that need one: how a program ends, how long that takes and what it says.

`Python` is a `subprocess.Popen` and `run_python` a `subprocess.run` whose program is a fork of a warm server
(`tests/warm_python.py`). A program then costs hundredths of a second instead of the seconds of torch's import, and
still has a process of its own, with the real end of the interpreter. Use `subprocess` for a program that tests the
import itself, that starts under a launcher, or whose variables Python or torch read before `__main__` begins.
"""

from __future__ import annotations

import array
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
PRELOADED = ("torch", "fastload", "fastload.loader")
READ_TOO_EARLY = (
    "PYTHONHASHSEED",
    "LD_PRELOAD",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "CUDA_VISIBLE_DEVICES",
)
"""Variables that Python, torch and the loader of libraries read at the start: a fork would not see another value."""
_AT_START = dict(os.environ)  # Dask's cluster sets some of them in its process

PRELUDE = '''
import gc, os, random, signal, sys, threading, time, warnings
import numpy, torch, fastload
from tests.fakes import fastload_threads as threads
from tests.promises.reading import Reads, Stuck, fill, wait_until

# Python >= 3.12 warns of any fork while threads run, and that is what some scripts show to be safe.
warnings.filterwarnings("ignore", "This process .* is multi-threaded, use of fork", DeprecationWarning)

def stamp():
    """The moment from which the parent counts."""
    print("STAMP", time.monotonic(), flush=True)

'''


@functools.cache
def warm_server() -> socket.socket:
    """Start the server of this process of the tests, and return the socket for orders. It ends with this process."""
    orders, theirs = socket.socketpair()
    with theirs:
        server = subprocess.Popen(
            [sys.executable, ROOT / "tests" / "warm_python.py", str(theirs.fileno()), *PRELOADED],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            # OpenBLAS starts threads when numpy is imported, and a fork would lose them.
            env={**os.environ, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"}
            | {"PYTHONUNBUFFERED": ""},  # a program that wants it says so
        )
    server.returncode = 0  # it is never waited for, and no finalizer is to warn of that
    return orders


class Python(subprocess.Popen[Any]):
    """A `subprocess.Popen` of `python ARGUMENT...`; `args` are what follows `python`.

    They are `-c CODE`, `-m MODULE` or a file, and the program's own arguments. `-u` and `-W ACTION` may stand before.
    `modules`: more modules that the server imports, once, before it forks. They must start no thread.
    `pid`, pipes, signals, `wait` and `communicate` are those of `subprocess.Popen`. What a program with
    `start_new_session=True` leaves behind is killed after its end.
    """

    def __init__(
        self,
        args: Sequence[Any],
        *,
        name: str = "<string>",
        modules: Sequence[str] = (),
        **options: Any,
    ) -> None:
        self._report, self._said = -1, b""
        self._name = name
        self._modules = modules
        self.ended = 0.0
        super().__init__([str(argument) for argument in args], **options)

    def _execute_child(  # type: ignore[override]
        self, args: list[str], _executable: object, _preexec: object, _close: object, pass_fds: Sequence[int],
        cwd: Any, env: Mapping[str, str] | None, *given: Any,
    ) -> None:  # fmt: skip
        """Send the order. `subprocess` has no public way to start a program by other means."""
        *_, p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, _, _, _, _, _, session, _ = (
            given
        )
        env = dict(os.environ if env is None else env)
        changed = [
            v for v in READ_TOO_EARLY if env.get(v) not in (os.environ.get(v), _AT_START.get(v))
        ]
        assert not changed, f"{changed} must be there when Python starts: use subprocess"
        order = program(args, self._name)
        order |= {"cwd": str(cwd or os.getcwd()), "env": env, "new_session": session}
        order["passed"] = list(pass_fds)
        self._report, theirs = os.pipe()
        streams = [p2cread if p2cread != -1 else 0, c2pwrite if c2pwrite != -1 else 1]
        streams.append(errwrite if errwrite != -1 else 2)
        try:
            with tempfile.TemporaryFile("w+") as file:
                json.dump(order, file)
                file.flush()
                file.seek(0)
                sent = array.array("i", [file.fileno(), theirs, *streams, *pass_fds])
                rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, sent)
                warm_server().sendmsg([" ".join(["+", *self._modules]).encode()], [rights])
        finally:
            os.close(theirs)
            for pipe, end in ((p2cwrite, p2cread), (c2pread, c2pwrite), (errread, errwrite)):
                if pipe != -1:
                    os.close(end)
            if hasattr(self, "_devnull"):
                os.close(self._devnull)
            self._closed_child_pipe_fds = True
        self.pid = int(self._line())
        self._child_created = True

    def _line(self) -> bytes:
        """Return the next line of the report."""
        while b"\n" not in self._said:
            more = os.read(self._report, 4096)
            assert more, "the warm server ended"
            self._said += more
        line, _, self._said = self._said.partition(b"\n")
        return line

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        """Return the program's id and wait status, or 0 and 0 if it runs and `WNOHANG` is given."""
        if wait_flags & os.WNOHANG and not select.select([self._report], [], [], 0)[0]:
            return 0, 0
        status, ended = self._line().split()
        self.ended = float(ended)
        os.close(self._report)
        return self.pid, int(status)

    def _internal_poll(self, *_: object, **_deadstate: object) -> int | None:
        if self.returncode is None:
            pid, status = self._try_wait(os.WNOHANG)
            if pid:
                self._handle_exitstatus(status)
        return self.returncode


def program(args: list[str], name: str) -> dict[str, Any]:
    """Return what the server must know of `python ARGUMENT...`."""
    order: dict[str, Any] = {"warnings": [], "unbuffered": False, "name": name}
    args = list(args)
    while args[0] in ("-u", "-W"):
        if args.pop(0) == "-u":
            order["unbuffered"] = True
        else:
            order["warnings"].append(args.pop(0))
    if args[0] in ("-c", "-m"):
        kind, source, *rest = args
        argv = ["-c" if name == "<string>" else name, *rest]
        return order | {"kind": kind, "source": source, "path": "", "argv": argv}
    path = str(Path(args[0]).resolve().parent)
    return order | {"kind": "file", "source": args[0], "path": path, "argv": args}


def warm_runs(*modules: str) -> AbstractContextManager[Any]:
    """Let `fastload.measure.fresh.run_fresh` start warm processes that have imported `modules`, without guards, within
    the context."""

    def start(command: Sequence[str], **options: Any) -> Python:
        assert command[0] == sys.executable
        return Python(command[1:], modules=modules, start_new_session=True, **options)

    return mock.patch("fastload.measure.fresh.start_guarded", start)


def run_python(
    *args: Any, input: str = "", timeout: float = 100.0, check: bool = False, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a warm `python ARGUMENT...` to its end, with its output captured unless `options` say otherwise.

    One that takes longer than `timeout` seconds prints all stacks and ends by SIGABRT. `check` raises
    `subprocess.CalledProcessError`, after both streams were printed.
    """
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with Python(args, **(pipes | {"text": True} | options)) as child:
        try:
            out, err = child.communicate(input, timeout=timeout)
        except subprocess.TimeoutExpired:
            child.send_signal(signal.SIGABRT)
            out, err = child.communicate()
    if check and child.returncode:
        print(out, err)
        raise subprocess.CalledProcessError(child.returncode, list(map(str, args)), out, err)
    return subprocess.CompletedProcess(list(map(str, args)), child.returncode, out, err)


@dataclass(frozen=True)
class Ended:
    """How a script ended.

    `code` is that of `subprocess`. `seconds` go from the script's last `stamp()` to the end of its exit handlers, where
    they ran, else to the end of the process: taking down torch's modules costs half a second and is not ours.
    """

    code: int
    seconds: float
    out: str
    err: str

    def __str__(self) -> str:
        return (
            f"exit code {self.code}, {self.seconds:.2f} s after the stamp\n{self.out}\n{self.err}"
        )


@dataclass
class Script:
    """A script that runs, after `PRELUDE`. Past `limit` seconds it prints all stacks and ends with code -6."""

    child: Python
    limit: float

    def wait(self) -> Ended:
        """Wait for the end of the script."""
        with self.child as child:
            try:
                out, err = child.communicate(timeout=self.limit)
            except subprocess.TimeoutExpired:
                child.send_signal(signal.SIGABRT)
                out, err = child.communicate()
        return Ended(child.returncode, seconds_in(out, child.ended), out, err)


def start_script(script: str, *, limit: float = 45.0) -> Script:
    """Start a script in a session of its own."""
    source = PRELUDE + textwrap.dedent(script)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    options = {"stdin": subprocess.DEVNULL, "start_new_session": True}
    return Script(Python(["-c", source], name="script", **pipes, **options), limit)


def run_script(script: str, *, limit: float = 45.0) -> Ended:
    """Run a script to its end."""
    return start_script(script, limit=limit).wait()


def seconds_in(out: str, ended: float) -> float:
    """Return the seconds from the last stamp to the mark of the end, or to `ended`."""
    marks = {
        words[0]: float(words[1]) for words in map(str.split, out.splitlines()) if marked(words)
    }
    return marks.get("END", ended) - marks.get("STAMP", ended)


def marked(words: list[str]) -> bool:
    """Return whether a line of output is one of the two marks."""
    return len(words) == 2 and words[0] in ("STAMP", "END")
