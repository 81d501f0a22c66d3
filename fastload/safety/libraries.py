"""The table of libraries: which of them survive a fork, and their names of process-wide state."""

from __future__ import annotations

import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Library:
    """What is known of a library.

    Args:
        fork: whether a forked child may use it: "yes", or "child" if it opens what it uses itself.
        pool: how the names begin of threads that it starts once it is used. Then a fork is not safe.
        unsafe: dotted names of modules, functions and classes that set or return process-wide state.
    """

    fork: Literal["yes", "child"] = "yes"
    pool: str = ""
    unsafe: str = ""


_TABLE = Path(__file__).with_suffix(".toml").read_text()
LIBRARIES = {name: Library(**entry) for name, entry in tomllib.loads(_TABLE).items()}


def threads_ok(*names: str | type) -> None:
    """Declare packages and classes thread-safe, so that `worker_method="auto"` does not read their code.

    It affects this process, and loaders that have not begun yet. `threads_ok("__main__")` declares a script.

    Args:
        names: names of top-level packages, as in `import name`, and classes.

    Raises:
        ValueError: a name is neither a class nor the name of a top-level package.

    Examples:
        >>> fastload.threads_ok("mylibrary", type(dataset))
    """
    for name in names:
        if not isinstance(name, type) and not (isinstance(name, str) and name.isidentifier()):
            takes = "threads_ok takes classes and names of top-level packages"
            raise ValueError(f"{takes}, got {name!r}")
    _allowed.update(names)


_allowed: set[str | type] = set()


def is_allowed(module: str | None, x: Any) -> bool:
    """Return whether `threads_ok` was called with a class, or with the package of a module."""
    return (module or "").partition(".")[0] in _allowed or (isinstance(x, type) and x in _allowed)


def unsafe_names() -> dict[int, str]:
    """Return the names of process-wide state, by the ids of what they stand for, as far as it is imported."""
    names = " ".join(entry.unsafe for entry in LIBRARIES.values()).split()
    return {id(value): name for name in names if (value := _imported(name)) is not None}


def _imported(name: str) -> Any:
    top, *parts = name.split(".")
    found, path = sys.modules.get(top), top
    for part in parts:
        path += f".{part}"
        # No `getattr`: a lazy package would import.
        found = getattr(found, "__dict__", {}).get(part, sys.modules.get(path))
    return found
