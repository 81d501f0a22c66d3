"""Kernels in machine code, which fill whole runs of rows in one call without the GIL.

A child process compiles them with Numba (seconds), and stores them in a cache. This process only loads them
(milliseconds), and never imports Numba. Until they are ready, or if they cannot run here, `kernels()` is None. Then
torch's own kernels give the same pixels, to the bit. `state()` and `fastload env` say which kernels run, and why.

`FASTLOAD_KERNELS=0` turns them off, if it is set before their first use. `FASTLOAD_CACHE` names the folder of the
cache (see `cache`). Numba comes with `pip install "fastload[kernels]"`.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import importlib.metadata
import importlib.util
import json
import os
import platform
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

from fastload.image.kernels import cache

MODULES: Sequence[str] = (f"{__name__}.runs", f"{__name__}.jpeg", "fastload.image.kernels_check")
"""Modules whose ENTRY_POINTS are compiled. `build` says what else a module may have."""

FEATURES = ("avx2", "pclmul")
"""Features of the processor that the kernels need, by LLVM's names."""

FAILED = "compilation failed: "

EXIT_S = 2.0
FORK_S = 10.0
"""Seconds that the end of the interpreter, or a fork, waits at most for the thread."""

Entry = Callable[..., int]


class Kernels:
    """The entry points, as functions of int64 to int64 that release the GIL. See `runs` and `jpeg`."""

    draw_run: Entry
    resample_run: Entry
    raw_run: Entry
    jpeg_run: Entry
    file_run: Entry
    crc32: Entry
    jpeg_error: Entry
    jpeg_message: Entry

    def __init__(self, entries: dict[str, Entry], path: Path) -> None:
        self.path = path
        vars(self).update(entries)


class Unavailable(Exception):
    """The kernels cannot run here. The message says why."""


def kernels() -> Kernels | None:
    """Return the kernels, or None if they are not ready now. Never wait, and never raise.

    The first call starts to load or compile them in the background.
    """
    ready = _ready
    if ready is None and _work is None:
        _begin()
    return ready


def wait(timeout: float | None = None) -> bool:
    """Wait until the kernels are ready or have failed, at most `timeout` seconds. Return True if they are ready."""
    if kernels() is None and _work is not None and _work.thread is not None:
        _work.thread.join(timeout)
    return _ready is not None


def state() -> str:
    """Return a line that says which kernels run, and why. Start nothing."""
    if _ready is not None:
        return f"compiled ({_ready.path})"
    if _work is not None:
        return _work.state
    try:
        name = _object_name()
        found = cache.find(name)
        if found is None:
            return "not compiled yet: compiling begins with the first use, or with `fastload env --compile`"
        _header(found[1])
        return f"compiled ({found[0]})"
    except Unavailable as error:
        return str(error)
    except Exception as error:
        return f"off: {type(error).__name__}: {error}"


# ---- the thread in the background ----

_ready: Kernels | None = None
_work: _Work | None = None
_beginning = threading.Lock()  # held while `_work` is created
_undivided = threading.Lock()
"""Held during steps that neither a fork nor the end of the interpreter may interrupt."""
_forking: int | None = None  # the thread that holds `_undivided` while it forks
_closing = False
_descriptors: set[int] = set()  # closed in a forked process


class _Work:
    """The thread that loads or compiles the kernels, and its progress."""

    def __init__(self) -> None:
        self.state = "being loaded"
        self.finished = False
        self.thread: threading.Thread | None = None
        thread = threading.Thread(target=self._run, name="fastload-kernels", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # no thread can start, or the interpreter is ending
            self.state, self.finished = f"off: {error}", True
        else:
            self.thread = thread

    def _run(self) -> None:
        global _ready
        try:
            with _whole():
                name = _object_name()
            path, content = cache.find(name) or self._compile(name)
            with _whole():
                _ready = Kernels(load(content), path)
        except Unavailable as error:
            self.state = str(error)
        except Exception as error:
            self.state = f"off: {type(error).__name__}: {error}"
        finally:
            self.finished = True

    def _compile(self, name: str) -> tuple[Path, bytes]:
        """Compile in a child, unless another process does that already. Return the file that is then in the cache."""
        self.state = "being compiled"
        with _locked(f"{name}.lock") as (lock, waited):
            if found := cache.find(name):
                return found
            if waited and (line := _last_line(name)).startswith(FAILED):
                raise Unavailable(line)
            status = _run_child(name, lock)
            if found := cache.find(name):
                return found
            line = f"{FAILED}{_last_line(name) or f'status {status}'}"
            # For the processes that wait, which would fail in the same way.
            _log(name, f"{line}\n")
            raise Unavailable(line)


def _begin() -> None:
    global _work
    with _beginning:
        if _work is None:
            _work = _Work()


@contextmanager
def _whole() -> Iterator[None]:
    """Make forks and the end of the interpreter wait. LLVM's locks and unfinished imports survive neither."""
    with _undivided:
        if _closing:
            raise SystemExit  # ends this thread silently
        yield


@contextmanager
def _locked(name: str) -> Iterator[tuple[int, bool]]:
    """Hold a lock between processes. Yield its descriptor, and True if another process held it before."""
    with _whole():
        lock = cache.open_file(name, os.O_RDWR)
        _descriptors.add(lock)
    waited = False
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waited = True
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:
            pass  # a file system without locks: at worst several processes compile
        yield lock, waited
    finally:
        _close(lock)


def _run_child(name: str, lock: int) -> int:
    """Compile in a child process, and return its status. It holds `lock`, and ends if this process does."""
    command = [sys.executable, "-P", "-m", f"{__name__}.build", name, *MODULES]
    with _whole():
        log = cache.open_file(f"{name}.log", os.O_WRONLY | os.O_TRUNC)
        reader, writer = os.pipe()
        _descriptors.add(writer)
        try:
            # Its standard input closes when this process ends. In its own session it gets no Ctrl-C.
            child = subprocess.Popen(
                command,
                stdin=reader,
                stdout=subprocess.DEVNULL,
                stderr=log,
                cwd="/",
                env=_environment(),
                pass_fds=(lock,),
                start_new_session=True,
            )
        except BaseException:
            _close(writer)
            raise
        finally:
            os.close(reader)
            os.close(log)
    try:
        return child.wait()
    finally:
        _close(writer)


def _environment() -> dict[str, str]:
    """Return the child's environment: it finds the same modules, and no variable changes how Numba compiles."""
    dropped = ("NUMBA_", "PYTHONINSPECT", "PYTHONWARNINGS")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    path = os.pathsep.join(map(os.path.abspath, sys.path))
    if folder := kept.get("FASTLOAD_CACHE"):
        kept["FASTLOAD_CACHE"] = os.path.abspath(folder)  # the child runs in another folder
    return kept | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def _last_line(name: str) -> str:
    """Return the last line of the child's log, or "" if there is none."""
    with suppress(OSError):
        log = cache.open_file(f"{name}.log", os.O_RDONLY)
        with open(log, encoding="utf-8", errors="replace") as opened:
            return next((line for line in reversed(opened.read().split("\n")) if line), "")
    return ""


def _log(name: str, line: str) -> None:
    with suppress(OSError):
        log = cache.open_file(f"{name}.log", os.O_WRONLY | os.O_APPEND)
        with open(log, "a", encoding="utf-8") as opened:
            opened.write(line)


def _close(descriptor: int) -> None:
    _descriptors.discard(descriptor)
    os.close(descriptor)


def _before_fork() -> None:
    global _forking
    if _undivided.acquire(timeout=FORK_S):
        _forking = threading.get_ident()


def _after_fork_in_parent() -> None:
    global _forking
    if _forking == threading.get_ident():
        _forking = None
        _undivided.release()


def _after_fork_in_child() -> None:
    """Keep loaded kernels. Forget the thread, which does not run in this process."""
    global _beginning, _undivided, _forking, _work
    _beginning, _undivided, _forking = threading.Lock(), threading.Lock(), None
    for descriptor in _descriptors:
        with suppress(OSError):
            os.close(descriptor)
    _descriptors.clear()
    if _work is not None and not _work.finished:
        _work = None


def _at_exit() -> None:
    """Wait until the thread is out of LLVM, and let it start nothing more."""
    global _closing
    _closing = True
    if _undivided.acquire(timeout=EXIT_S):
        _undivided.release()


os.register_at_fork(
    before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child
)
atexit.register(_at_exit)


# ---- the object file ----


def _object_name() -> str:
    """Return the name in the cache of the object for this machine, these sources and this torch.

    Raise Unavailable if the kernels cannot run here.
    """
    digest = sha256(json.dumps(_identity(), sort_keys=True).encode()).hexdigest()
    return f"kernels-{digest[:32]}"


def _identity() -> dict[str, str]:
    """Return everything that the object depends on, by name. Raise Unavailable if the kernels cannot run here."""
    if (switch := os.environ.get("FASTLOAD_KERNELS", "1")) in ("0", "off", "no", "false"):
        raise Unavailable(f"off: FASTLOAD_KERNELS={switch}")
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        raise Unavailable(f"not for this processor ({sys.platform}, {platform.machine()})")
    try:
        versions = {name: importlib.metadata.version(name) for name in ("numba", "llvmlite")}
        torch = importlib.metadata.distribution("torch")  # to import it takes seconds
    except importlib.metadata.PackageNotFoundError as error:
        raise Unavailable(
            f'{error.name} is not installed: pip install "fastload[kernels]"'
        ) from error
    import llvmlite.binding as llvm

    features = llvm.get_host_cpu_features()
    if lacking := [name for name in FEATURES if not features.get(name)]:
        raise Unavailable(f"not for this processor (it has no {', no '.join(lacking)})")
    return versions | {
        "processor": llvm.get_host_cpu_name(),
        "features": features.flatten(),
        "torch": f"{torch.version} {sha256((torch.read_text('RECORD') or '').encode()).hexdigest()}",
        "capability": os.environ.get("ATEN_CPU_CAPABILITY", ""),  # which torch obeys
        "sources": _sources(),
    }


def _sources() -> str:
    """Return a hash of the names and sources of the kernels' modules, and of all modules beside them."""
    origins = [spec.origin for name in MODULES if (spec := importlib.util.find_spec(name))]
    folders = {Path(origin).parent for origin in origins if origin} | {Path(__file__).parent}
    files = {file for folder in folders for file in folder.glob("*.py")} - {Path(__file__)}
    sources = [" ".join(MODULES).encode(), *(file.read_bytes() for file in sorted(files))]
    return sha256(b"\0".join(sources)).hexdigest()


def _header(content: bytes) -> tuple[dict[str, Any], bytes]:
    """Split the content of a file into its header and the object. Raise Unavailable if it has only a reason."""
    line, _, code = content.partition(b"\n")
    header = json.loads(line)
    if "refused" in header:
        raise Unavailable(header["refused"])
    return header, code


def load(content: bytes) -> dict[str, Entry]:
    """Load an object that `build` returned, and return its entry points. It stays loaded.

    Raise Unavailable if it cannot run here.
    """
    import llvmlite.binding as llvm

    header, code = _header(content)
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    llvm.check_jit_execution()
    process = ctypes.CDLL(None)
    for name in header["externals"]:  # LLVM would end the process if one were missing
        function = getattr(process, name, None)
        if function is None:
            raise Unavailable(f"off: this system's C library has no {name}")
        llvm.add_symbol(name, ctypes.cast(function, ctypes.c_void_p).value)
    machine = llvm.Target.from_default_triple().create_target_machine(jit=True)
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    entries: dict[str, Entry] = {}
    for name, count in header["entries"].items():
        prototype = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * count)
        entries[name] = prototype(engine.get_function_address(name))
    engine.detach()  # a worker may be in a kernel while the interpreter ends
    return entries
