"""What a piece of code does, as `effects` reads it: the values, their origins, and names of methods that change them.

A value in the code has origins: the paths to the objects that it may be. A path begins with

- ("self",), the method's own instance, or ("default", name), an argument's default;
- ("global", name), ("free", name), ("import", module): a global variable, a closure's variable, an imported module;
- ("any",): an object from elsewhere, such as an argument;
- ("call", ...): what the object at the rest of the path returns;
- ("passed", ...): an object that was passed to a call, which may have returned it, or a part of it.

Further steps are names of attributes, ELEMENT, SLICE, CLASS (its class), COPY (a shallow copy of it) and ARRAY (it, if
it is an array or tensor). Any branch may run, or none, in the order of the lines. Loops are read twice.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, field
from pathlib import Path as File
from typing import Any

Path = tuple[str, ...]

ELEMENT, SLICE, CLASS, COPY, ARRAY = "[]", "[:]", "(class)", "(copy)", "(array)"
CALL, PASSED, ANY = "call", "passed", ("any",)

LONGEST = 7
"""A longer path ends here: what lies below counts as the object at its end."""


def longer(path: Path, name: str) -> Path:
    """Return a path with one step more, if it is not too long."""
    return path if len(path) >= LONGEST or path == ANY else (*path, name)


@dataclass(frozen=True, slots=True)
class Value:
    """What a value may be, and what it may hold: for a new list, what its elements may be."""

    own: frozenset[Path] = frozenset()
    inner: frozenset[Path] = frozenset()

    def step(self, name: str) -> Value:
        """Return an attribute or element of the value."""
        return Value(frozenset(longer(path, name) for path in self.own) | self.inner, self.inner)

    @property
    def all(self) -> frozenset[Path]:
        """The objects that it may be or hold."""
        return self.own | self.inner


NEW = Value()


@dataclass
class Effects:
    """What a piece of code does. Each is with its line, the first one.

    Args:
        uses: the paths of the global, closed-over and imported objects that it names.
        changes: the paths of objects that it may change, and how: "=" (a global variable is assigned), ".name=", "[]=",
            "op=" (an operator in place), or the name of a method or function.
        escapes: the paths of objects that it passes to a call, by the path of what is called, and of those that it
            returns or stores, by (). Other code may change them.
        names: all names of attributes.
        computed: the paths of objects of which it reads attributes by names that are not in the source.
        kept: names of attributes to which it assigns an object that is not new.
        asks: it asks, by `is`, whether two objects are one.
        dynamic: it reads attributes whose names are not in the source.
        opaque: its source is not there, and it may change something.
    """

    uses: dict[Path, int] = field(default_factory=dict)
    changes: dict[tuple[Path, str], int] = field(default_factory=dict)
    escapes: dict[Path, set[Path]] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)
    computed: dict[Path, int] = field(default_factory=dict)
    kept: set[str] = field(default_factory=set)
    asks: bool = False
    dynamic: bool = False
    opaque: bool = False


# ---- names ----

_TABLE: dict[str, Any] = tomllib.loads(File(__file__).with_suffix(".toml").read_text())
_OUT: dict[str, str] = _TABLE.pop("out")
NAMES = {key: frozenset(text.split()) for key, text in _TABLE.items()}

CHANGING = NAMES["changing"]
"""Methods that change their object."""

SETTER = re.compile(
    "(seek|set|add|put|reset|remove|register|enable|disable|feed|fit|partial_fit)(_.*|[A-Z].*)?$"
    "|put[a-z]+$|paste$|thumbnail$|train$|zero_grad$"
)
"""Names of methods that change an object of a library, unless that is a table."""

CHANGING_FIRST = NAMES["changing_first"]
"""Functions that change their first argument."""


PLACE_OF_OUT = {name: int(k) for k, names in _OUT.items() for name in names.split()}
"""How many arguments of a function of NumPy come before `out`."""

DRAWING = NAMES["drawing"]
"""Functions of imaging modules that change their first argument. Methods of these names do not."""

RETURN_NEW = NAMES["return_new"]
"""Functions and methods whose result shares no memory with their arguments."""

SHALLOW = NAMES["shallow"]
"""Functions and methods whose result is new, and holds elements of their arguments."""


OF_ARRAYS = NAMES["of_arrays"]
"""Functions that share memory with an array or tensor, and copy anything else."""

WITHOUT_STATE = NAMES["without_state"]
"""Modules whose classes in C keep nothing that a call sets."""

COMPILERS = NAMES["compilers"]
"""Packages whose objects hold machine code, and as `py_func` the function that they compiled."""

TABLES = NAMES["tables"]
"""Packages whose setters return a new object."""

TYPES = {(name,) for name in ("dict", "list", "set", "bytearray", "object", "type")}
