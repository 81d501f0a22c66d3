"""Finalizers of copies, which do not run: as in a forked process, a copy does not own what the original opened."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastload.safety.objects import HEAP, IMMUTABLE

_silent: set[int] = set()
"""Ids of living copies. It needs no lock: adding and discarding are atomic, and an id is free only after `__del__`."""


def silence(copy: Any) -> None:
    """Keep the `__del__` of this object from running, if its class has one."""
    cls = next((k for k in type(copy).__mro__ if "__del__" in vars(k)), None)
    if cls is None or cls.__flags__ & (HEAP | IMMUTABLE) != HEAP:  # written in C
        return
    finalizer = vars(cls)["__del__"]
    if not hasattr(finalizer, "fastload_silences"):
        type.__setattr__(cls, "__del__", _unless_silent(finalizer, _silent.remove))
    _silent.add(id(copy))


def _unless_silent(finalizer: Any, remove: Callable[[int], None]) -> Any:
    # At interpreter exit the globals of this module may be gone, so it refers to none.
    def __del__(self: Any) -> None:
        try:
            remove(id(self))
        except KeyError:
            finalizer(self)

    __del__.fastload_silences = True  # type: ignore[attr-defined]
    return __del__
