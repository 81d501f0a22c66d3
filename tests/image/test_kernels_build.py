"""Promises:
- Kernels are compiled once, in a child process, for many ranks. The training process never imports Numba.
- Loading neither waits nor fails if the cache is cold, damaged or old, the home is read-only, the CPU changed, Numba
  is missing or the parent was killed.

A kernel of three lines stands for the real ones, as what counts here is how it gets into the process. A child that must
be met at its work stops at a gate: its module of kernels writes its process id into one FIFO and waits for another.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import IO, Any

import pytest

from fastload.image import kernels
from fastload.image.kernels import build, cache

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent.parent
NO_NUMBA = find_spec("numba") is None
needs_numba = pytest.mark.skipif(NO_NUMBA, reason="Numba is not installed")

TINY = """
import os

with open(os.path.dirname(__file__) + "/compilations", "a") as log:
    print(os.getpid(), file=log)

def add(a, b):
    return a + b

ENTRY_POINTS = {"add": (add, 2)}
"""
GATE = """
import os
folder = os.path.dirname(__file__)
with open(f"{folder}/arrived", "w") as arrived:
    print(os.getpid(), file=arrived, flush=True)
with open(f"{folder}/gate") as gate:
    gate.read()
"""
PROCESS = """
import os, sys
from fastload.image import kernels
kernels.MODULES = ("tiny",)
"""


class Process(subprocess.Popen[str]):
    stdin: IO[str]
    stdout: IO[str]
    stderr: IO[str]

    def tell(self, line: str) -> None:
        self.stdin.write(line + "\n")
        self.stdin.flush()


class Place:
    """A folder with kernels, and a cache in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cache = folder / "cache"
        self.write(TINY)

    def write(self, source: str) -> None:
        (self.folder / "tiny.py").write_text(source)

    def shut_the_gate(self, more: str = "") -> None:
        self.write(GATE + TINY + more)
        for name in ("arrived", "gate"):
            os.mkfifo(self.folder / name)

    def arrived(self) -> int:
        """Wait for a child at the gate and return its process id."""
        return int((self.folder / "arrived").read_text())

    def open_the_gate(self) -> None:
        (self.folder / "gate").write_text("")

    def compilations(self) -> int:
        log = self.folder / "compilations"
        return len(log.read_text().splitlines()) if log.exists() else 0

    def start(self, code: str) -> Process:
        """Start a process that may load these kernels."""
        path = os.pathsep.join([str(self.folder), str(ROOT)])
        return Process(
            [sys.executable, "-W", "error", "-c", PROCESS + code],
            env={**os.environ, "FASTLOAD_CACHE": str(self.cache), "PYTHONPATH": path},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            start_new_session=True, text=True,
        )  # fmt: skip

    def run(self, code: str) -> list[str]:
        """Run a process to its end and return the lines it printed."""
        with self.start(code) as process:
            said, complaints = process.communicate()
        assert (process.returncode, complaints) == (0, "")
        return said.splitlines()


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@pytest.fixture
def here(place: Place, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """Let this process have no kernels yet, those of `place` to come, and an empty cache."""
    monkeypatch.setattr(kernels, "_ready", None)
    monkeypatch.setattr(kernels, "_work", None)
    monkeypatch.setattr(kernels, "MODULES", ("tiny",))
    monkeypatch.setenv("FASTLOAD_CACHE", str(place.cache))
    monkeypatch.delenv("FASTLOAD_KERNELS", raising=False)
    monkeypatch.syspath_prepend(place.folder)
    yield place
    if kernels._work is not None and kernels._work.thread is not None:
        kernels._work.thread.join()


def ended(process: int) -> bool:
    """Wait for the end of a process that is no child of ours; False if it still runs after 30 s."""
    try:
        handle = os.pidfd_open(process)
    except ProcessLookupError:
        return True
    try:
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        return bool(poll.poll(30_000))
    finally:
        os.close(handle)


# ---- cold, warm, many at once ----


@needs_numba
def test_cold_they_come_later_and_warm_at_once_and_numba_never(place: Place) -> None:
    code = """
import time
began = time.perf_counter()
at_once = kernels.kernels()
asked_s = time.perf_counter() - began
before = kernels.state()
ready = kernels.wait()
print(at_once is None, ready, kernels.kernels().add(2, 3), "numba" in sys.modules)
print(kernels.state())
print(asked_s)
print(time.perf_counter() - began)
"""
    cold, warm = place.run(code), place.run(code)
    assert cold[0] == "True True 5 False"
    assert warm[0].endswith("True 5 False")
    assert cold[1] == warm[1] == f"compiled ({next(place.cache.glob('kernels-*[0-9a-f]'))})"
    assert float(cold[2]) < float(cold[3]) / 2, "it waited"
    runs = chain([warm], (place.run(code) for _ in range(2)))  # cores may be busy in one
    assert any(float(run[3]) < 0.3 for run in runs)
    assert place.compilations() == 1


@needs_numba
@pytest.mark.parametrize("fails", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_processes_that_begin_at_once_compile_once(place: Place, fails: bool) -> None:
    """Nor do they repeat a compilation that failed while they waited for it."""
    place.shut_the_gate("raise ValueError('no kernels today')\n" * fails)
    code = """
reader, writer = os.pipe()
flock = kernels.fcntl.flock

def telling(*arguments):
    try:
        flock(*arguments)
    finally:
        os.write(writer, b"x")

pids = []
for _ in range(8):
    pid = os.fork()
    if not pid:
        kernels.fcntl.flock = telling
        good = kernels.wait() and kernels.kernels().add(2, 3) == 5
        os.write(1, f"{good}: {kernels.state()}\\n".encode())
        os._exit(0)
    pids.append(pid)
for _ in pids:
    os.read(reader, 1)
os.write(1, b"begun\\n")
[os.waitpid(pid, 0) for pid in pids]
"""
    with place.start(code) as process:
        place.arrived()
        assert process.stdout.readline() == "begun\n"
        place.open_the_gate()
        said, complaints = process.communicate()
    compiled = f"True: compiled ({next(place.cache.glob('kernels-*[0-9a-f]'), None)})"
    failed = "False: compilation failed: ValueError: no kernels today"
    assert said.splitlines() == [failed if fails else compiled] * 8
    assert complaints == ""
    assert place.compilations() == 1


# ---- why there are none ----


def no_version(name: str) -> str:
    raise importlib.metadata.PackageNotFoundError(name)


@pytest.mark.parametrize(
    ("target", "value", "state"),
    [
        ("os.environ", os.environ | {"FASTLOAD_KERNELS": "0"}, "off: FASTLOAD_KERNELS=0"),
        ("platform.machine", lambda: "aarch64", "not for this processor (linux, aarch64)"),
        (
            "importlib.metadata.version",
            no_version,
            'numba is not installed: pip install "fastload[kernels]"',
        ),
        pytest.param(
            "fastload.image.kernels.FEATURES",
            ("avx2", "quantum"),
            "not for this processor (it has no ",
            marks=needs_numba,
        ),
    ],
)
def test_why_there_are_none_is_said(
    here: Place, monkeypatch: pytest.MonkeyPatch, target: str, value: object, state: str
) -> None:
    monkeypatch.setattr(target, value)
    for _ in range(2):  # before and after it was tried
        assert kernels.state().startswith(state)
        assert not kernels.wait()
    assert kernels.kernels() is None
    assert not here.cache.exists()


@needs_numba
@pytest.mark.parametrize(
    ("name", "source", "reason"),
    [
        ("tiny", "def add(a, b):\n    return a + unheard_of", "TypingError: .*unheard_of"),
        ("tiny", "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)", "status -11"),
        ("numba", "raise ImportError('needs NumPy 2')", "ImportError: needs NumPy 2$"),
    ],
)
def test_a_compilation_that_fails_is_quoted(
    here: Place, name: str, source: str, reason: str
) -> None:
    entry = "\nENTRY_POINTS = {'add': (add, 2)}\n" if name == "tiny" else ""
    (here.folder / f"{name}.py").write_text(TINY * (name == "tiny") + source + entry)
    assert kernels.kernels() is None
    assert not kernels.wait()
    assert kernels.kernels() is None
    assert re.search(f"^compilation failed: {reason}", kernels.state())


@needs_numba
def test_a_torch_that_rounds_otherwise_keeps_its_own_and_nothing_is_compiled_again(
    here: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    here.write(TINY + "def agrees_with_torch(call):\n    return call['add'](2, 2) != 4\n")
    for _ in range(2):
        assert not kernels.wait()
        assert kernels.state() == "off: this torch rounds differently from the kernels"
        monkeypatch.setattr(kernels, "_work", None)
        assert kernels.state() == "off: this torch rounds differently from the kernels"
    assert here.compilations() == 1


def test_a_cache_that_takes_nothing_is_named(here: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    here.cache.write_text("a file is in its place")
    monkeypatch.setattr("tempfile.tempdir", "/proc")
    if NO_NUMBA:
        monkeypatch.setattr(kernels, "_identity", dict)
    assert not kernels.wait()
    assert kernels.state().startswith(
        f"off: OSError: no folder can hold the cache ({here.cache}: File exists; /proc/fastload-"
    )
    assert here.compilations() == 0


# ---- what an object depends on ----


@needs_numba
@pytest.mark.parametrize(
    ("target", "value"),
    [
        ("llvmlite.binding.get_host_cpu_name", lambda: "another"),
        (
            "Distribution.read_text",
            lambda read: lambda self, name: f"{read(self, name)} of another",
        ),
        ("importlib.metadata.version", lambda name: "0.1"),
    ],
)
def test_another_processor_torch_or_compiler_takes_another_object(
    monkeypatch: pytest.MonkeyPatch, target: str, value: Callable[..., Any]
) -> None:
    name = kernels._object_name()
    if target.endswith("read_text"):  # of a backport, if a library has brought one
        kind = type(importlib.metadata.distribution("torch"))
        monkeypatch.setattr(kind, "read_text", value(kind.read_text))
    else:
        monkeypatch.setattr(target, value)
    assert kernels._object_name() != name


@needs_numba
def test_an_object_of_other_sources_is_left_aside(here: Place) -> None:
    cache.store(kernels._object_name(), b"this must not be looked at")
    here.write(TINY.replace("a + b", "a - b"))
    assert kernels.state().startswith("not compiled yet")
    assert kernels.wait()
    ready = kernels.kernels()
    assert ready is not None
    assert vars(ready)["add"](7, 3) == 4


# ---- the cache ----


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the cache; the temporary folder has none."""
    monkeypatch.setenv("FASTLOAD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("tempfile.tempdir", "/proc")
    return tmp_path / "cache"


def test_what_was_stored_is_found_and_no_other_user_may_write_it(folder: Path) -> None:
    before = os.umask(0o002)
    try:
        path = cache.store("x", b"content")
    finally:
        os.umask(before)
    assert cache.find("x") == (path, b"content")
    assert path == folder / "x"
    assert not (path.stat().st_mode | folder.stat().st_mode) & 0o022
    assert os.listdir(folder) == ["x"]


@pytest.mark.parametrize("harm", ["cut", "changed", "another file", "a link"])
def test_a_damaged_file_counts_as_absent_and_is_replaced(folder: Path, harm: str) -> None:
    path = cache.store("x", b"content")
    sealed = path.read_bytes()
    if harm == "a link":
        path.rename(folder / "elsewhere")
        path.symlink_to(folder / "elsewhere")
    else:
        changed = sealed.replace(b"content", b"cOntent")
        path.write_bytes({"cut": sealed[:-1], "changed": changed}.get(harm, b"something\n"))
    assert cache.find("x") is None
    cache.store("x", b"new")
    assert cache.find("x") == (path, b"new")


@pytest.mark.parametrize("which", ["file", "folder"])
@pytest.mark.parametrize("mode", [0o020, 0o002])
def test_what_others_may_write_is_not_used(folder: Path, which: str, mode: int) -> None:
    path = cache.store("x", b"content")
    target = path if which == "file" else folder
    target.chmod(target.stat().st_mode | mode)
    assert cache.find("x") is None
    if which == "folder":
        assert cache.objection(folder) == f"other users may write it (mode {0o700 | mode:04o})"
        with pytest.raises(OSError, match="other users may write it"):
            cache.store("x", b"content")


@pytest.mark.parametrize("which", ["file", "folder"])
def test_what_another_user_owns_is_not_used(
    folder: Path, which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = cache.store("x", b"content")
    if os.geteuid():  # what is ours is then another's
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    else:
        os.chown(path if which == "file" else folder, 12345, -1)
    assert cache.find("x") is None


def test_the_folder_is_found_by_the_variables_and_the_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If none of them takes the file, a private folder among the temporary ones does."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("FASTLOAD_CACHE", str(tmp_path / "own"))
    assert cache.store("x", b"1").parent == tmp_path / "own"
    monkeypatch.delenv("FASTLOAD_CACHE")
    assert cache.store("x", b"2").parent == tmp_path / "xdg" / "fastload"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache.store("x", b"3").parent == tmp_path / "home" / ".cache" / "fastload"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/proc/nobody")  # not even root can make a folder there
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    path = cache.store("x", b"content")
    assert path.parent == tmp_path / f"fastload-{os.geteuid()}"
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert cache.find("x") == (path, b"content")
    path.parent.rename(tmp_path / "elsewhere")
    path.parent.symlink_to(tmp_path / "elsewhere")
    assert cache.find("x") is None, "any user may put a link there"


def test_a_full_disk_sends_the_file_to_the_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    monkeypatch.setenv("FASTLOAD_CACHE", str(tmp_path / "own"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    mkstemp = cache.tempfile.mkstemp

    def no_room(*, dir: Path, **options: str) -> tuple[int, str]:
        file, name = mkstemp(dir=dir, **options)
        if dir == tmp_path / "own":
            os.close(file)
            file = os.open("/dev/full", os.O_WRONLY)
        return file, name

    monkeypatch.setattr(cache.tempfile, "mkstemp", no_room)
    path = cache.store("x", b"content")
    assert path.parent.parent == tmp_path
    assert path.parent.name.startswith("fastload-")
    assert os.listdir(tmp_path / "own") == []


# ---- the child, its parent, and the parent's other children ----


@needs_numba
def test_the_child_ends_when_its_parent_is_killed_whatever_else_was_forked(place: Place) -> None:
    place.shut_the_gate()
    code = """
kernels.kernels()
sys.stdin.readline()
pid = os.fork()
if not pid:
    sys.stdin.read()
    os._exit(0)
print(pid, flush=True)
sys.stdin.readline()
"""
    with place.start(code) as parent:
        child = place.arrived()
        parent.tell("fork")
        forked = int(parent.stdout.readline())
        parent.kill()
        assert ended(child)
        assert Path(f"/proc/{forked}").exists(), "the forked process lives, and kept no end open"
        parent.stdin.close()
        assert ended(forked)


@needs_numba
@pytest.mark.slow
def test_ctrl_c_ends_the_child_without_a_word(place: Place) -> None:
    place.shut_the_gate()
    code = """
kernels.kernels()
try:
    print("waiting", flush=True)
    sys.stdin.read()
except KeyboardInterrupt:
    print("interrupted")
"""
    with place.start(code) as parent:
        child = place.arrived()
        assert parent.stdout.readline() == "waiting\n"
        os.killpg(parent.pid, signal.SIGINT)
        assert parent.stdout.readline() == "interrupted\n"
        assert ended(child)

        assert parent.stderr.read() == ""
    assert parent.returncode == 0
    assert "Traceback" not in next(place.cache.glob("*.log")).read_text()


@needs_numba
@pytest.mark.slow
def test_a_forked_process_keeps_what_is_loaded_and_begins_again_what_was_not(place: Place) -> None:
    place.shut_the_gate()
    code = """
def forked():
    pid = os.fork()
    if not pid:
        ready = kernels.kernels() is not None
        good = kernels.wait() and kernels.kernels().add(2, 3) == 5
        os._exit(10 * ready + good)
    return pid

kernels.kernels()
sys.stdin.readline()  # the child of this process is at the gate
early = forked()
print("forked", flush=True)
kernels.wait()
late = forked()
print([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in (early, late)])
"""
    with place.start(code) as process:
        place.arrived()
        process.tell("")
        assert process.stdout.readline() == "forked\n"
        place.open_the_gate()
        assert process.communicate() == ("[1, 11]\n", "")
    assert place.compilations() == 1


@needs_numba
@pytest.mark.slow
def test_the_interpreter_ends_at_once_and_whole_whatever_the_thread_does(place: Place) -> None:
    place.shut_the_gate()
    code = """
import time
def statuses(count, step):
    pids = []
    for _ in range(count):
        pid = os.fork()
        if not pid:
            step()
            sys.exit()
        pids.append(pid)
    return {os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids}

print(statuses(5, kernels.kernels), flush=True)  # in the midst of importing
kernels.kernels()
sys.stdin.readline()
print(statuses(1, kernels.kernels), flush=True)  # while another compiles
kernels.wait()
print(statuses(5, lambda: setattr(kernels, "_ready", None) or setattr(kernels, "_work", None) or kernels.kernels()))
"""
    with place.start(code) as process:
        assert process.stdout.readline() == "{0}\n"
        place.arrived()
        process.tell("")
        assert process.stdout.readline() == "{0}\n"
        place.open_the_gate()
        assert process.communicate() == ("{0}\n", "")


# ---- the object ----


@needs_numba
def test_an_object_that_must_lie_near_to_the_c_library_is_refused() -> None:
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    text = "declare i64 @getpid()\ndefine i64 @f() {\n %1 = call i64 @getpid()\n ret i64 %1\n}\n"
    target = llvm.Target.from_default_triple()
    objects = [
        target.create_target_machine(reloc="static", codemodel=model).emit_object(
            llvm.parse_assembly(text)
        )
        for model in ("large", "small")
    ]
    assert build.externals(objects[0]) == {"getpid"}
    with pytest.raises(ValueError, match="relocations of 32 bits"):
        build.externals(objects[1])


@needs_numba
def test_kernels_that_need_more_than_they_say_are_refused(place: Place) -> None:
    place.write("""
from numba import types
getpid = types.ExternalFunction("getpid", types.int64())

def calls(a):
    return getpid() + a

def fails(a):
    raise ValueError(a)

def allocates(a):
    return len([a])

ENTRY_POINTS = {}
""")
    said = place.run("""
import tiny
from fastload.image.kernels import build
for function in (tiny.calls, tiny.fails, tiny.allocates):
    tiny.ENTRY_POINTS = {"f": (function, 1)}
    try:
        build.build(["tiny"])
    except ValueError as error:
        print(error)
""")
    assert said[0] == "the kernels need getpid, which no EXTERNALS names"
    assert re.match("the kernels need .*PyErr.*, which no EXTERNALS names", said[1])
    assert re.match("the kernels need .*NRT.*, which no EXTERNALS names", said[2])


def test_asking_costs_little(here: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_ready", kernels.Kernels({}, here.folder))
    best_ns = 1e9
    for _ in range(20):
        began = time.perf_counter_ns()
        for _ in range(1000):
            kernels.kernels()
        best_ns = min(best_ns, (time.perf_counter_ns() - began) / 1000)
    assert best_ns < 1000


@needs_numba
@pytest.mark.timeout(600)  # the compilation is nice to all others
def test_the_real_kernels_are_all_there() -> None:
    assert kernels.wait() or os.environ.get("FASTLOAD_KERNELS") == "0", kernels.state()
    ready = kernels.kernels()
    if ready is not None:
        assert kernels.Kernels.__annotations__.keys() <= vars(ready).keys()
