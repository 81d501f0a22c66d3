"""How far a pass over a stream has drawn from Python's and NumPy's generators, as JSON values."""

from __future__ import annotations

import struct
from random import Random
from typing import Any

from fastload.random.numpy_random import ThreadState

_WORDS = "<625I"  # the state of MT19937, and the position in it


def state(python: Random | None, numpy: ThreadState | None) -> dict[str, Any]:
    """Return the states of the generators that have been drawn from."""
    found: dict[str, Any] = {}
    if python is not None:
        found["python"] = python_state(python)
    if numpy is not None:
        found["numpy"] = {
            "key": numpy.key,
            "words": numpy.words.hex(),
            "gauss": numpy.gauss.hex(),
        }
    return found


def restore(found: dict[str, Any], python: Random, numpy: ThreadState) -> tuple[bool, bool]:
    """Set the generators to what `state` returned. Return which of them were drawn from."""
    if own := found.get("python"):
        set_python_state(python, own)
    if own := found.get("numpy"):
        numpy.key = own["key"]
        numpy.words, numpy.gauss = bytes.fromhex(own["words"]), bytes.fromhex(own["gauss"])
    return "python" in found, "numpy" in found


def python_state(generator: Random) -> dict[str, Any]:
    """Return the state of one of Python's generators as JSON values."""
    _, words, gauss = generator.getstate()
    return {"words": struct.pack(_WORDS, *words).hex(), "gauss": gauss}


def set_python_state(generator: Random, state: dict[str, Any]) -> None:
    """Set what `python_state` returned."""
    words = struct.unpack(_WORDS, bytes.fromhex(state["words"]))
    generator.setstate((generator.VERSION, words, state["gauss"]))
