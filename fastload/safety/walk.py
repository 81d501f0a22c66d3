"""What samples can reach: the objects of a dataset, the functions that these have, and what those name."""

from __future__ import annotations

import abc
import enum
import functools
import io
import random
import types
from collections import Counter, OrderedDict, deque
from types import FunctionType, MethodType, ModuleType
from typing import Any, Generic, Protocol

import numpy as np
import torch
from torch.utils.data import Dataset

from fastload.random import numpy_random, python_random
from fastload.safety import objects
from fastload.safety.kinds import elements, is_flat
from fastload.safety.libraries import is_allowed, unsafe_names
from fastload.safety.modules import is_importable, is_users_module
from fastload.safety.objects import LEAVES, attributes, is_in_c, own_dict
from fastload.safety.plain import (
    LISTS,
    METHODS,
    OBJECTS,
    WRITING,
    Finding,
    Reading,
    is_numpys,
    is_safe_function,
)
from fastload.safety.source import MISSING, Path, attribute, held_by, named

OBJECTS_AT_MOST, CODE_AT_MOST = 2_000, 10_000
"""The walk looks at no more objects, and reads no more bytes of bytecode: some 300 lines, which take 15 to 40 ms."""

_CONTAINERS: Any = {list, tuple, dict, set, frozenset, deque, OrderedDict, Counter}
_ARRAYS = {np.ndarray, np.memmap, torch.Tensor, torch.nn.Parameter}
_BASES = {object, Dataset, torch.utils.data.IterableDataset, Generic, Protocol, abc.ABC}
_BASES |= {torch.nn.Module, enum.Enum}
_METACLASSES = {type, abc.ABCMeta, enum.EnumMeta, type(Protocol)}

_NOT_CALLED = frozenset(LISTS["not_called"]["names"].split())
_METHODS = {FunctionType, classmethod, staticmethod, property}


class Walk:
    """A walk over all that samples can reach.

    Args:
        roots: the dataset and functions, by name.
        found: the findings so far.
        whole: go on after the first finding, up to the limits.
        routed: whether threads have global generators of their own, for all of Python's and NumPy's functions.
    """

    def __init__(
        self, roots: dict[str, Any], found: list[Finding], *, whole: bool, routed: bool
    ) -> None:
        self.findings = found
        self.cuda = False
        self._whole, self._routed = whole, routed
        self._code = 0
        # They stay alive, so that their ids stay valid.
        self._seen: dict[tuple[int, bool], Any] = {}
        self._read: set[int] = set()
        self._names = {"__getitem__", "__getitems__", "__len__", "__call__", "forward"}
        self._names |= {"fill_rows", "will_read"}
        self._methods: dict[str, list[Any]] = {}  # not read yet
        self._instances: dict[type, list[Any]] = {}
        self._calls: list[tuple[type, Path, str]] = []
        self._unsafe = unsafe_names()
        self._todo: deque[tuple[Any, str, bool]] = deque()
        self._todo += [(x, name, False) for name, x in roots.items()]
        while self._todo and not self._ends():
            self._visit(*self._todo.popleft())
        for owner, path, where in self._calls:
            if not self._ends() and not self._is_known_call(owner, path):
                self._find(f"{where} calls `{'.'.join(path)}`, which is not known")

    def _ends(self) -> bool:
        over = self._code > CODE_AT_MOST or len(self._seen) > OBJECTS_AT_MOST
        if over and not self.findings:
            self._find("the dataset reaches more code and objects than fastload looks at")
        # On, to find CUDA tensors, if CUDA is in use.
        return over or (self._decided and not torch.cuda.is_initialized())  # type: ignore[no-untyped-call]

    @property
    def _decided(self) -> bool:
        return bool(self.findings) and not self._whole

    def _find(self, what: str, remedy: str = "", **kind: bool) -> None:
        self.findings.append(Finding(what, remedy, **kind))

    # ---- objects ----

    def _visit(self, x: Any, path: str, held: bool) -> None:
        """Look at an object.

        Args:
            held: a module, a class or a function's default holds it, so that no worker has its own.
        """
        kind = type(x)
        if kind in LEAVES or issubclass(kind, objects.CONSTANTS) or (id(x), held) in self._seen:
            return
        self._seen[id(x), held] = x
        if name := self._unsafe.get(id(x)):
            what = f"{path} is `{name}`, which is process-wide state"
            self._find(what, "leave it out of samples", shared=True)
        elif kind is FunctionType:
            self._function(x, None, None, path, held)
        elif kind is MethodType:
            self._todo.append((x.__self__, path, held))
            self._function(x.__func__, type(x.__self__), "self", path, held)
        elif kind is functools.partial:
            if wrong := x.keywords.keys() & WRITING:
                self._find(f"{path} passes `{wrong.pop()}=`")
            self._todo += [(part, path, held) for part in (x.func, *x.args, *x.keywords.values())]
        elif kind is types.BuiltinFunctionType and _is_global(x.__self__):
            self._past_routing(path)
        elif issubclass(kind, type) and is_allowed(x.__module__, x):
            return
        elif issubclass(kind, objects.GENERATORS):
            self._generator(x, path, held)
        elif kind in _CONTAINERS:
            self._held(x, path, held and kind not in (tuple, frozenset))
            self._parts(x, path, held)
        elif kind in _ARRAYS:
            self._array(x, path, held)
        elif objects.is_one_of(kind, objects.REFUSED):
            self._find(f"{path} is an open {kind.__qualname__}", changes=True)
        elif (allowed := is_allowed(kind.__module__, kind)) or _is_listed(kind):
            if not allowed and own_dict(x).get("inplace", False) is not False:
                self._find(f"{path} works in place")
            self._todo += [(part, way, held) for way, part in _attributes(x, path)]
        elif is_users_module(kind.__module__) and not is_in_c(kind):
            self._instance(x, path, held)
        elif not is_safe_function(x) or is_numpys(x):
            self._other(x, path, held)

    def _other(self, x: Any, path: str, held: bool) -> None:
        kind = type(x)
        what = f", a {kind.__module__}.{kind.__qualname__}".replace(" builtins.", " ")
        if kind in (types.BuiltinFunctionType, type(np.add), ModuleType):
            what = "" if path.endswith(x.__name__) else f", `{x.__name__}`"
        state = issubclass(kind, io.IOBase) or hasattr(kind, "__next__")
        self._find(
            f"samples use `{path}`{what}, which is not on the list",
            shared=held and state,
            changes=state,
        )

    def _held(self, x: Any, path: str, held: bool) -> None:
        if held:
            name = type(x).__qualname__
            self._find(f"samples use `{path}` ({name}), which a module or class holds")

    def _past_routing(self, path: str) -> None:
        self._find(f"{path} draws from a global generator that threads would share", shared=True)

    def _generator(self, x: Any, path: str, held: bool) -> None:
        if objects.is_global_generator(x):
            if type(x) is np.random.Generator or not self._routed:
                self._past_routing(path)
        elif held:
            what = f"`{path}` is a random generator that all threads would share"
            remedy = "make it an attribute of the dataset, of which each worker gets its own copy"
            self._find(what, remedy, shared=True)

    def _array(self, x: Any, path: str, held: bool) -> None:
        if issubclass(type(x), torch.Tensor):
            self.cuda |= x.is_cuda
            if x.requires_grad:  # a batch of it would be part of the loop's graph
                self._find(f"{path} is a tensor that requires gradients")
        elif x.dtype.hasobject:
            self._find(f"{path} is an array of objects")
        self._held(x, path, held)

    def _parts(self, x: Any, path: str, held: bool) -> None:
        if is_flat(x, type(x)):
            return
        some: dict[int, Any] = {}
        for each in elements(x, type(x)):
            if type(each) not in LEAVES:
                some[id(each)] = each
                if len(some) > OBJECTS_AT_MOST:  # the walk ends there
                    break
        self._todo += [(each, f"{path}[...]", held) for each in some.values()]

    def _instance(self, x: Any, path: str, held: bool) -> None:
        kind = type(x)
        self._held(x, path, held)
        self._instances.setdefault(kind, []).append(x)
        self._class(kind, f"{kind.__module__}.{kind.__qualname__}")
        self._todo += [(part, way, held) for way, part in _attributes(x, path)]

    # ---- classes ----

    def _class(self, cls: type, path: str) -> None:
        """Look at a class of the user's, whose instances samples use."""
        if id(cls) in self._read or objects.PER_WORKER in vars(cls):
            return
        self._read.add(id(cls))
        theirs = [k for k in cls.__mro__ if not is_users_module(k.__module__)]
        known = all(k in _BASES or _is_listed(k) or issubclass(k, BaseException) for k in theirs)
        if type(cls) not in _METACLASSES or not known or is_in_c(cls):
            self._find(f"the class `{path}` has a base or metaclass that is not on the list")
        called = {name for k in theirs for name in vars(k)}
        for owner in (k for k in cls.__mro__ if k not in theirs):
            for name, member in list(vars(owner).items()):
                self._member(owner, name, member, called=name in called)

    def _member(self, cls: type, name: str, member: Any, *, called: bool) -> None:
        """Look at an attribute of a class, also if a nearer class overrides it: that may call it by `super`."""
        special = name.startswith("__") and name.endswith("__")
        path = f"{cls.__module__}.{cls.__qualname__}.{name}"
        if name in ("__getattribute__", "__del__", "__new__", "__getattr__"):
            self._find(f"`{path}` is not read")
        elif name in _NOT_CALLED:
            return
        elif type(member) in _METHODS:
            of = member.fget if type(member) is property else getattr(member, "__func__", member)
            if type(of) is not FunctionType:
                return
            if of.__code__.co_filename == "<string>" and hasattr(cls, "__dataclass_fields__"):
                return  # of `dataclasses`
            first = None if type(member) is staticmethod else "self"
            found = of, cls, first, of.__qualname__, True
            if name in self._names or special or called:
                self._function(*found)
            else:
                self._methods.setdefault(name, []).append(found)
        elif not special and not name.startswith("_abc_"):
            self._todo.append((member, path, True))

    # ---- functions ----

    def _function(
        self, function: FunctionType, owner: type | None, first: str | None, path: str, held: bool
    ) -> None:
        module = function.__globals__.get("__name__")
        if is_allowed(module, function) or id(function) in self._read or self._decided:
            return
        if not is_users_module(module):
            if not is_safe_function(function) and str(module).partition(".")[0] != "fastload":
                self._find(f"samples use `{path}`, which is not on the list")
            return
        self._read.add(id(function))
        self._code += len(function.__code__.co_code)
        if self._ends():
            return
        names = function.__code__.co_varnames
        reading = Reading(function, names[0] if first and names else None)
        self.findings += reading.findings
        for name in reading.names - self._names:
            for found in self._methods.pop(name, []):
                self._function(*found)
        self._names |= reading.names
        where = f"`{function.__module__}.{function.__qualname__}`"
        self._calls += [(owner or object, way, where) for way in reading.calls]
        shared = held or is_importable(function)
        for way in reading.uses:
            self._use(function, way, where, shared)
        defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        self._todo += [(x, f"a default of {where}", shared) for x in defaults]
        self._todo += [(x, f"{where}.{name}", shared) for name, x in vars(function).items()]

    def _use(self, function: FunctionType, path: Path, where: str, shared: bool) -> None:
        """Look at the first object on a path that is neither a module nor a class, or at its end."""
        value, above = named(function, path[:2]), None
        k = 2
        while k < len(path) and issubclass(type(value), ModuleType | type):
            above, value = value, attribute(value, path[k])
            k += 1
        name = ".".join(path[1:k])
        if value is MISSING:
            self._find(f"{where} names `{name}`, which is not known before it runs")
        elif above is random or above is np.random:  # by the name of the module: these are routed
            if path[k - 1] not in LISTS["functions"][above.__name__].split():
                self._find(f"{where} uses `{name}`, which is not on the list")
            elif not self._routed:
                self._past_routing(f"{where}: `{name}`")
        elif type(value) is ModuleType:
            self._find(f"{where} passes on the module `{name}`")
        elif not is_numpys(value) or not is_safe_function(value):
            self._todo.append((value, name, path[0] != "free" or shared))

    def _is_known_call(self, owner: type, path: Path) -> bool:
        """Return whether what a method calls on its instance was looked at: a method of the user, or an attribute."""
        if path[-1] in METHODS:
            return True
        kinds = [k for k in self._instances if issubclass(k, owner)] or [owner]
        found = [x for k in kinds for x in self._instances.get(k) or [k]]
        for step in path[1:-1]:
            found = [attribute(x, step) for x in found]
        return all(_is_method_or_part(x, path[-1]) for x in found)


def _is_method_or_part(x: Any, name: str) -> bool:
    if x is MISSING or type(x) in LEAVES or type(x) in _CONTAINERS or type(x) in _ARRAYS:
        return False
    value = attribute(x, name)
    if type(value) in (classmethod, staticmethod):
        value = value.__func__
    if type(value) is FunctionType and not isinstance(x, type) and name not in own_dict(x):
        return is_users_module(value.__globals__.get("__name__")) or _is_listed(type(x))
    held = type(value) is FunctionType or any(name in each for each in held_by(x))
    return value is not MISSING and held


def _attributes(x: Any, path: str) -> list[tuple[str, Any]]:
    """Return the attributes of an instance; of a class that declares itself thread-safe, those of each worker."""
    own = vars(type(x)).get(objects.PER_WORKER)
    found = list(attributes(x, objects.slots_of(type(x))))
    return [(f"{path}.{name}", value) for name, value in found if own is None or name in own]


def _is_listed(kind: type) -> bool:
    """Return whether samples may use instances of a library's class, none of whose methods is replaced by a user's."""
    name = f"{kind.__module__}.{kind.__qualname__}."
    if is_users_module(kind.__module__) or not any(name.startswith(f"{each}.") for each in OBJECTS):
        return False
    functions = (f for f in vars(kind).values() if type(f) is FunctionType)
    return not any(is_users_module(f.__globals__.get("__name__")) for f in functions)


def _is_global(x: Any) -> bool:
    return any(x is each for each in (python_random.GLOBAL, *numpy_random.GLOBAL))
