"""What samples can reach: objects of the dataset's graph, functions, and module-level objects that their code names."""

from __future__ import annotations

import io
import sys
import threading
import types
from collections import deque
from collections.abc import Iterator
from importlib.util import resolve_name
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch

from fastload.isolation import rules
from fastload.isolation.rules import own_dict
from fastload.random import numpy_random, python_random
from fastload.verdicts import libraries, objects
from fastload.verdicts.findings import Finding, finding
from fastload.verdicts.libraries import library
from fastload.verdicts.objects import Function, Instance, named
from fastload.verdicts.values import CHANGING, CLASS, Path

CODE, AFTER_FINDING, OF_WHOLE = 10_000, 3_000, 20_000
"""The search reads no more bytes of bytecode: if nothing was found yet; if something unknown was, since only a proven
fault would tell more; and if it goes on after a fault. 10,000 bytes are some 300 lines, and
take 15 to 40 ms."""

OBJECTS, INSTANCES = 10_000, 16
"""The search looks at no more objects, and instances of a class."""


class Reach:
    """The search. `findings` has what decides by its mere presence; what the functions change, `judge` looks at.

    `generators` are the random generators that modules and classes hold, each with a unique path.

    Args:
        roots: the dataset, `collate_fn` and `worker_init_fn`, by name.
        whole: whether the search goes on after a fault.
        shared: whether all threads share the roots.
    """

    def __init__(self, roots: dict[str, Any], *, whole: bool = False, shared: bool = False) -> None:
        self.findings: list[Finding] = []
        self.functions: list[Function] = []
        self.generators: list[tuple[str, Any]] = []
        self.cuda = False
        self.in_place: list[str] = []  # objects of libraries that change what they are called with
        self.instances: dict[type, list[Instance]] = {}
        columns = "unsafe", "unreadable", "single", "keeps", "constant"
        self._column = {name: libraries.objects_in(name) for name in columns}
        # It keeps the objects alive, so that their ids stay valid.
        self._seen: dict[tuple[int, bool], Instance] = {}
        self._asked: set[str] = set()  # the libraries whose settings were looked at
        self._classes: set[tuple[type, bool]] = set()
        self._read: set[int] = set()
        self._whole = whole
        self._code = 0  # the bytes of bytecode that were read, or would have gone over the limit
        self._pending: dict[str, list[Function]] = {}  # methods whose names no code has read yet
        self._names: set[str] = {"state_dict", "load_state_dict", "fill_rows", "forward"}
        self._todo: deque[Instance | Function] = deque(
            Instance(x, path, stays=shared) for path, x in roots.items()
        )
        while not self._ends() and self._todo:
            each = self._todo.popleft()
            (self._function if isinstance(each, Function) else self._object)(each)  # type: ignore[arg-type]

    def _ends(self) -> bool:
        """Return whether the search ends, although there may be more to visit."""
        limit = OF_WHOLE if self._whole else AFTER_FINDING if self.findings else CODE
        over = self._code > limit or len(self._seen) > OBJECTS
        if over and not self.findings:
            self._find("the search ends")
        return over or (not self._whole and any(found.proven for found in self.findings))

    def _find(self, key: str, **names: Any) -> None:
        if (found := finding(key, **names)) not in self.findings:
            self.findings.append(found)

    @property
    def at_top(self) -> list[Instance]:
        """The objects that modules, classes and functions hold."""
        return [found for (_, stays), found in self._seen.items() if stays]

    def held_twice(self) -> Iterator[tuple[Instance, Instance]]:
        """Yield the objects that are in the dataset's graph and that code names, too, as found at both places."""
        for found in self.at_top:
            if held := self._seen.get((id(found.x), False)):
                yield held, found

    # ---- objects ----

    def _object(self, found: Instance) -> None:
        x, kind = found.x, type(found.x)
        if kind in objects.LEAVES or (id(x), found.stays) in self._seen:
            return
        if issubclass(kind, rules.GENERATORS) and rules.is_global_generator(x):
            self._past_routing(x, found.path)
            return
        self._seen[id(x), found.stays] = found
        if self._excepted(x, found.path):
            return
        self.cuda |= issubclass(kind, torch.Tensor) and x.is_cuda
        if kind is FunctionType:
            self._push(Function(x, None, None, found.stays))
        elif issubclass(kind, type):
            self._class(x, made=True)
        elif kind is objects.CACHED:
            self._cached(x, found.path)
        elif kind is types.BuiltinFunctionType:
            self._builtin(found)
        elif kind is types.MethodType:
            self._method(found)
        elif not issubclass(kind, ModuleType | np.ndarray | torch.Tensor):
            self._instance(found)
        constant = id(kind) in self._column["constant"]
        for path, part in () if constant else objects.parts_of(x, found.path):
            if type(part) not in objects.LEAVES:
                self._past_routing(part, path)
                self._todo.append(Instance(part, path, found.stays))

    def _past_routing(self, x: Any, path: str) -> None:
        """Note what draws from a global generator in C. Of such functions, only names in modules are routed."""
        if type(x) is types.BuiltinFunctionType and x.__self__ is python_random.GLOBAL:
            self._find("past the routing", path=path, what=f"the function `random.{x.__name__}`")
        elif type(x) is np.random.Generator and x.bit_generator is numpy_random.GLOBAL[0]:
            self._find("past the routing", path=path, what="a Generator of NumPy's global state")

    def _excepted(self, x: Any, user: str) -> bool:
        """Return whether the list excepts an object by its name, and note that if so. `user` is what uses it."""
        if name := self._column["unsafe"].get(id(x)):
            self._find("unsafe", user=user, name=name)
        elif name := self._column["unreadable"].get(id(x)):
            self._find("unreadable", user=user, name=name)
        return name is not None

    def _instance(self, found: Instance) -> None:
        x, kind = found.x, type(found.x)
        if found.stays:
            self._of_a_module(found)
        for base in kind.__mro__[:-1]:
            one = self._column["single"].get(id(base))
            if base is threading.local and objects.is_empty(base.__getattribute__(x, "__dict__")):
                one = None  # each thread begins with nothing in it, as a process does
            if one is not None:
                self._find("for one thread", path=found.path, kind=one)
            if library(base.__module__) is None:
                known = self.instances.setdefault(base, [])
                if len(known) < INSTANCES:
                    known.append(found)
        if own_dict(x).get("inplace") is True and library(kind.__module__):
            self.in_place.append(found.path)
        if issubclass(kind, types.GeneratorType):
            self._find("running generator", path=found.path)
        self._class(kind)
        module = kind.__module__
        compiled = library(module) is None and objects.is_in_c(kind)
        if compiled and type(getattr(x, "__module__", None)) is str:
            module = x.__module__  # a function of Cython or Boost
        self._entry(module, found.path, compiled=compiled)
        numbas = own_dict(x) if kind.__module__.startswith("numba.") else {}
        if (numbas.get("targetoptions") or {}).get("parallel"):
            self._find("parallel code", path=found.path)

    def _of_a_module(self, found: Instance) -> None:
        """Look at an object that all threads would share, although a worker process has its own."""
        x, kind = found.x, type(found.x)
        what, proven = "", True
        if issubclass(kind, rules.GENERATORS) and not rules.shared_class(type(x)):
            same = sum(path.partition(" (")[0] == found.path for path, _ in self.generators)
            path = f"{found.path} ({same + 1})" if same else found.path
            self.generators.append((path, x))
            what = "a random generator"
        elif issubclass(kind, io.IOBase):
            standard = x in (sys.stdin, sys.stdout, sys.stderr)
            what = "" if x.closed or standard else "an open file"
        elif hasattr(kind, "__next__"):
            what = "an iterator"
        elif rules.refused_class(kind):
            what = f"an open {kind.__qualname__}"
        elif self._column["keeps"].keys() & set(map(id, kind.__mro__)) or objects.hides_state(x):
            what, proven = f"a {kind.__qualname__}, which may keep what a call sets, and", False
        if what:
            self._find("state of a module", path=found.path, kind=what, proven=proven)

    def _entry(self, module: str, path: str, *, compiled: bool = False) -> None:
        """Look at the entry for a module that samples use. `compiled`: that is, at an object in machine code."""
        top, entry = module.partition(".")[0], library(module)
        if entry is None:
            if compiled or objects.is_compiled(module):
                self._find("compiled library", path=path, library=top)
        elif entry.holds_gil:
            self._find("holds the GIL", path=path, library=top, why=entry.holds_gil)
        elif not entry.threads:
            self._find("not for threads", path=path, library=top)
        elif top not in self._asked:
            self._asked.add(top)
            for name in filter(libraries.differs_in_a_new_thread, entry.settings.split()):
                name = name.partition(":")[0]
                self._find("settings of a thread", path=path, library=top, name=name)

    def _cached(self, x: Any, path: str) -> None:
        wrapped = x.__wrapped__
        known = library(getattr(wrapped, "__module__", None)) is not None
        if not known and not objects.is_immutable(wrapped):
            self._find("cache", path=path)

    def _builtin(self, found: Instance) -> None:
        x, kind = found.x, type(found.x.__self__)
        if found.stays and x.__name__ in CHANGING and not issubclass(kind, objects.NO_OBJECT):
            self._find("changing method", path=found.path)
        else:
            self._entry(x.__module__ or kind.__module__, f"`{found.path}`", compiled=True)

    def _method(self, found: Instance) -> None:
        of, function = found.x.__self__, found.x.__func__
        if type(function) is FunctionType:
            owner, first = (of, CLASS) if issubclass(type(of), type) else (type(of), "self")
            self._push(Function(function, owner, first, found.stays))

    # ---- code ----

    def _class(self, cls: type, *, made: bool = False) -> None:
        """Queue the methods of a class that samples may call. `made`: they may create instances, too."""
        entry = library(cls.__module__)
        if entry is not None and made:
            self._entry(cls.__module__, f"`{cls.__qualname__}`")
        if (cls, made) in self._classes or rules.PER_WORKER in vars(cls):
            return  # it was read, or written for threads
        self._classes.add((cls, made))
        module = vars(type(cls)).get("__module__")
        if type(module) is str and library(module) is None:  # a metaclass of the user
            self._instance(Instance(cls, f"{cls.__module__}.{cls.__qualname__}", stays=True))
        listed = [base for base in cls.__mro__[:-1] if library(base.__module__) is not None]
        # A library may call what overrides its methods.
        called = {name for base in listed for name in vars(base)}
        overridden: set[str] = set()
        for base in cls.__mro__[:-1]:
            if base in listed:
                continue
            in_c = entry is None and (made or base is not cls) and objects.is_in_c(base)
            self._entry(base.__module__, f"`{base.__qualname__}`", compiled=in_c)
            for name, member in list(vars(base).items()):
                self._member(
                    base, name, member, made=made, called=name in called, hidden=name in overridden
                )
            overridden |= vars(base).keys()

    def _member(
        self, cls: type, name: str, member: Any, *, made: bool, called: bool, hidden: bool
    ) -> None:
        special = name.startswith("__") and name.endswith("__")
        if name in objects.AT_IMPORT or (name in objects.CREATING and not made):
            return
        key = f"super.{name}" if hidden else name
        for function, first in objects.functions_of(member):
            if name in objects.OF_A_CLASS:
                first = CLASS
            if function.__code__.co_filename == "<string>" and hasattr(cls, "__dataclass_fields__"):
                continue  # of `dataclasses`
            method = Function(function, cls, first, held=True)
            if (not hidden and (special or called)) or key in self._names:
                self._push(method)
            else:
                self._pending.setdefault(key, []).append(method)
        called_in_c = member.__func__ if type(member) is staticmethod else member
        self._past_routing(called_in_c, f"{cls.__module__}.{cls.__qualname__}.{name}")
        holds = bool(own_dict(member)) and type(member) not in objects.METHODS
        plain = (holds or not hasattr(type(member), "__get__")) and not special
        if plain or type(member) is objects.CACHED:
            path = f"{cls.__module__}.{cls.__qualname__}.{name}"
            self._todo.append(Instance(member, path, stays=True))

    def _push(self, found: Function) -> None:
        module = found.function.__globals__.get("__name__")
        if library(module) is None:
            self._todo.append(found)
        else:
            self._entry(str(module), f"`{found.function.__qualname__}`")

    def _function(self, found: Function) -> None:
        key = id(found.function)
        if key in self._read:
            return
        self._read.add(key)
        self._code += len(found.function.__code__.co_code)
        if self._ends():
            return
        self.functions.append(found)
        effects = found.effects
        if effects.opaque:
            self._find("without source", function=found)
        new = effects.names - self._names
        self._names |= new
        for name in list(self._pending) if effects.dynamic else sorted(new & self._pending.keys()):
            for method in self._pending.pop(name):
                self._push(method)
        for path, line in effects.uses.items():
            self._use(found, path, line)
        for path, line in effects.computed.items():
            if type(named(found, path)) is ModuleType:
                self._find("name computed", user=found.at(line), name=".".join(path[1:]))

    def _use(self, found: Function, path: Path, line: int) -> None:
        value = named(found, path)
        if value is None or self._excepted(value, found.at(line)):
            return
        if value is objects.MISSING:
            self._not_imported(found, path, line)
        elif libraries.is_setting(value):
            self._find("setting", user=found.at(line), name=path[-1])
        elif type(value) is ModuleType:
            self._entry(value.__name__, f"`{'.'.join(path[1:])}`")
        else:
            name, stays = found.dotted(path[1:], path[0]), path[0] != "free" or found.stays
            of_module = (
                path[0] == "global"
                if len(path) == 2
                else type(named(found, path[:-1])) is ModuleType
            )
            if not of_module:
                self._past_routing(value, name)
            self._todo.append(Instance(value, name, stays))

    def _not_imported(self, found: Function, path: Path, line: int) -> None:
        if path[0] == "import":
            name = resolve_name(".".join(path[1:]), found.function.__globals__.get("__package__"))
        else:  # of a module that imports its parts at their first use
            top = own_dict(named(found, path[:2]))
            name = ".".join((top.get("__name__", path[1]), *path[2:]))
        entry = library(name)
        if entry is None:
            self._find("not loaded", user=found.at(line), name=name)
        elif name in entry.unsafe.split():
            self._find("unsafe, and not loaded", user=found.at(line), name=name)
        else:
            self._entry(name, f"`{name}`")
