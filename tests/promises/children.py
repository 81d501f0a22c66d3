"""Child processes for tests: how a process ends, how long that takes and what it says.

A *nursery* is a process that has imported torch and fastload and has started no thread. It forks
itself for every script that it is given; the fork runs the script as its `__main__` and ends as any
Python process ends. So a script costs tenths of a second instead of the seconds of torch's import,
and still has a process of its own, with the real end of the interpreter.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

ROOT = Path(__file__).resolve().parents[2]

NURSERY = '''
import atexit, faulthandler, gc, json, os, select, signal, sys, time
faulthandler.enable()
# Registered first, so it runs last, when every exit handler has run and only the taking down of modules is left.
atexit.register(lambda: print("END", time.monotonic(), flush=True) if "script" in sys.argv else None)
import numpy, torch
for name in json.loads(sys.argv[1]):
    __import__(name)
assert len(os.listdir("/proc/self/task")) == 1, "a fork must not lose threads"
gc.freeze()  # a fork that never collects what was imported does not have to copy its pages
def end_group(pid):
    """End a script, and what it forked and left behind."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass

lines, deadlines = b"", {}
while True:
    for pid, deadline in deadlines.items():
        if deadline and time.monotonic() > deadline:
            deadlines[pid] = None
            os.kill(pid, signal.SIGABRT)  # prints all stacks
    pid, status = (0, 0)
    try:
        pid, status = os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        pass
    if pid:
        del deadlines[pid]
        end_group(pid)
        ended = dict(pid=pid, code=os.waitstatus_to_exitcode(status), ended=time.monotonic())
        os.write(1, json.dumps(ended).encode() + b"\\n")
        continue
    if b"\\n" not in lines:
        if select.select([0], [], [], 0.002)[0]:
            more = os.read(0, 65536)
            if not more:
                for pid in deadlines:
                    end_group(pid)
                sys.exit()
            lines += more
        continue
    line, lines = lines.split(b"\\n", 1)
    order = json.loads(line)
    pid = os.fork()
    if pid == 0:
        os.setsid()
        break
    deadlines[pid] = time.monotonic() + order["limit"]
    os.write(1, json.dumps(dict(pid=pid)).encode() + b"\\n")
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
os.dup2(os.open(order["out"], os.O_WRONLY), 1)
os.dup2(os.open(order["err"], os.O_WRONLY), 2)
sys.argv = ["script"]
code = compile(order["script"], "script", "exec")
for name in ["line", "lines", "pid", "status", "order", "more", "name", "ended", "deadline"]:
    globals().pop(name, None)
exec(code)
'''

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
class Child:
    """A script that runs."""

    nursery: Nursery
    pid: int
    out: Path
    err: Path

    def wait(self) -> Ended:
        """Wait for the end of the script."""
        code, ended = self.nursery.end_of(self.pid)
        out, err = self.out.read_text(), self.err.read_text()
        return Ended(code, seconds_in(out, ended), out, err)


class Nursery:
    """Starts scripts, any number at a time. `preload` names modules that it imports after torch."""

    def __init__(
        self, preload: tuple[str, ...] = ("fastload",), env: dict[str, str] | None = None
    ) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._ended: dict[int, tuple[int, float]] = {}
        self._started = 0
        self._process = subprocess.Popen(
            [sys.executable, "-c", NURSERY, json.dumps(preload)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=self._folder.name,
            # OpenBLAS starts threads when numpy is imported, and a fork would lose them.
            env={**os.environ, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1", **(env or {})},
        )

    def __enter__(self) -> Nursery:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        with self._process, self._folder:
            assert self._process.stdin is not None
            self._process.stdin.close()

    def start(self, script: str, *, limit: float = 45.0) -> Child:
        """Start a script; past `limit` seconds it prints all stacks and ends with code -6."""
        self._started += 1
        out = Path(self._folder.name, f"{self._started}.out")
        err = Path(self._folder.name, f"{self._started}.err")
        for path in (out, err):
            path.touch()
        order = {
            "script": PRELUDE + textwrap.dedent(script),
            "out": str(out),
            "err": str(err),
            "limit": limit,
        }
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return Child(self, self._read_until(lambda said: "code" not in said)["pid"], out, err)

    def run(self, script: str, *, limit: float = 45.0) -> Ended:
        """Run a script to its end."""
        return self.start(script, limit=limit).wait()

    def end_of(self, pid: int) -> tuple[int, float]:
        """Wait for the end of process `pid`: its exit code and the moment."""
        if pid not in self._ended:
            self._read_until(lambda said: said["pid"] == pid and "code" in said)
        return self._ended.pop(pid)

    def _read_until(self, wanted: object) -> dict[str, int]:
        assert self._process.stdout is not None
        assert callable(wanted)
        while True:
            line = self._process.stdout.readline()
            assert line, "the nursery ended"
            said: dict[str, int] = json.loads(line)
            if "code" in said:
                self._ended[said["pid"]] = (said["code"], said["ended"])
            if wanted(said):
                return said


def run_fresh(script: str, *, limit: float = 60.0) -> Ended:
    """Run a script in a fresh interpreter, torch's import included; no stamp is needed."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=limit,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    return Ended(
        done.returncode, seconds_in(done.stdout, time.monotonic()), done.stdout, done.stderr
    )


def seconds_in(out: str, ended: float) -> float:
    """Seconds from the last stamp to the mark of the end, or to `ended`."""
    marks = {
        words[0]: float(words[1]) for words in map(str.split, out.splitlines()) if marked(words)
    }
    return marks.get("END", ended) - marks.get("STAMP", ended)


def marked(words: list[str]) -> bool:
    """Whether a line of output is one of the two marks."""
    return len(words) == 2 and words[0] in ("STAMP", "END")
