"""What a Python file imports, found without running it. Used by tests of the layering and by `scripts/_choose.py`."""

from __future__ import annotations

import ast
from collections.abc import Iterator


def imported(source: str, package: str = "fastload") -> Iterator[tuple[str, bool]]:
    """Yield every dotted name that `source` imports, and whether loading the module does that.

    `from a import b` yields both `a` and `a.b`, as `b` may be a module. Relative imports are
    resolved against `package`.
    """
    tree = ast.parse(source)
    deferred = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        at_load = id(node) not in deferred
        if isinstance(node, ast.Import):
            yield from ((alias.name, at_load) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")[: len(package.split(".")) + 1 - node.level]
            base = ".".join(
                [*(parts if node.level else []), *([node.module] if node.module else [])]
            )
            yield base, at_load
            yield from ((f"{base}.{alias.name}", at_load) for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in {
            "__import__",
            "import_module",
        }:
            argument = node.args[0]
            assert isinstance(argument, ast.Constant), (
                "an import by a computed name cannot be checked"
            )
            yield str(argument.value), at_load
