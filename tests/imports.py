"""What a Python file imports, found without running it. Used by tests of the layering and by `scripts/_choose.py`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib.util import resolve_name

FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


def imported(source: str, package: str = "fastload") -> Iterator[tuple[str, bool]]:
    """Yield every dotted name that `source` imports, and whether loading the module does that.

    `from a import b` yields `a.b`, as `b` may be a module. Relative imports are resolved against
    `package`. The name of `import_module(computed)` is "".
    """
    left: list[tuple[ast.AST, bool]] = [(ast.parse(source), True)]
    calls = "import_module" in source or "__import__" in source  # else no expression imports
    while left:
        node, at_load = left.pop()
        if isinstance(node, FUNCTIONS) or for_the_type_checker(node):
            at_load = False
        left += [
            (child, at_load)
            for child in ast.iter_child_nodes(node)
            if calls or not isinstance(child, ast.expr)
        ]
        if isinstance(node, ast.Import):
            yield from ((alias.name, at_load) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")[: len(package.split(".")) + 1 - node.level]
            base = ".".join(
                [*(parts if node.level else []), *([node.module] if node.module else [])]
            )
            yield from ((f"{base}.{alias.name}", at_load) for alias in node.names)
        elif isinstance(node, ast.Call):
            called = getattr(node.func, "attr", None) or getattr(node.func, "id", None)
            if called in ("__import__", "import_module"):
                argument = node.args[0] if node.args else None
                name = str(argument.value) if isinstance(argument, ast.Constant) else ""
                yield resolve_name(name, package), at_load


def for_the_type_checker(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
