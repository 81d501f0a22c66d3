"""Reads the statements and expressions of a syntax tree. Any branch may run, or none, in the order of the lines."""

from __future__ import annotations

import ast
import dis
from collections.abc import Iterable, Iterator
from functools import cached_property
from types import CodeType
from typing import Any

from fastload.verdicts import values
from fastload.verdicts.values import ANY, CLASS, ELEMENT, NEW, PASSED, SLICE, Effects, Path, Value


def codes_of(code: CodeType) -> Iterator[CodeType]:
    """Yield a code object and those within it, without those that compute annotations."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType) and constant.co_name != "__annotate__":
            yield from codes_of(constant)


class Reader:
    """Reads statements in their order. `env` has what each local variable may be.

    The second line of the syntax trees is the first one of `code`.
    """

    def __init__(self, code: CodeType) -> None:
        self.effects = Effects()
        self._code, self._above = code, code.co_firstlineno - 2
        self.env: dict[str, Value] = {}
        self._free = set(code.co_freevars)
        self._globals: set[str] = set()
        inner = {name for each in codes_of(code) for name in (*each.co_varnames, *each.co_cellvars)}
        self._locals = (inner - set(code.co_names)) | {*code.co_varnames, *code.co_cellvars}

    @cached_property
    def _looked_up(self) -> set[str]:
        """The names of global variables, which may be those of variables in comprehensions, too."""
        return {
            each.argval for each in dis.get_instructions(self._code) if each.opname == "LOAD_GLOBAL"
        }

    def block(self, statements: Iterable[ast.AST]) -> None:
        """Read statements in their order."""
        for statement in statements:
            self._statement(statement)

    def _statement(self, node: Any) -> None:
        match node:
            case ast.Assign():
                value = self.value(node.value)
                how = "=constant" if isinstance(node.value, ast.Constant) else "="
                for target in node.targets:
                    self._assign(target, value, how)
            case ast.AnnAssign() if node.value is not None:
                self._assign(node.target, self.value(node.value))
            case ast.Return() if node.value is not None:
                self.escape(self.value(node.value))
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
            self._use([path], node)
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

    def _assign(self, target: ast.AST, value: Value, how: str = "=") -> None:
        match target:
            case ast.Name():
                if target.id in self._globals:
                    self._change({("global", target.id)}, how, target)
                elif target.id in self._free:
                    self._change({("free", target.id)}, "=", target)
                else:
                    self.env[target.id] = value
            case ast.Attribute():
                self.escape(value)
                self.effects.kept |= {target.attr} if value.own else set()
                self._change(self.value(target.value).own, f".{target.attr}=", target)
                if target.attr == "__dict__":  # all that share it change one another
                    self._change(value.all, "update", target)
            case ast.Subscript():
                self.escape(value)
                self.value(target.slice)
                named = isinstance(getattr(target.slice, "value", None), str)
                self._change(self.value(target.value).own, "['']=" if named else "[]=", target)
                if isinstance(target.value, ast.Name) and target.value.id in self.env:
                    old = self.env[target.value.id]
                    self.env[target.value.id] = Value(old.own, old.inner | value.all)
            case ast.Starred():
                self._assign(target.value, Value(inner=value.all))  # a new list
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
                if node.attr in values.CHANGING:  # a bound method, to be called later
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
                held = [self.value(each) for each in node.keys if each is not None]
                for key, each in zip(node.keys, map(self.value, node.values), strict=True):
                    held.append(each if key else each.step(ELEMENT))  # `{**row}`
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
                inner = _joined(map(self.value, ast.iter_child_nodes(node))).all
                holds = type(node).__name__ in ("TemplateStr", "Interpolation")  # `t"{x}"`
                return Value(inner=inner) if holds else NEW

    def _name(self, node: ast.Name) -> Value:
        declared = node.id in self._globals
        if not declared and node.id in self.env:
            return self.env[node.id]
        is_free = not declared and node.id in self._free
        assigned = node.id in self._locals and node.id not in self._looked_up
        if not declared and not is_free and assigned:
            return NEW  # a later line assigns it
        found = _at("free" if is_free else "global", node.id)
        self._use(found.own, node)
        return found

    def _attribute(self, node: ast.Attribute, of: Value) -> Value:
        name = node.attr
        above = isinstance(node.value, ast.Call) and getattr(node.value.func, "id", "") == "super"
        self.effects.names |= {name, f"super.{name}"} if above else {name}
        found = of.step(CLASS if name == "__class__" else name)
        self._use(found.own, node)
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
        named = [self.value(word.value) for word in node.keywords]
        first = arguments[0] if arguments else NEW
        self._changed_by_call(node, name, receiver, arguments)
        if name in ("type", "vars") and len(arguments) == 1:
            return first.step(CLASS if name == "type" else "__dict__")
        if name == "getattr" and isinstance(node.args[1:2] and node.args[1], ast.Constant):
            found = first.step(str(node.args[1].value))  # type: ignore[attr-defined]
            self._use(found.own, node)
            return found
        if name == "super":
            return self.env.get("self") or next(iter(self.env.values()), NEW)
        own = (path for path in called.own if path != ANY and path[0] != PASSED)
        returned = frozenset((values.CALL, *path) for path in own)
        copies = all(w.arg != "copy" or getattr(w.value, "value", 0) is True for w in node.keywords)
        if name in values.RETURN_NEW and copies:
            return Value(returned)
        held = _joined([*arguments, *named])
        self.escape(held, *called.own or {()})
        if name in values.SHALLOW and copies:
            return Value(returned, _joined([held, receiver]).step(values.COPY).step(ELEMENT).all)
        if name in values.OF_ARRAYS:
            held = Value(held.own).step(values.ARRAY)
        if not _is_named(receiver):
            held = _joined([held, receiver])
        # What a method of a passed object returns is a part of it: `passed` has that already.
        passed = frozenset(p if p[0] in (PASSED, *ANY) else (PASSED, *p) for p in held.all)
        returned |= passed | called.own & {ANY}
        return Value(returned, returned)

    def _changed_by_call(
        self, node: ast.Call, name: str, receiver: Value, arguments: list[Value]
    ) -> None:
        first = arguments[0] if arguments else NEW
        changing = name in values.CHANGING
        in_place = name.endswith("_") and not name.endswith("__")
        if changing or in_place or values.SETTER.match(name):
            self._change(receiver.own, name, node)
        if changing and any(path[1:] in values.TYPES for path in receiver.own):
            self._change(first.own, name, node)  # `list.append(x, 1)`
        named = bool(receiver.own) and _is_named(receiver)
        drawing = name in values.DRAWING and any(p[0] in ("global", "import") for p in receiver.own)
        if drawing or name in values.CHANGING_FIRST or (in_place and named):
            self._change(first.own, "[]=", node)
        for each in arguments if name == "pack_into" else ():
            self._change(each.own, "[]=", node)
        if name == "next":
            self._change(first.own, "__next__", node)
        out = arguments[values.PLACE_OF_OUT.get(name, 99) :] if named else []
        out += [self.value(word.value) for word in node.keywords if word.arg in ("out", "dst")]
        for each in out:
            self._change(each.own, "out=", node)
        for word in node.keywords:
            if word.arg == "inplace" and getattr(word.value, "value", True):
                self._change(receiver.own | first.own, "inplace=", node)
        if name in ("getattr", "setattr", "attrgetter", "methodcaller"):
            constants = {str(a.value) for a in node.args[:2] if isinstance(a, ast.Constant)}
            self.effects.names |= constants
            self.effects.dynamic |= not constants
            if name == "setattr":
                self._change(first.own, f".{''.join(constants)}=", node)
            elif not constants:
                self.effects.computed.update(dict.fromkeys(first.own, self._line(node)))

    # ---- what was found ----

    def escape(self, value: Value, *called: Path) -> None:
        """Note that other code gets the objects, or what is called."""
        if paths := {path for path in value.all if path[0] in _NAMED}:
            for each in called or ((),):
                self.effects.escapes.setdefault(each, set()).update(paths)

    def _use(self, paths: Iterable[Path], node: ast.AST) -> None:
        for path in paths:
            if path[0] in ("global", "free", "import"):
                self.effects.uses.setdefault(path, self._line(node))

    def _change(self, paths: Iterable[Path], how: str, node: ast.AST) -> None:
        for path in paths:
            self.effects.changes.setdefault((path, how), self._line(node))

    def _line(self, node: Any) -> int:
        return self._above + int(node.lineno)


_NAMED = {"global", "free", "import", "default", "self"}


def _at(*path: str) -> Value:
    return Value(frozenset({path}))


def _joined(values: Iterable[Value]) -> Value:
    found = list(values)
    return Value(
        frozenset().union(*(v.own for v in found)), frozenset().union(*(v.inner for v in found))
    )


def _is_named(value: Value) -> bool:
    """Return whether a value is reached by names alone, as the module in `torch.stack` and the instance in `self.f`."""
    return all(
        path[0] in ("global", "import", "free", "self") and ELEMENT not in path
        for path in value.own
    )
