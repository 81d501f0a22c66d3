"""The rule of plainly safe code, and the reader that checks it for one function. Nothing runs.

A function is plainly safe if it

- loads, indexes, calls, computes and returns, and stores to local names only;
- changes an object in no way, but for one that it made itself by a literal or a listed constructor;
- names, outside of itself, only modules, functions, classes and constants;
- calls functions of the list, methods of the list, and functions that are plainly safe themselves.

It has no `global`, `del`, `match`, `yield`, `:=`, `import`, lambda, function or class inside, `is` but for
constants, `**` in calls.
What cannot be read is not plainly safe. `plain.toml` has the lists.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path as File
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch

from fastload.safety.source import Path, named, source_of

LISTS: dict[str, dict[str, str]] = tomllib.loads(File(__file__).with_suffix(".toml").read_text())
METHODS = frozenset(" ".join(LISTS["methods"].values()).split())
CHANGING = frozenset(LISTS["changing"]["names"].split())
OBJECTS = tuple(LISTS["objects"]["names"].split())
_PURE_MODULES = frozenset(LISTS["modules"]["names"].split())

_OTHERS: Any = (str, bytes, list, dict, set, frozenset, bytearray, np.ndarray, torch.Tensor)
_BOUND = {name for kind in _OTHERS for name in dir(kind) if callable(getattr(kind, name))}
_BOUND -= {"count", "index", "data", "size", "values"}  # as of pandas and of users
"""Names of methods of containers, arrays and tensors. A bound method that is not called is called by other code."""

WRITING = frozenset({"out", "dst", "inplace", "where", "file", "allow_pickle"})
"""Keywords by which a function writes to an argument, or runs code that a file names."""

_WITH_OUT = {name: int(n) for n, names in LISTS["with_out"].items() for name in names.split()}
"""How many arguments of a method of NumPy's come before one that it writes to."""

_AS_THEIR_PARTS = tuple(getattr(ast, name) for name in LISTS["syntax"]["names"].split())
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_NEW = (ast.Constant, ast.List, ast.Dict, ast.Set, ast.ListComp, ast.SetComp, ast.DictComp)
_OUTSIDE = ("global", "free")


@dataclass(frozen=True)
class Finding:
    """Why code is not plainly thread-safe.

    Args:
        what: a clause that names it, and the code that decides.
        remedy: what would make it plainly safe, or "".
        shared: threads are known to share it, and samples change it.
        changes: samples change something, which may be the worker's own.
    """

    what: str
    remedy: str = ""
    shared: bool = False
    changes: bool = False


def listed(table: str, x: Any) -> bool:
    """Return whether an object is in a table of `plain.toml`. Only imported modules are looked at."""
    return any(x is each for each in _listed(table, len(sys.modules)).get(id(x), ()))


@lru_cache(8)
def _listed(table: str, modules: int) -> dict[int, list[Any]]:
    found: dict[int, list[Any]] = {}
    for module, names in LISTS[table].items():
        held = vars(sys.modules.get(module, ast)) if module in sys.modules else {}
        for x in (held[name] for name in names.split() if name in held):
            found.setdefault(id(x), []).append(x)
    return found


def is_safe_function(x: Any) -> bool:
    """Return whether a library's function or class may be called with any arguments but `out=` and the like."""
    if isinstance(x, type) and issubclass(x, BaseException | np.generic):
        return True
    return listed("functions", x) or getattr(x, "__module__", None) in _PURE_MODULES


def is_numpys(x: Any) -> bool:
    """Return whether a function is NumPy's. Many write to an argument that follows those they read."""
    # Not of a module: it has none, and its `__getattr__` would run.
    of = "" if type(x) is ModuleType else getattr(x, "__module__", None) or ""
    return callable(x) and not isinstance(x, type) and (isinstance(x, np.ufunc) or "numpy" in of)


class Reading:
    """What reading a function found.

    Args:
        function: what is read.
        first: the name of its first argument if that is its own instance, else None.

    `findings` says why it is not plainly safe. `uses` are the paths of outside objects that it names, `calls` the
    paths of attributes of its instance that it calls. `names` are all names of attributes.
    """

    def __init__(self, function: FunctionType, first: str | None) -> None:
        self.findings: list[Finding] = []
        self.uses: set[Path] = set()
        self.calls: set[Path] = set()
        self.names: set[str] = set()
        self._function, self._first = function, first
        self._scopes: list[set[str]] = []
        self._new: set[str] = set()
        self._line = function.__code__.co_firstlineno
        tree = source_of(function)
        if tree is None:
            self._refuse("has no source to read")
            return
        self._bound = _bindings(tree, function)
        self._new = {
            n for n, values in self._bound.items() if values and all(map(self._is_new, values))
        }
        for each in tree.body:
            self._read(each)

    def _refuse(self, does: str, remedy: str = "", **kind: bool) -> None:
        code = self._function.__code__
        file = code.co_filename.rpartition("/")[2]
        name = f"{self._function.__module__}.{self._function.__qualname__}"
        self.findings.append(
            Finding(f"`{name}` ({file}, line {self._line}) {does}", remedy, **kind)
        )

    # ---- statements and expressions ----

    def _read(self, node: ast.AST) -> None:
        if (line := getattr(node, "lineno", None)) is not None:
            self._line = self._function.__code__.co_firstlineno - 2 + line
        if isinstance(node, ast.Name | ast.Attribute):
            self._use(path := self._path(node))
            if is_numpys(named(self._function, path or ())):
                self._refuse("passes on a function of NumPy, which may write to a later argument")
        elif isinstance(node, ast.Call):
            self._call(node)
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.For):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                self._store(target)
            self._parts(node, "targets", "target", "annotation")
        elif isinstance(node, ast.AugAssign):
            if not (isinstance(node.target, ast.Name) and node.target.id in self._new):
                self._changes(node.target, "changes an object in place")
            self._read(node.value)
        elif isinstance(node, ast.withitem):
            call = node.context_expr
            opened = self._path(call.func) if isinstance(call, ast.Call) else None
            if opened is None or not listed("closing", named(self._function, opened)):
                self._refuse("enters a context that is not on the list")
            self._use(opened)
            self._parts(call, "func")
            if node.optional_vars is not None:
                self._store(node.optional_vars)
        elif isinstance(node, _COMPREHENSIONS):
            self._within({n.id for g in node.generators for n in _stored(g.target)}, node)
        elif isinstance(node, ast.comprehension):
            self._parts(node, "target")
            if any(not isinstance(n.ctx, ast.Store) for n in _stored(node.target)):
                self._refuse("assigns to more than local names")
        elif isinstance(node, _AS_THEIR_PARTS):
            if isinstance(node, ast.Compare):
                for op, each in zip(node.ops, node.comparators, strict=True):
                    if isinstance(op, ast.Is | ast.IsNot) and not isinstance(each, ast.Constant):
                        self._refuse("asks by `is` whether two objects are one")
            self._parts(node)
        elif isinstance(node, ast.stmt | ast.expr):
            self._refuse(f"uses `{type(node).__name__.lower()}`, which is not read")

    def _parts(self, node: ast.AST, *but: str) -> None:
        for name, value in ast.iter_fields(node):
            for part in value if isinstance(value, list) else [value]:
                if isinstance(part, ast.AST) and name not in but:
                    self._read(part)

    def _within(self, names: set[str], node: ast.AST) -> None:
        self._scopes.append(names)
        self._parts(node)
        self._scopes.pop()

    # ---- names ----

    def _path(self, node: ast.AST, *, called: bool = False) -> Path | None:
        """Read a chain of names, and return its path if it begins outside of the function or at its instance."""
        if isinstance(node, ast.Name):
            return self._path_of_name(node.id)
        if not isinstance(node, ast.Attribute):
            self._read(node)
            return None
        path, name = self._path(node.value), node.attr
        self.names.add(name)
        if name.startswith("__") and name not in ("__name__", "__len__", "__version__"):
            self._refuse(f"reads `{name}`")
        # Neither a module nor an instance of the user's has these methods.
        known = path == ("self",) or type(named(self._function, path or ())) in (ModuleType, type)
        if not called and not known and name in _BOUND:
            self._refuse(f"passes on the method `{name}`")
        return None if path is None else (*path, name)

    def _path_of_name(self, name: str) -> Path | None:
        if any(name in scope for scope in self._scopes):
            return None
        if name.startswith("__") and not name.endswith("__"):
            self._refuse(f"names `{name}`, which has another name in a class")
        if (values := self._bound.get(name)) is not None:
            return ("self",) if name == self._first and values == [None] else None
        return ("free" if name in self._function.__code__.co_freevars else "global", name)

    def _use(self, path: Path | None) -> None:
        if path is not None and path[0] in _OUTSIDE:
            self.uses.add(path)

    # ---- calls ----

    def _call(self, node: ast.Call) -> None:
        words = {word.arg for word in node.keywords}
        if wrong := words & WRITING:
            self._refuse(f"passes `{wrong.pop()}=`")
        if None in words or any(isinstance(each, ast.Starred) for each in node.args):
            self._refuse("passes arguments by `*` or `**`")
        for each in (*node.args, *(word.value for word in node.keywords)):
            self._read(each)
        line, func = self._line, node.func
        if isinstance(func, ast.Attribute):
            self._call_of_attribute(func, node)
        elif isinstance(func, ast.Name) and (path := self._path_of_name(func.id) or ("self",)) != (
            "self",
        ):
            self._use(path)
            self._of_numpy(named(self._function, path), node)
        else:
            self._refuse("calls an object that is not named")
        self._line = line

    def _call_of_attribute(self, func: ast.Attribute, node: ast.Call) -> None:
        name, receiver = func.attr, func.value
        if isinstance(receiver, ast.Call) and getattr(receiver.func, "id", "") == "super":
            if receiver.args or name != self._function.__name__:
                self._refuse("calls another method by `super`")
            self.names.add(name)
            return
        path = self._path(func, called=True)
        above = None if path is None else named(self._function, path[:-1])
        if path is not None and path[0] in _OUTSIDE and isinstance(above, ModuleType | type):
            self._use(path)
            self._of_numpy(named(self._function, path), node)
            return
        if name in _WITH_OUT and len(node.args) > _WITH_OUT[name]:
            self._refuse(f"passes more than {_WITH_OUT[name]} arguments by position to `{name}`")
        own = isinstance(receiver, ast.Name) and receiver.id in self._new
        if path is not None and path[0] == "self" and len(path) > 1:
            self.calls.add(path)
        elif own and name in CHANGING | METHODS:
            return
        elif path is not None:
            self._use(path[:-1])
            if name not in METHODS:
                self._changes(receiver, f"calls the method `{name}`")
        elif name not in METHODS:
            self._refuse(f"calls the method `{name}`, which is not on the list")

    def _of_numpy(self, called: Any, node: ast.Call) -> None:
        """Refuse a call of NumPy whose later arguments may be arrays to write to."""
        most = called.nin if isinstance(called, np.ufunc) else 2
        if is_numpys(called) and len(node.args) > most:
            self._refuse(f"passes more than {most} arguments by position to NumPy")

    # ---- changes ----

    def _store(self, target: ast.AST) -> None:
        match target:
            case ast.Name():
                pass
            case ast.Tuple() | ast.List():
                for each in target.elts:
                    self._store(each)
            case ast.Starred():
                self._store(target.value)
            case ast.Subscript(value=ast.Name(id=name)) if name in self._new:
                self._read(target.slice)
            case _:
                self._changes(target, "assigns to an element or attribute of what it did not make")

    def _changes(self, target: ast.AST, does: str) -> None:
        """Refuse a change. If a module or class holds the object by name, threads are known to share it."""
        of = target
        while isinstance(of, ast.Attribute | ast.Subscript):
            of = of.value
        path = self._path_of_name(of.id) if isinstance(of, ast.Name) else None
        if path is not None and path[0] == "global":
            does = f"changes `{self._function.__module__}.{path[1]}`, which all threads share"
            self._refuse(does, "keep it in the dataset", shared=True)
        else:
            self._refuse(does, "change a copy that the function makes", changes=True)

    def _is_new(self, value: Any) -> bool:
        if isinstance(value, ast.Call) and {w.arg for w in value.keywords} <= {"dtype", "device"}:
            named_by = isinstance(value.func, ast.Name | ast.Attribute)
            path = self._path(value.func) if named_by else None
            return listed("constructors", named(self._function, path or ()))
        return isinstance(value, _NEW)


def _stored(target: ast.AST) -> Iterator[ast.Name]:
    return (node for node in ast.walk(target) if isinstance(node, ast.Name))


def _bindings(tree: ast.FunctionDef, function: FunctionType) -> dict[str, list[Any]]:
    """Return what each local name is bound to: an expression, or None for anything else."""
    code = function.__code__
    count = code.co_argcount + code.co_kwonlyargcount
    count += bool(code.co_flags & 4) + bool(code.co_flags & 8)
    found: dict[str, list[Any]] = {name: [None] for name in code.co_varnames[:count]}
    values: dict[int, Any] = {}  # of what is assigned to a name alone
    todo: list[ast.AST] = list(tree.body)
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Assign):
            values.update((id(target), node.value) for target in node.targets)
        elif isinstance(node, ast.AugAssign):
            values[id(node.target)] = ...  # it binds what it changes, or something new
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound, value = found.setdefault(node.id, []), values.get(id(node))
            bound += () if value is ... else (value,)
        elif isinstance(node, ast.ExceptHandler) and node.name:
            found.setdefault(node.name, []).append(None)
        if not isinstance(node, _COMPREHENSIONS):
            todo += ast.iter_child_nodes(node)
    return found
