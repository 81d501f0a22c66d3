"""The allow list: libraries whose code is not read, because threads and forks are known to run it rightly.

An entry says what was tested, at the lowest version named, by the tests in tests/compat. All that is not on the list is
read as the user's code is.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Library:
    """What is known of a library.

    Args:
        tested: the lowest version tested; "" for the standard library.
        threads: whether several threads may call it at a time.
        fork: whether a forked child may use it: "yes", or "child" if it opens what it uses itself.
        pool: how the names begin of threads that it starts once it is used. Then a fork is not safe.
        unsafe: dotted names, within the library, of modules, functions and classes for which `threads` does not hold:
            they set, or tell, what the process or the thread has one of.
        unreadable: dotted names of functions that run code which no source names.
        single: dotted names of classes whose objects are for one thread at a time.
        keeps: dotted names of classes whose objects keep what a call sets. Threads would share one that a module holds.
        constant: dotted names of classes whose objects stay as they are when they are used, whatever they hold.
        settings: dotted names of functions without arguments that return settings which each thread has of its own.
            After a colon, the name of those of a new thread. Without it, a new thread has none.
        holds_gil: why threads gain nothing, if that is known.
    """

    tested: str = ""
    threads: bool = True
    fork: Literal["yes", "child"] = "yes"
    pool: str = ""
    unsafe: str = ""
    unreadable: str = ""
    single: str = ""
    keeps: str = ""
    constant: str = ""
    settings: str = ""
    holds_gil: str = ""


_TABLE = Path(__file__).with_suffix(".toml").read_text()
LIBRARIES = {name: Library(**entry) for name, entry in tomllib.loads(_TABLE).items()}
_STANDARD_LIBRARY = LIBRARIES["the standard library"]
_TOPS = LIBRARIES | dict.fromkeys([*sys.stdlib_module_names, "distutils"], _STANDARD_LIBRARY)
"""The entries by the names of top-level packages."""
_VOUCHED = Library()


def threads_ok(*packages: str) -> None:
    """Vouch for packages: their code is right in threads and in forks, so `worker_method="auto"` does not read it.

    Use it for a library that the allow list lacks, or for your own package if auto reports a fault that is none. It
    affects this process, and loaders that have not begun yet. `threads_ok("__main__")` vouches for a script.

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
    return _TOPS.get(top) or _TOPS.get(top.lstrip("_"))


_SETTING = re.compile(
    r"_?(un|re|de)?(set|reset|register|enable|disable|install)(_|[A-Z])(?!.*([Ss]eed|state|color|Identity))"
    r"|(un)?(register|install)$"
)


def is_setting(function: Any) -> bool:
    """Return whether a function of a listed library has the name of one that sets something for the process."""
    bound = type(function) in (MethodType, staticmethod, classmethod)
    function = function.__func__ if bound else function
    called = type(function) in (FunctionType, BuiltinFunctionType)
    if not called or ("." in function.__qualname__ and not bound):  # a method of an object
        return False
    entry = library(function.__module__)
    return entry is not None and entry.threads and bool(_SETTING.match(function.__name__))


def objects_in(column: str) -> dict[int, str]:
    """Return the dotted names in a column by the ids of what they stand for, as far as they are imported."""
    names = " ".join(getattr(entry, column) for entry in LIBRARIES.values()).split()
    return {id(value): name for name in names if (value := _imported(name)) is not None}


def differs_in_a_new_thread(setting: str) -> bool:
    """Return whether the calling thread has settings that a new thread does not have."""
    name, _, new = setting.partition(":")
    here = _imported(name)
    return here is not None and bool(found := here()) and found != _imported(new)


def _imported(name: str) -> Any:
    top, *parts = name.split(".")
    found, path = sys.modules.get(top), top
    for part in parts:
        path += f".{part}"
        # No `getattr`: a lazy package would import.
        found = getattr(found, "__dict__", {}).get(part, sys.modules.get(path))
    return found
