"""What samples can reach: objects of the dataset's graph, functions, and module-level objects that their code names."""

from __future__ import annotations

import builtins
import copyreg
import functools
import io
import sys
import threading
import types
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.util import resolve_name
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch

from fastload.isolation.rules import (
    GENERATORS,
    HEAP,
    is_global_generator,
    own_dict,
    refused_class,
    shared_class,
)
from fastload.verdicts.effects import CHANGING, CLASS, Effects, Path, effects_of
from fastload.verdicts.libraries import (
    Library,
    is_setting,
    library,
    single_objects,
    unsafe_names,
    unsafe_objects,
)

OBJECTS, FUNCTIONS, ELEMENTS, INSTANCES = 10_000, 600, 64, 16
"""The search looks at no more objects and functions, elements of a container, and instances of a class."""

AFTER_FINDING = 100
"""The functions that it reads at most if something unknown was found: then only a proven fault would tell more."""

CACHED = type(functools.lru_cache(print))


@dataclass(frozen=True)
class Finding:
    """Something for which threads are not known to be right.

    Args:
        what: a clause that names it, and the code that decides.
        proven: threads would read wrong samples, or fail. If not, nobody knows.
        remedy: what would let threads read it.
        state: it is an object that threads share, and that keeps something from one sample to another.
    """

    what: str
    proven: bool
    remedy: str
    state: bool = False


@dataclass(frozen=True, eq=False)
class Instance:
    """An object that the search found. `stays`: no worker gets a copy, for a module or a class holds it."""

    x: Any
    path: str
    stays: bool


@dataclass(frozen=True, eq=False)
class Function:
    """A function that samples may call, as a method of `owner` if that is given."""

    function: FunctionType
    owner: type | None
    first: str | None
    stays: bool

    def __str__(self) -> str:
        return f"{self.function.__module__}.{self.function.__qualname__}"

    def at(self, line: int) -> str:
        """Return the function's name and a line in its file."""
        file = self.function.__code__.co_filename.rpartition("/")[2]
        return f"`{self}` ({file}, line {line})"

    @property
    def effects(self) -> Effects:
        """What the function does."""
        return effects_of(self.function, self.first)


class Reach:
    """The search. `findings` has what decides by its mere presence; what the functions change, `judge` looks at.

    `generators` are the random generators that modules and classes hold, each with a unique path.

    Args:
        roots: the dataset, `collate_fn` and `worker_init_fn`, by name.
    """

    def __init__(self, roots: dict[str, Any]) -> None:
        self.findings: list[Finding] = []
        self.functions: list[Function] = []
        self.generators: list[tuple[str, Any]] = []
        self.cuda = False
        self.instances: dict[type, list[Instance]] = {}
        self._unsafe, self._single = unsafe_objects(), single_objects()
        self._kept = single_objects("keeps")
        # It keeps the objects alive, so that their ids stay valid.
        self._seen: dict[tuple[int, bool], Any] = {}
        self._classes: set[tuple[type, bool]] = set()
        self._read: set[int] = set()
        self._pending: dict[str, list[Function]] = {}  # methods whose names no code has read yet
        self._names: set[str] = {"state_dict", "load_state_dict", "fill_rows", "forward"}
        self._todo: deque[Instance | Function] = deque(
            Instance(x, path, stays=False) for path, x in roots.items()
        )
        while self._todo and not any(finding.proven for finding in self.findings):
            if self.findings and len(self._read) > AFTER_FINDING:
                break
            if len(self._seen) > OBJECTS or len(self._read) > FUNCTIONS:
                self._find("the dataset reaches more code and objects than are looked at")
                break
            each = self._todo.popleft()
            (self._function if isinstance(each, Function) else self._object)(each)  # type: ignore[arg-type]

    def _find(
        self, what: str, remedy: str = "", *, proven: bool = False, state: bool = False
    ) -> None:
        finding = Finding(what, proven, remedy, state)
        if finding not in self.findings:
            self.findings.append(finding)

    # ---- objects ----

    def _object(self, found: Instance) -> None:
        x, kind = found.x, type(found.x)
        if kind in LEAVES or (id(x), found.stays) in self._seen:
            return
        if issubclass(kind, GENERATORS) and is_global_generator(x):
            return
        self._seen[id(x), found.stays] = x
        self.cuda |= issubclass(kind, torch.Tensor) and x.is_cuda
        if kind is FunctionType:
            self._push_function(x, None, None, stays=found.stays)
        elif issubclass(kind, type):
            self._class(x, made=True)
        elif kind is CACHED:
            self._cached(x, found.path)
        elif kind is types.BuiltinFunctionType:
            self._builtin(x, found.path, stays=found.stays)
        elif not issubclass(kind, ModuleType | np.ndarray | torch.Tensor):
            self._instance(found)
        for path, part in () if _is_opaque(kind) else _parts(x, found.path):
            self._todo.append(Instance(part, path, found.stays))

    def _instance(self, found: Instance) -> None:
        x, kind = found.x, type(found.x)
        if found.stays:
            self._of_a_module(found)
        for base in kind.__mro__[:-1]:
            one = self._single.get(id(base)) or self._unsafe.get(id(base))
            if base is threading.local and _is_empty(base.__getattribute__(x, "__dict__")):
                one = None  # each thread begins with nothing in it, as a process does
            if one is not None:
                self._find(
                    f"{found.path} is a {one}, which is for one thread",
                    "create it for each sample",
                    proven=True,
                )
            if library(base.__module__) is None:
                self.instances.setdefault(base, [])
                if len(self.instances[base]) < INSTANCES:
                    self.instances[base].append(found)
        if issubclass(kind, types.GeneratorType):
            self._find(
                f"{found.path} is a running generator, which cannot be copied",
                "create it in `__iter__`",
            )
        self._class(kind)
        module, compiled = kind.__module__, library(kind.__module__) is None and _is_in_c(kind)
        if compiled and type(getattr(x, "__module__", None)) is str:
            module = x.__module__  # a function of Cython or Boost
        self._entry(library(module), module, found.path, compiled=compiled)
        if kind.__module__.startswith("numba."):
            self._compiled_by_numba(own_dict(x), found)

    def _compiled_by_numba(self, own: dict[str, Any], found: Instance) -> None:
        if (own.get("targetoptions") or {}).get("parallel"):
            self._find(
                f"{found.path} is compiled by numba with parallel=True, which one thread at a time may call",
                "compile it without parallel=True",
                proven=True,
            )
        if "py_func" in own:
            self._todo.append(Instance(own["py_func"], found.path, found.stays))

    def _of_a_module(self, found: Instance) -> None:
        """Look at an object that all threads would share, although a worker process has its own."""
        x, kind = found.x, type(found.x)
        what = None
        if issubclass(kind, GENERATORS) and not shared_class(type(x)):
            same = sum(path.partition(" (")[0] == found.path for path, _ in self.generators)
            path = f"{found.path} ({same + 1})" if same else found.path
            self.generators.append((path, x))
            what = "a random generator"
        elif issubclass(kind, io.IOBase):
            standard = x in (sys.stdin, sys.stdout, sys.stderr)
            what = None if x.closed or standard else "an open file"
        elif hasattr(kind, "__next__"):
            what = "an iterator"
        elif refused_class(kind):
            what = f"an open {kind.__qualname__}"
        elif self._kept.keys() & set(map(id, kind.__mro__)) or _hides_state(kind):
            self._find(
                f"`{found.path}` ({kind.__qualname__}) may keep what a call sets, and all threads would share it",
                "make it an attribute of the dataset, or create it for each sample",
                state=True,
            )
        if what:
            self._find(
                f"`{found.path}` is {what} that all threads would share",
                "make it an attribute of the dataset, of which each worker gets its own copy",
                proven=True,
                state=True,
            )

    def _entry(
        self, entry: Library | None, module: str, path: str, *, compiled: bool = False
    ) -> None:
        top = module.partition(".")[0]
        if entry is None:
            if compiled or _is_compiled(module):
                self._find(
                    f"{path} is of the compiled library {top}, of which nothing is known",
                    _VOUCH.format(top),
                )
        elif entry.holds_gil:
            self._find(f"{path} is of {top}: {entry.holds_gil}")
        elif not entry.threads:
            self._find(
                f"{path} is of {top}, which is not known to work in threads", _VOUCH.format(top)
            )

    def _cached(self, x: Any, path: str) -> None:
        wrapped = x.__wrapped__
        if library(getattr(wrapped, "__module__", None)) is None and not _is_immutable(wrapped):
            self._find(
                f"`{path}` caches what it returns, and all threads would share that",
                "annotate its result, if it is an immutable type (-> int), or create the cache in the dataset",
                state=True,
            )

    def _builtin(self, x: Any, path: str, *, stays: bool) -> None:
        if x in _UNREADABLE:
            self._find(f"samples call `{x.__name__}`, and what it runs cannot be read")
        elif stays and x.__name__ in CHANGING and not isinstance(x.__self__, _NO_OBJECT):
            remedy = "keep it in an attribute of the dataset"
            self._find(
                f"`{path}` changes an object that all threads would share",
                remedy,
                proven=True,
                state=True,
            )
        elif id(x) not in self._unsafe:
            module = x.__module__ or getattr(type(x.__self__), "__module__", "")
            self._entry(library(module), module, f"`{path}`", compiled=True)

    # ---- code ----

    def _class(self, cls: type, *, made: bool = False) -> None:
        """Queue the methods of a class that samples may call. `made`: they may create instances, too."""
        entry = library(cls.__module__)
        if entry is not None and made and id(cls) not in self._unsafe:
            self._entry(entry, cls.__module__, f"`{cls.__qualname__}`")
        if (cls, made) in self._classes:
            return
        self._classes.add((cls, made))
        libraries = [base for base in cls.__mro__[:-1] if library(base.__module__) is not None]
        called = {
            name for base in libraries for name in vars(base)
        }  # a library may call what overrides its methods
        overridden: set[str] = set()
        for base in cls.__mro__[:-1]:
            if base in libraries:
                continue
            in_c = entry is None and (made or base is not cls) and _is_in_c(base)
            self._entry(None, base.__module__, f"`{base.__qualname__}`", compiled=in_c)
            for name, member in list(vars(base).items()):
                self._member(
                    base, name, member, made=made, called=name in called, hidden=name in overridden
                )
            overridden |= vars(base).keys()

    def _member(
        self, cls: type, name: str, member: Any, *, made: bool, called: bool, hidden: bool
    ) -> None:
        special = name.startswith("__") and name.endswith("__")
        if name in _CREATING and not made:
            return
        key = f"super.{name}" if hidden else name
        for function, first in _functions_of(member):
            if function.__code__.co_filename == "<string>" and hasattr(cls, "__dataclass_fields__"):
                continue  # of `dataclasses`
            if (not hidden and (special or called)) or key in self._names:
                self._push_function(function, cls, first, stays=True)
            else:
                method = Function(function, cls, first, stays=True)
                self._pending.setdefault(key, []).append(method)
        plain = not hasattr(type(member), "__get__") and not special
        if plain or type(member) is CACHED:
            path = f"{cls.__module__}.{cls.__qualname__}.{name}"
            self._todo.append(Instance(member, path, stays=True))

    def _push_function(
        self, function: FunctionType, owner: Any, first: str | None, *, stays: bool
    ) -> None:
        module = function.__globals__.get("__name__")
        entry = library(module)
        if entry is None:
            self._todo.append(Function(function, owner, first, stays or is_importable(function)))
        elif f"{module}.{function.__qualname__}" in _UNREADABLE_NAMES:
            self._find(
                f"samples call {module}.{function.__qualname__}, and what it runs cannot be read"
            )
        elif id(function) not in self._unsafe:
            self._entry(entry, module, f"`{function.__qualname__}`")

    def _function(self, found: Function) -> None:
        key = id(found.function)
        if key in self._read:
            return
        self._read.add(key)
        self.functions.append(found)
        effects = found.effects
        if effects.opaque:
            self._find(
                f"the source of `{found}` is not there to read, and it may change what threads share"
            )
        new = effects.names - self._names
        self._names |= new
        for name in list(self._pending) if effects.dynamic else sorted(new & self._pending.keys()):
            for method in self._pending.pop(name):
                self._push_function(method.function, method.owner, method.first, stays=True)
        for path, line in effects.uses.items():
            self._use(found, path, line)
        for path, line in effects.computed.items():
            if any(type(value) is ModuleType for value in named(found, path)):
                self._find(
                    f"{found.at(line)} calls getattr on `{'.'.join(path[1:])}` with a name that is not in the source"
                )

    def _use(self, found: Function, path: Path, line: int) -> None:
        for value in named(found, path):
            if value is MISSING:
                self._not_imported(found, path, line)
            elif id(value) in self._unsafe:
                self._find(
                    f"{found.at(line)} uses {self._unsafe[id(value)]}, which a process, or a thread, has one of",
                    "leave it out of samples",
                    proven=True,
                )
            elif is_setting(value):
                self._find(
                    f"{found.at(line)} calls `{path[-1]}`, which by its name sets something for the whole process",
                    "leave it out of samples",
                )
            elif type(value) is ModuleType:
                self._entry(library(value.__name__), value.__name__, f"`{'.'.join(path[1:])}`")
            else:
                name = (
                    ".".join(path[1:])
                    if path[0] == "import"
                    else f"{found.function.__module__}.{'.'.join(path[1:])}"
                )
                self._todo.append(Instance(value, name, stays=path[0] != "free" or found.stays))

    def _not_imported(self, found: Function, path: Path, line: int) -> None:
        name = ".".join(path[1:])
        if name[0] == ".":
            name = resolve_name(name, found.function.__globals__["__package__"])
        if path[0] != "import":  # of a module that imports its parts at their first use
            top = next(named(found, path[:2]))
            name = ".".join((own_dict(top).get("__name__", path[1]), *path[2:]))
        if library(name) is None:
            self._find(
                f"{found.at(line)} uses {name}, whose code is not loaded yet",
                f"import {name} at the top, by its full name",
            )
        elif name in unsafe_names():
            self._find(
                f"{found.at(line)} uses {name}, which a process, or a thread, has one of",
                proven=True,
            )
        else:
            self._entry(library(name), name, f"`{name}`")


_VOUCH = 'fastload.threads_ok("{}") vouches for it'


def _hides_state(kind: type) -> bool:
    """Return whether objects of a listed library's class, in C, can neither be pickled nor be looked into."""
    plain = kind.__reduce_ex__ is object.__reduce_ex__ and kind.__reduce__ is object.__reduce__
    if not plain or kind.__dictoffset__ or hasattr(kind, "__setstate__") or shared_class(kind):
        return False
    known = kind in copyreg.dispatch_table or kind.__module__ in _NO_STATE
    return not known and kind.__basicsize__ > 24 and library(kind.__module__) is not None


_NO_STATE = {"_abc", "_hashlib", "_json", "_struct", "builtins", "functools", "torch", "weakref"}


def _is_opaque(kind: type) -> bool:
    """Return whether what an object holds is no code of the user."""
    return kind.__module__.partition(".")[0] in ("numba", "llvmlite") or bool(shared_class(kind))


def _is_empty(x: dict[str, Any]) -> bool:
    return not any(type(v) not in LEAVES | {list, dict, set, tuple} or v for v in x.values())


LEAVES = {
    types.NoneType,
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    range,
    slice,
    types.EllipsisType,
    np.dtype,
    torch.dtype,
}

_NO_OBJECT = ModuleType | type | types.NoneType  # `cv2.resize` and `torch.add` have these

_UNREADABLE = [eval, exec, compile, globals, __import__]
_UNREADABLE_NAMES = {"importlib.import_module", "runpy.run_path", "runpy.run_module"}

_CREATING = {
    "__init__",
    "__new__",
    "__post_init__",
    "__init_subclass__",
    "__set_name__",
    "__attrs_post_init__",
}
_CREATING |= {
    "__getstate__",
    "__setstate__",
    "__reduce__",
    "__reduce_ex__",
    "__deepcopy__",
    "__copy__",
    "__del__",
}


def _parts(x: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield what an object holds, with paths. No code of its class runs."""
    kind = type(x)
    if kind is FunctionType:
        for value in (
            *(x.__defaults__ or ()),
            *(x.__kwdefaults__ or {}).values(),
            *vars(x).values(),
        ):
            yield path, value
        return
    if issubclass(kind, type | ModuleType | torch.Tensor | np.ndarray):
        return
    if issubclass(kind, dict):
        items = list(dict.items(x))
        for key, value in _sample(items, [type(value) for _, value in items]):
            yield f"{path}[{key!r:.20}]" if type(key) in LEAVES else path, value
    else:
        base = next((b for b in (list, tuple, set, frozenset, deque) if issubclass(kind, b)), None)
        if base is not None:
            items = list(base.__iter__(x))  # type: ignore[attr-defined]
            yield from ((f"{path}[...]", value) for value in _sample(items, map(type, items)))
    for name in _HELD.get(kind, ()):
        yield path, getattr(x, name)
    for name, value in list(own_dict(x).items()):
        yield f"{path}.{name}", value
    for cls in kind.__mro__[:-1]:
        for name, member in vars(cls).items():
            if type(member) is types.MemberDescriptorType and cls.__flags__ & HEAP:
                try:
                    yield f"{path}.{name}", member.__get__(x)
                except AttributeError:
                    continue


_HELD: dict[type, tuple[str, ...]] = {
    functools.partial: ("func", "args", "keywords"),
    types.MethodType: ("__func__", "__self__"),
    types.BuiltinFunctionType: ("__self__",),
    CACHED: ("__wrapped__",),
}


def _sample(items: list[Any], kinds: Iterable[type]) -> list[Any]:
    """Return some elements, spread evenly, and one at least of each type. Of plain values, none."""
    if len(items) <= ELEMENTS:
        return items
    first: dict[type, int] = {}
    for k, kind in enumerate(kinds):
        if kind not in first:
            first[kind] = k
    if LEAVES.issuperset(first):
        return []
    return [
        items[k] for k in sorted({*first.values(), *range(0, len(items), len(items) // ELEMENTS)})
    ]


def _functions_of(member: Any) -> Iterator[tuple[FunctionType, str | None]]:
    """Yield the functions in a class's attribute, and what their first argument is."""
    first: str | None = "self"
    if type(member) in (staticmethod, classmethod):
        first, member = (None if type(member) is staticmethod else CLASS), member.__func__
    if type(member) is property:
        yield from (
            (f, "self") for f in (member.fget, member.fset, member.fdel) if type(f) is FunctionType
        )
        return
    if type(member) in (functools.cached_property, functools.partialmethod):
        member = member.func
    if type(member) is not FunctionType:  # a decorator's object
        member = own_dict(member).get("__wrapped__")
    while type(member) is FunctionType:
        yield member, first
        member = vars(member).get("__wrapped__")


def _is_immutable(function: Any) -> bool:
    """Return whether a function's annotation names a result that cannot change."""
    result = getattr(function, "__annotations__", {}).get("return", "Any")
    words = "".join(
        c if c.isalnum() else " "
        for c in getattr(result, "__name__", str(result)) + " " + str(result)
    )
    return _IMMUTABLE.issuperset(words.split())


_IMMUTABLE = {"class", "int", "float", "str", "bool", "bytes", "complex", "None", "NoneType"}
_IMMUTABLE |= {"tuple", "frozenset", "Tuple", "Optional"}


def is_importable(function: Any) -> bool:
    """Return whether a module holds a function under its name. Then no worker gets a copy of it."""
    found: Any = sys.modules.get(function.__module__ or "")
    for part in function.__qualname__.split("."):
        found = vars(found).get(part) if isinstance(found, ModuleType | type) else None
    return getattr(found, "__func__", found) is function


def _is_in_c(kind: type) -> bool:
    """Return whether a class is written in C, or Rust: a module of Python may hold it."""
    own = vars(kind).values()
    return any(type(v) in _IN_C and v.__objclass__ is kind for v in own)


_IN_C = (types.MethodDescriptorType, types.WrapperDescriptorType)


def _is_compiled(module: str) -> bool:
    loaded = sys.modules.get(module)
    file = getattr(loaded, "__file__", None) or ""
    return (
        file.endswith((".so", ".pyd"))
        or type(getattr(loaded, "__loader__", None)).__name__ == "ExtensionFileLoader"
    )


# ---- names ----

MISSING = object()
"""What a name stands for whose module is not imported yet."""


def named(found: Function, path: Path) -> Iterator[Any]:
    """Yield what a global, closed-over or imported name stands for, if it can be known without running code."""
    head, *names = path
    function = found.function
    value: Any
    if head == "global":
        space = function.__globals__
        value = space.get(names[0], getattr(builtins, names[0], None))
    elif head == "free":
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=False))
        try:
            value = cells[names[0]].cell_contents
        except (KeyError, ValueError):  # of a function within; or not bound yet
            return
    elif not names:  # an argument, or the instance
        return
    else:
        try:
            name = (
                resolve_name(names[0], function.__globals__.get("__package__"))
                if names[0][:1] == "."
                else names[0]
            )
        except ImportError:
            return
        value = sys.modules.get(name, MISSING)
    for name in names[1:]:
        above = value
        if value is MISSING or (value := attribute(value, name)) is None:
            if _loads_late(above, name):
                value = MISSING
            break
    if value is not None:
        yield value


def _loads_late(module: Any, name: str) -> bool:
    """Return whether a module finds what `name` stands for at its first use."""
    kind = type(module)
    if not issubclass(kind, ModuleType) or name in own_dict(module):
        return False
    own = kind.__getattribute__ is not ModuleType.__getattribute__ or hasattr(kind, "__getattr__")
    return own or "__getattr__" in own_dict(module)


def attribute(x: Any, name: str) -> Any:
    """Return an attribute without running code, or None."""
    if type(x) is ModuleType:
        return vars(x).get(name, sys.modules.get(f"{x.__name__}.{name}"))
    if isinstance(x, type):
        return next((vars(k)[name] for k in x.__mro__ if name in vars(k)), None)
    own = own_dict(x)
    if name in own:
        return own[name]
    member = next((vars(k)[name] for k in type(x).__mro__ if name in vars(k)), None)
    if type(member) is types.MemberDescriptorType:
        return getattr(x, name, None)
    return member
