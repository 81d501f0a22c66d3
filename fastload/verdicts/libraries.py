"""The allow list: libraries whose code is not read, because threads and forks are known to run it rightly.

An entry says what was tested, at the lowest version named, by the tests in tests/compat. All that is not on the list is
read as the user's code is.
"""

from __future__ import annotations

import contextvars
import re
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Library:
    """What is known of a library.

    Args:
        tested: the lowest version tested; "" for the standard library.
        threads: whether several threads may call it at a time.
        fork: whether a forked child may use it: "yes", "no", or "child" if it opens what it uses itself.
        unsafe: dotted names, within the library, of modules, functions and classes for which `threads` does not hold:
            they set, or tell, what the process or the thread has one of.
        single: dotted names of classes whose objects are for one thread at a time.
        keeps: dotted names of classes whose objects keep what a call sets. Threads would share one that a module holds.
        settings: dotted names of functions without arguments that return settings which each thread has of its own. If
            the calling thread has changed them, a new thread does not know.
        holds_gil: why threads gain nothing, if that is known.
    """

    tested: str = ""
    threads: bool = True
    fork: Literal["yes", "no", "child"] = "yes"
    unsafe: str = ""
    single: str = ""
    keeps: str = ""
    settings: str = ""
    holds_gil: str = ""


_STANDARD = """
    asyncio.get_event_loop asyncio.get_event_loop_policy asyncio.set_event_loop asyncio.set_event_loop_policy
    contextlib.chdir
    contextlib.redirect_stderr contextlib.redirect_stdout ctypes.CDLL ctypes.PyDLL
    csv.field_size_limit decimal.getcontext decimal.setcontext fcntl.lockf faulthandler gc.disable gc.enable
    gc.freeze gettext.bindtextdomain gettext.textdomain locale.setlocale logging.addLevelName logging.basicConfig
    logging.captureWarnings logging.config logging.disable mimetypes.add_type mimetypes.init
    multiprocessing.process.active_children multiprocessing.process.parent_process os.chdir
    os.chroot os.close os.closerange os.dup2 os.fchdir os.fork os.forkpty os.getpid os.getppid
    os.nice os.putenv os.register_at_fork os.sched_setaffinity os.setgid os.setpgid os.setpriority os.setsid
    os.setuid os.umask os.unsetenv multiprocessing.process.current_process resource.setrlimit signal.alarm
    signal.pthread_sigmask signal.setitimer signal.signal socket.setdefaulttimeout sys.setrecursionlimit
    sys.setswitchinterval sys.settrace sys.setprofile threading.excepthook
    threading.main_thread time.tzset tracemalloc turtle tkinter unittest.mock
    warnings.catch_warnings warnings.filterwarnings warnings.resetwarnings warnings.simplefilter curses readline
"""

LIBRARIES = {
    "PIL": Library("10.0"),
    "albumentations": Library("1.4"),
    "albucore": Library("0.0.20"),
    "av": Library("12.0", unsafe="av.logging.set_level", fork="child"),
    "cv2": Library(
        "4.8",
        unsafe="cv2.setNumThreads cv2.setUseOptimized",
        single="""
            cv2.BackgroundSubtractor cv2.CLAHE cv2.DenseOpticalFlow cv2.SparseOpticalFlow cv2.StereoMatcher
            cv2.VideoCapture cv2.VideoWriter cv2.dnn.Net
        """,
    ),
    "datasets": Library("2.14"),
    "duckdb": Library("1.0", fork="no", single="duckdb.DuckDBPyConnection"),
    "einops": Library("0.7"),
    "fastload": Library(),
    "fsspec": Library("2023.1"),
    "grpc": Library("1.60", fork="no"),
    "h5py": Library("3.8", fork="child"),
    "huggingface_hub": Library("0.20"),
    "imageio": Library("2.31"),
    "kornia": Library("0.7"),
    "lance": Library("0.10", fork="no"),
    "lmdb": Library("1.4", fork="child", unsafe="lmdb.Environment"),
    "monai": Library("1.3", holds_gil="its transforms hold the GIL most of the time"),
    "numba": Library("0.59", unsafe="numba.set_num_threads"),
    "numpy": Library(
        "1.26", unsafe="numpy.seterr numpy.seterrcall numpy.set_printoptions numpy.setbufsize"
    ),
    "obstore": Library("0.3", fork="no"),
    "omegaconf": Library("2.3"),
    "pandas": Library("2.1", unsafe="pandas.set_option pandas.option_context pandas.reset_option"),
    "polars": Library("0.20", fork="no", unsafe="polars.Config"),
    "pyarrow": Library("14.0", unsafe="pyarrow.set_cpu_count pyarrow.set_io_thread_count"),
    "safetensors": Library("0.4"),
    "scipy": Library("1.11"),
    "skimage": Library("0.22"),
    "sklearn": Library(
        "1.3",
        unsafe="sklearn.set_config sklearn.config_context",
        settings="sklearn.get_config",
    ),
    "soundfile": Library("0.12"),
    "timm": Library("0.9"),
    "tokenizers": Library("0.15"),
    "torch": Library(
        "2.8",
        unsafe="""
            torch.set_default_dtype torch.set_default_device torch.set_default_tensor_type torch.set_num_threads
            torch.set_num_interop_threads torch.set_printoptions torch.set_float32_matmul_precision
            torch.use_deterministic_algorithms torch.autograd.detect_anomaly
            torch.autograd.set_detect_anomaly torch.backends.cudnn.flags torch.backends.mkldnn.flags
            torch.serialization.safe_globals
            torch.serialization.add_safe_globals torch.multiprocessing.set_sharing_strategy
        """,
        settings="torch.overrides._get_current_function_mode_stack",
    ),
    "torch_geometric": Library("2.5"),
    "torchaudio": Library("2.8", unsafe="torchaudio.set_audio_backend"),
    "torchio": Library("0.19"),
    "torchvision": Library(
        "0.23", unsafe="torchvision.set_image_backend torchvision.set_video_backend"
    ),
    "tqdm": Library("4.66"),
    "transformers": Library(
        "4.36",
        keeps="""
            transformers.tokenization_utils_fast.PreTrainedTokenizerFast
            transformers.tokenization_utils_tokenizers.TokenizersBackend
        """,
    ),
    "webdataset": Library("0.2.86"),
    "yaml": Library(
        "6.0", unsafe="yaml.add_constructor yaml.add_implicit_resolver yaml.add_representer"
    ),
    "zarr": Library("2.16", fork="child", unsafe="zarr.config"),
    "zstandard": Library("0.22", single="zstandard.ZstdCompressor zstandard.ZstdDecompressor"),
    # Not for threads, or not yet tested with them.
    "matplotlib": Library("3.8", threads=False, unsafe="matplotlib.pyplot"),
    "decord": Library("0.6", threads=False, fork="child"),
    # Their threads do not live on in a forked child.
    "daft": Library(threads=False, fork="no"),
    "deltalake": Library(threads=False, fork="no"),
    "jax": Library(threads=False, fork="no"),
    "lancedb": Library(threads=False, fork="no"),
    "tensorflow": Library(threads=False, fork="no"),
}

_VOUCHED = Library()
_STANDARD_LIBRARY = Library(
    unsafe=_STANDARD,
    single="""
        asyncio.events.AbstractEventLoop threading.local
        contextlib.chdir contextlib.redirect_stderr contextlib.redirect_stdout warnings.catch_warnings
    """,
)


def threads_ok(*packages: str) -> None:
    """Vouch for packages: threads may run their code, and a fork may, too. It is not read any more.

    For a library that is not on the list, or for your own package if `worker_method="auto"` sees a fault where there is
    none. It holds for this process and for loaders that have not begun. `threads_ok("__main__")` vouches for a script.

    Args:
        packages: names of top-level packages, as in `import name`.
    """
    for name in packages:
        if not name.isidentifier():
            raise ValueError(f"threads_ok takes names of top-level packages, got {name!r}")
    _vouched.update(packages)


_vouched: set[str] = set()


@contextmanager
def vouching_for_nothing() -> Iterator[None]:
    """Let the packages of `threads_ok` be read in the block. Call it only in a process with one thread."""
    before = _vouched.copy()
    _vouched.clear()
    yield
    _vouched.update(before)


def library(module: str | None) -> Library | None:
    """Return the entry for a module's top-level package, or None if it is not on the list."""
    top = (module or "").partition(".")[0]
    if top in _vouched:
        return _VOUCHED
    for name in (top, top.lstrip("_")):
        if name in LIBRARIES:
            return LIBRARIES[name]
    if module and module.partition(".")[0] in {*sys.stdlib_module_names, "distutils"}:
        return _STANDARD_LIBRARY
    return None


_SETTING = re.compile(
    r"_?(un|re|de)?(set|reset|register|enable|disable|install)(_|[A-Z])(?!.*([Ss]eed|state|color|Identity))"
    r"|(un)?(register|install)$"
)


def is_setting(function: Any) -> bool:
    """Return whether a function of a listed library has the name of one that sets something for the process."""
    bound = type(function) in (MethodType, staticmethod, classmethod)
    function = function.__func__ if bound else function
    if type(function) not in (FunctionType, BuiltinFunctionType):
        return False
    if "." in function.__qualname__ and not bound:
        return False  # of an object
    entry = library(function.__module__)
    return entry is not None and entry.threads and bool(_SETTING.match(function.__name__))


@cache
def unsafe_names() -> dict[str, str]:
    """Return the top-level package of each excepted name."""
    entries = [_STANDARD_LIBRARY, *LIBRARIES.values()]
    return {name: name.partition(".")[0] for entry in entries for name in entry.unsafe.split()}


def unsafe_objects() -> dict[int, str]:
    """Return the excepted names by the ids of what they stand for, as far as they are imported."""
    return _objects(unsafe_names())


def single_objects(column: str = "single") -> dict[int, str]:
    """Return the names of classes for one thread by their ids, as far as they are imported."""
    entries = [_STANDARD_LIBRARY, *LIBRARIES.values()]
    return _objects(name for entry in entries for name in getattr(entry, column).split())


def differs_in_a_new_thread(name: str) -> bool:
    """Return whether a function of a library returns other settings in a new thread, which has the same context."""
    settings = _imported(name)
    if settings is None:
        return False
    there: list[Any] = []
    run = contextvars.copy_context().run
    thread = threading.Thread(target=run, args=(lambda: there.append(settings()),))
    thread.start()
    thread.join()
    return bool(there != [settings()])


def _objects(names: Iterable[str]) -> dict[int, str]:
    return {id(value): name for name in names if (value := _imported(name)) is not None}


def _imported(name: str) -> Any:
    parts = name.split(".")
    for k in range(len(parts), 0, -1):
        value: Any = sys.modules.get(".".join(parts[:k]))
        if value is None:
            continue
        for part in parts[k:]:
            # No `getattr`: a lazy package would import.
            value = vars(value).get(part) if hasattr(value, "__dict__") else None
        return value
    return None
