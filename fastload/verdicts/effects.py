"""What a piece of Python code names, and which objects it changes, read from its source. Nothing runs.

A value in the code has origins: the paths to the objects that it may be. A path begins with

- ("self",), the method's own instance, or ("default", name), an argument's default;
- ("global", name), ("free", name), ("import", module): a global variable, a closure's variable, an imported module;
- ("any",): an object from elsewhere, such as an argument;
- ("call", ...): what the object at the rest of the path returns;
- ("passed", ...): an object that was passed to a call, which may have returned it, or a part of it.

Further steps are names of attributes, ELEMENT, SLICE, CLASS (its class) and COPY (a shallow copy of it). Any branch may
run, or none, in the order of the lines. Loops are read twice.
"""

from __future__ import annotations

import ast
import dis
import inspect
import linecache
import re
import textwrap
import tokenize
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from types import CodeType, FunctionType
from typing import Any

Path = tuple[str, ...]

ELEMENT, SLICE, CLASS, COPY = "[]", "[:]", "(class)", "(copy)"
CALL, PASSED, ANY = "call", "passed", ("any",)

_LONGEST = 7
"""A longer path ends here: what lies below counts as the object at its end."""


@dataclass(frozen=True, slots=True)
class Value:
    """What a value may be, and what it may hold: for a new list, what its elements may be."""

    own: frozenset[Path] = frozenset()
    inner: frozenset[Path] = frozenset()

    def step(self, name: str) -> Value:
        """Return an attribute or element of the value."""
        return Value(frozenset(_longer(path, name) for path in self.own) | self.inner, self.inner)

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


_known: weakref.WeakKeyDictionary[CodeType, Effects] = weakref.WeakKeyDictionary()


def effects_of(function: FunctionType, first: str | None) -> Effects:
    """Return what a function does. `first` says what its first argument is: "self", CLASS, or None for any object.

    Results are kept by code object: a method has one kind of first argument.
    """
    code = function.__code__
    if code not in _known:
        _known[code] = _read(function, first)
    return _known[code]


def _read(function: FunctionType, first: str | None) -> Effects:
    code = function.__code__
    node = _source_of(code, function.__globals__)
    if node is None:
        return _without_source(code)
    reader = _Reader(code)
    arguments = list(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])
    for name in arguments:
        reader.env[name] = Value(frozenset({ANY, ("default", name)}), frozenset({ANY}))
    variadic = bool(code.co_flags & inspect.CO_VARARGS) + bool(
        code.co_flags & inspect.CO_VARKEYWORDS
    )
    for name in code.co_varnames[len(arguments) : len(arguments) + variadic]:
        reader.env[name] = Value(inner=frozenset({ANY}))
    if first is not None and arguments:
        path: Path = ("self",) if first == "self" else ("self", CLASS)
        reader.env[arguments[0]] = Value(frozenset({path}))
    if isinstance(node, ast.expr):
        reader.escape(reader.value(node))
    else:
        reader.block(node.body)
    return reader.effects


def _without_source(code: CodeType) -> Effects:
    effects = Effects()
    fills = code.co_name in ("__init__", "__post_init__")  # a data class: its own new instance
    for each in _codes(code):
        done = set(each.co_code[::2])
        effects.opaque |= bool(done & ({*_STORES} - ({_STORE_ATTR} if fills else set())))
        effects.opaque |= not fills and not CHANGING.isdisjoint(each.co_names)
        effects.names |= set(each.co_names)
        effects.uses.update((("global", name), each.co_firstlineno) for name in each.co_names)
    return effects


_STORE_ATTR = dis.opmap["STORE_ATTR"]
_STORES = (
    _STORE_ATTR,
    *(dis.opmap[name] for name in ("STORE_SUBSCR", "STORE_GLOBAL", "IMPORT_NAME")),
)


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _source_of(code: CodeType, space: dict[str, Any]) -> Any:
    """Return the syntax tree of a function, or of a lambda's expression, or None if the source is not there."""
    lines = linecache.getlines(code.co_filename, space)
    if not lines:
        return None
    if code.co_name == "<lambda>":
        return _lambda_source(code, lines)
    spans = [end for each in _codes(code) for _, end, *_ in each.co_positions() if end]
    first, last = code.co_firstlineno - 1, max(spans, default=code.co_firstlineno)
    for text in (lines[first:last], None):
        try:
            block = inspect.getblock(lines[first:]) if text is None else text
            (node,) = ast.parse("\n" * first + textwrap.dedent("".join(block))).body
        except (SyntaxError, ValueError, tokenize.TokenError):  # a file that has changed
            continue
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == code.co_name:
            return node
    return None


def _lambda_source(code: CodeType, lines: list[str]) -> ast.expr | None:
    spans = [span for span in code.co_positions() if None not in span and span[0] != span[2]]
    if not spans:
        return None
    # The instruction that returns has the place of the whole expression.
    begin, end, left, right = max(spans, key=lambda s: (s[1] - s[0], s[3] - s[2]))  # type: ignore[operator]
    text = [line.encode() for line in lines[begin - 1 : end]]  # type: ignore[operator]
    text[-1] = text[-1][:right]
    text[0] = text[0][left:]
    try:
        source = b"\n" * (begin - 1) + b"(" + b"".join(text) + b")"  # type: ignore[operator]
        return ast.parse(source, mode="eval").body
    except SyntaxError:
        return None


# ---- reading a syntax tree ----


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


CHANGING = _words("""
    append extend insert pop popitem remove clear sort reverse update setdefault add discard fill itemset put partition
    setflags resize appendleft popleft extendleft rotate move_to_end subtract symmetric_difference_update
    difference_update intersection_update send __next__ __setitem__ __delitem__ __setattr__ __iadd__
""")
"""Methods that change their object."""

SETTER = re.compile(
    "(seek|set|add|put|reset|remove|register|enable|disable|feed|fit|partial_fit)(_.*|[A-Z].*)?$"
    "|put[a-z]+$|paste$|thumbnail$|train$|zero_grad$"
)
"""Names of methods that change an object of a library, unless that is a table."""

_CHANGING_FIRST = _words("""
    readinto recv_into shuffle copyto fill_diagonal place putmask put_along_axis heappush heappop heapify heapreplace
    heappushpop insort setitem delitem at
""")
"""Functions that change their first argument."""

_DRAWING = _words("""
    Draw rectangle line circle ellipse polylines fillPoly fillConvexPoly putText drawContours arrowedLine drawMarker
    floodFill set_color
""")
"""Functions of imaging modules that change their first argument. Methods of these names do not."""

_NEW = _words("""
    clone astype tolist tobytes item sum mean std var max min argmax argmin argsort any all norm abs round nonzero
    cumsum prod size dim numel tensor stack cat concatenate zeros ones empty full zeros_like ones_like empty_like
    full_like deepcopy len int float str bool bytes range open isinstance hasattr arange linspace vstack hstack tile
    rand randn randint lower upper strip encode decode format join startswith endswith index exists basename dirname
    hash id repr print divmod pow convert
""")
"""Functions and methods whose result shares no memory with their arguments."""

_SHALLOW = _words("""
    copy array list tuple dict set frozenset sorted enumerate zip reversed iter map filter items values keys deque
    Counter defaultdict OrderedDict
""")
"""Functions and methods whose result is new, and holds elements of their arguments."""


_TYPES = {(name,) for name in ("dict", "list", "set", "bytearray", "object", "type")}


class _Reader:
    """Reads statements in their order. `env` has what each local variable may be."""

    def __init__(self, code: CodeType) -> None:
        self.effects = Effects()
        self.env: dict[str, Value] = {}
        self._free = set(code.co_freevars)
        self._globals: set[str] = set()
        inner = {name for each in _codes(code) for name in (*each.co_varnames, *each.co_cellvars)}
        self._locals = (inner - set(code.co_names)) | {*code.co_varnames, *code.co_cellvars}

    def block(self, statements: Iterable[ast.AST]) -> None:
        for statement in statements:
            self._statement(statement)

    def _statement(self, node: Any) -> None:
        match node:
            case ast.Assign():
                value = self.value(node.value)
                for target in node.targets:
                    if (
                        isinstance(node.value, ast.Constant)
                        and getattr(target, "id", "") in self._globals
                    ):
                        self._change({("global", target.id)}, "=constant", target)
                    else:
                        self._assign(target, value)
            case ast.Return() if node.value is not None:
                self.escape(self.value(node.value))
            case ast.AnnAssign() if node.value is not None:
                self._assign(node.target, self.value(node.value))
            case ast.AugAssign():
                self.value(node.value)
                old = self.value(node.target)
                self._change(old.own, "op=", node)
                self._assign(node.target, old)
            case ast.Delete():
                for target in node.targets:
                    self._assign(target, NEW)
            case ast.For() | ast.AsyncFor():
                self._assign(node.target, self.value(node.iter).step(ELEMENT))
                self._branches(node.body, node.body, node.orelse)
            case ast.With() | ast.AsyncWith():
                for item in node.items:
                    value = self.value(item.context_expr)
                    if item.optional_vars is not None:
                        self._assign(item.optional_vars, value)
                self.block(node.body)
            case ast.Global():
                self._globals.update(node.names)
            case ast.Nonlocal():
                self._free.update(node.names)
            case ast.Import() | ast.ImportFrom():
                self._import(node)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                self._inner_function(node.args, node.body)
                self.block(node.decorator_list)
                self.env[node.name] = NEW
            case ast.ClassDef():
                self.block([*node.body, *node.bases, *node.decorator_list])
                self.env[node.name] = NEW
            case ast.expr():
                self.value(node)
            case _:
                parts = [part for _, part in ast.iter_fields(node)]
                self.block([part for part in parts if isinstance(part, ast.AST)])
                self._branches(*[part for part in parts if isinstance(part, list)])

    def _branches(self, *blocks: list[Any]) -> None:
        """Read blocks of which any may run, or none."""
        for block in blocks:
            before = dict(self.env)
            self.block([part for part in block if isinstance(part, ast.AST)])
            both = before.keys() | self.env.keys()
            pairs = {k: (before.get(k, NEW), self.env.get(k, NEW)) for k in both}
            self.env = {k: a if a is b else _joined([a, b]) for k, (a, b) in pairs.items()}

    def _import(self, node: ast.Import | ast.ImportFrom) -> None:
        for name in node.names:
            if isinstance(node, ast.ImportFrom):
                path: Path = ("import", "." * node.level + (node.module or ""), name.name)
            else:
                path = ("import", name.name)
            self._use(path, node)
            if name.asname is None and path == ("import", name.name):
                path = ("import", name.name.partition(".")[0])
            self.env[name.asname or path[-1]] = Value(frozenset({path}))

    def _inner_function(self, arguments: ast.arguments, body: Iterable[ast.AST]) -> None:
        outer = dict(self.env)
        for argument in ast.walk(arguments):
            if isinstance(argument, ast.arg):
                self.env[argument.arg] = Value(frozenset({ANY}), frozenset({ANY}))
            elif isinstance(argument, ast.expr):
                self.value(argument)
        self.block(body)
        self.env = outer

    def _assign(self, target: ast.AST, value: Value) -> None:
        match target:
            case ast.Name():
                if target.id in self._globals:
                    self._change({("global", target.id)}, "=", target)
                elif target.id in self._free:
                    self._change({("free", target.id)}, "=", target)
                else:
                    self.env[target.id] = value
            case ast.Attribute():
                self.escape(value)
                self.effects.kept |= {target.attr} if value.own else set()
                self._change(self.value(target.value).own, f".{target.attr}=", target)
            case ast.Subscript():
                self.escape(value)
                self.value(target.slice)
                named = isinstance(getattr(target.slice, "value", None), str)
                self._change(self.value(target.value).own, "['']=" if named else "[]=", target)
                if isinstance(target.value, ast.Name) and target.value.id in self.env:
                    old = self.env[target.value.id]
                    self.env[target.value.id] = Value(old.own, old.inner | value.all)
            case ast.Starred():
                self._assign(target.value, value)
            case ast.Tuple() | ast.List():
                for each in target.elts:
                    self._assign(each, value.step(ELEMENT))

    # ---- expressions ----

    def value(self, node: ast.AST) -> Value:
        """Read an expression. Return what its value may be."""
        match node:
            case ast.Name():
                return self._name(node)
            case ast.Attribute():
                of = self.value(node.value)
                if node.attr in CHANGING:  # a bound method, to be called later
                    self._change(of.own, node.attr, node)
                return self._attribute(node, of)
            case ast.Subscript():
                self.value(node.slice)
                step = SLICE if isinstance(node.slice, ast.Slice) else ELEMENT
                return self.value(node.value).step(step)
            case ast.Call():
                return self._call(node)
            case ast.BoolOp():
                return _joined(map(self.value, node.values))
            case ast.IfExp():
                self.value(node.test)
                return _joined([self.value(node.body), self.value(node.orelse)])
            case ast.NamedExpr():
                value = self.value(node.value)
                self._assign(node.target, value)
                return value
            case ast.List() | ast.Tuple() | ast.Set():
                return Value(inner=_joined(map(self.value, node.elts)).all)
            case ast.Dict():
                held = [self.value(each) for each in (*node.keys, *node.values) if each is not None]
                return Value(inner=_joined(held).all)
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
                return self._comprehension(node)
            case ast.Lambda():
                self._inner_function(node.args, [node.body])
                return NEW
            case ast.Yield() if node.value is not None:
                self.escape(self.value(node.value))
                return NEW
            case ast.Starred() | ast.Await() | ast.YieldFrom():
                return self.value(node.value)
            case ast.Compare() if not isinstance(node.comparators[0], ast.Constant):
                is_type = getattr(getattr(node.left, "func", None), "id", "") == "type"
                self.effects.asks |= isinstance(node.ops[0], ast.Is | ast.IsNot) and not is_type
                self.block([node.left, *node.comparators])
                return NEW
            case _:
                for child in ast.iter_child_nodes(node):
                    self.value(child)
                return NEW

    def _name(self, node: ast.Name) -> Value:
        if node.id in self._globals:
            found = _at("global", node.id)
        elif node.id in self.env:
            return self.env[node.id]
        elif node.id in self._free:
            found = _at("free", node.id)
        elif node.id in self._locals:
            return NEW  # a later line assigns it
        else:
            found = _at("global", node.id)
        self._use_all(found, node)
        return found

    def _attribute(self, node: ast.Attribute, of: Value) -> Value:
        name = node.attr
        above = isinstance(node.value, ast.Call) and getattr(node.value.func, "id", "") == "super"
        self.effects.names |= {name, f"super.{name}"} if above else {name}
        found = of.step(CLASS if name == "__class__" else name)
        self._use_all(found, node)
        return found

    def _comprehension(self, node: Any) -> Value:
        outer = dict(self.env)
        for each in node.generators:
            self._assign(each.target, self.value(each.iter).step(ELEMENT))
            for condition in each.ifs:
                self.value(condition)
        parts = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
        held = _joined(map(self.value, parts)).all
        self.env = outer
        return Value(inner=held)

    def _call(self, node: ast.Call) -> Value:
        receiver = NEW
        if isinstance(node.func, ast.Attribute):
            name, receiver = node.func.attr, self.value(node.func.value)
            called = self._attribute(node.func, receiver)
        else:
            name, called = getattr(node.func, "id", ""), self.value(node.func)
        arguments = [self.value(argument) for argument in node.args]
        keywords = {word.arg: self.value(word.value) for word in node.keywords}
        first = arguments[0] if arguments else NEW
        self._changed_by_call(node, name, receiver, first, keywords)
        if name == "type" and len(arguments) == 1:
            return first.step(CLASS)
        if name == "getattr" and isinstance(node.args[1:2] and node.args[1], ast.Constant):
            found = first.step(str(node.args[1].value))  # type: ignore[attr-defined]
            self._use_all(found, node)
            return found
        if name == "super":
            return self.env.get("self") or next(iter(self.env.values()), NEW)
        if name in _NEW:
            return NEW
        held = _joined([*arguments, *keywords.values()])
        for path in called.own or {()}:
            self.escape(held, path)
        if name in _SHALLOW:
            copied = _joined([held, receiver]).step(COPY)
            return Value(inner=copied.step(ELEMENT).all)
        if not _is_named(receiver):
            held = _joined([held, receiver])
        passed = frozenset(p if p[0] in (PASSED, *ANY) else (PASSED, *p) for p in held.all)
        returned = frozenset(p if p == ANY else (CALL, *p) for p in called.own) | passed
        return Value(returned, returned)

    def _changed_by_call(
        self, node: ast.Call, name: str, receiver: Value, first: Value, keywords: dict[Any, Value]
    ) -> None:
        in_place = name.endswith("_") and not name.endswith("__")
        if name in CHANGING or in_place or SETTER.match(name):
            self._change(receiver.own, name, node)
        if name in CHANGING and any(path[1:] in _TYPES for path in receiver.own):
            self._change(first.own, name, node)  # `list.append(x, 1)`
        drawing = name in _DRAWING and any(p[0] in ("global", "import") for p in receiver.own)
        if (
            drawing
            or name in _CHANGING_FIRST
            or (in_place and receiver.own and _is_named(receiver))
        ):
            self._change(first.own, "[]=", node)
        for each in node.args if name == "pack_into" else ():
            self._change(self.value(each).own, "[]=", node)
        if name == "next":
            self._change(first.own, "__next__", node)
        for word in ("out", "dst"):
            self._change(keywords.get(word, NEW).own, "out=", node)
        for given in node.keywords:
            if given.arg == "inplace" and getattr(given.value, "value", True):
                self._change(receiver.own | first.own, "inplace=", node)
        if name in ("getattr", "setattr", "attrgetter", "methodcaller"):
            constants = {str(a.value) for a in node.args[:2] if isinstance(a, ast.Constant)}
            self.effects.names |= constants
            self.effects.dynamic |= not constants
            if name == "setattr":
                self._change(first.own, f".{''.join(constants)}=", node)
            elif not constants:
                self.effects.computed.update(dict.fromkeys(first.own, node.lineno))

    # ---- what was found ----

    def escape(self, value: Value, called: Path = ()) -> None:
        """Note that other code gets the objects, or what is called."""
        named = ("global", "free", "import", "default", "self")
        paths = {path for path in value.all if path[0] in named}
        if paths:
            self.effects.escapes.setdefault(called, set()).update(paths)

    def _use_all(self, value: Value, node: ast.AST) -> None:
        for path in value.own:
            if path[0] in ("global", "free", "import"):
                self._use(path, node)

    def _use(self, path: Path, node: ast.AST) -> None:
        self.effects.uses.setdefault(path, node.lineno)  # type: ignore[attr-defined]

    def _change(self, paths: Iterable[Path], how: str, node: ast.AST) -> None:
        for path in paths:
            self.effects.changes.setdefault((path, how), node.lineno)  # type: ignore[attr-defined]


def _at(*path: str) -> Value:
    return Value(frozenset({path}))


def _joined(values: Iterable[Value]) -> Value:
    found = list(values)
    return Value(
        frozenset().union(*(v.own for v in found)), frozenset().union(*(v.inner for v in found))
    )


def _longer(path: Path, name: str) -> Path:
    return path if len(path) >= _LONGEST or path == ANY else (*path, name)


def _is_named(value: Value) -> bool:
    """Return whether a value is reached by names alone, as the module in `torch.stack` and the instance in `self.f`."""
    return all(
        path[0] in ("global", "import", "free", "self") and ELEMENT not in path
        for path in value.own
    )
