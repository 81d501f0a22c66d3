"""Promises:
- A room imports what its line in `tests/rooms.py` names.
- Threads are started only in `engine/threads.py`, and for commands in `_kit/pool.py` and `flow/runner.py`. Locks are
  made only in `engine/` and `random/`.

Every module of the package is parsed, so that imports inside functions count too. import-linter, a check of
`scripts/test`, finds circles of files and folders. It does not count an import of the package that holds the file, so
that a law here does.
"""

from __future__ import annotations

import ast
import re
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import torch

import fastload
from tests import rooms
from tests.imports import imported

PACKAGE = Path(__file__).parent.parent / "fastload"
MODULES = sorted(PACKAGE.rglob("*.py"))


def room_of(path: Path) -> str:
    """Return the room of a file: its folder in the package, or itself."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


CORE = [path for path in MODULES if room_of(path) in rooms.CORE]
WORKERS, WINDOW = PACKAGE / "engine" / "threads.py", PACKAGE / "engine" / "window.py"
SLOTS = PACKAGE / "memory" / "slots.py"
"""May have a lock: one worker makes the slot of a batch."""
PROCESS = {PACKAGE / "processes" / name for name in ("beside.py", "worker_main.py")}
PROCESSES = {
    PACKAGE / "processes" / f"{name}.py"
    for name in ("beside", "child", "pausing", "remote", "work")
}
"""May have locks, and a worker process a thread: it hears the loop's process, and never runs code of the user's."""
PARAMETERS = {
    PACKAGE / "parameters" / name for name in ("server.py", "servers.py", "prefetched.py")
}
"""May have locks: a server, whose calls come from threads of gRPC, a client, whose pushes have an order, and the rows
that a loader's threads pull ahead."""

POOL = PACKAGE / "_kit" / "pool.py"
"""May have threads: those of commands that pack, copy and check. They never run code of the user's."""
FLOW = PACKAGE / "flow" / "runner.py"
"""May have threads: each waits for the process of a task."""

WATCHES = {PACKAGE / "elastic" / "watch.py"}
"""May have a thread and an event: it beats while the loop trains, and never runs code of the user's."""

STREAM = {PACKAGE / "stream" / "batches.py"}
"""May have threads and a lock: a stream has no epoch, so its reader and its workers are not those of a loader."""

ORDERS = {PACKAGE / "sequences" / "mixture.py"}
"""May have a lock: a loader draws from a mixture in one thread, and its weights change in another."""

REMOTE = {
    PACKAGE / "remote" / f"{name}.py" for name in ("store", "fetching", "turns", "lines", "cache")
}
"""May have threads and locks: a process's requests to object stores, and its cache of what they brought. No thread of
it runs code of the user's, but the `read` of an object that the user gives as a store."""

PROBES = {PACKAGE / "random" / name for name in ("numpy_random.py", "python_random.py")}
"""May have a thread for a moment: it tests whether a thread draws from its own generator, and runs no user's code."""

THREADS = {
    "_thread.start_new_thread",
    "concurrent.futures.ThreadPoolExecutor",
    "multiprocessing.dummy.Pool",
    "multiprocessing.pool.ThreadPool",
    "threading.Thread",
    "threading.Timer",
}
LOCKS = {
    "_thread.allocate_lock",
    "queue.LifoQueue",
    "queue.PriorityQueue",
    "queue.Queue",
    "threading.Barrier",
    "threading.BoundedSemaphore",
    "threading.Condition",
    "threading.Event",
    "threading.Lock",
    "threading.RLock",
    "threading.Semaphore",
}
SLEEP = {"time.sleep"}


class WithoutAnnotations(ast.NodeTransformer):
    """Drops what is there for the type checker."""

    def visit_arg(self, node: ast.arg) -> ast.arg:
        node.annotation = None
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        node.annotation = ast.Constant(None)
        return self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        return self.generic_visit(node)


def used(source: str, names: set[str]) -> set[str]:
    """Return those of the dotted `names` that `source` refers to, under whatever local name.

    Annotations do not count: a type says what is handed over, and makes nothing.
    """
    tree = WithoutAnnotations().visit(ast.parse(source))
    origin: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                local = alias.asname or alias.name.partition(".")[0]
                origin[local] = alias.name if alias.asname else local
        elif isinstance(node, ast.ImportFrom):
            origin |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute):
            head, dot, rest = ast.unparse(node).partition(".")
            found.add(origin.get(head, head) + dot + rest)
    return found & names


@cache
def imports_of(path: Path) -> frozenset[tuple[str, bool]]:
    package = ".".join(path.parent.relative_to(PACKAGE.parent).parts)
    return frozenset(imported(path.read_text(), package))


def by_name(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def imported_rooms(path: Path) -> set[tuple[str, bool]]:
    """Return the other rooms that a file imports, each with whether loading the file does that."""
    found = {
        (room_named(name), at_load)
        for name, at_load in imports_of(path)
        if f"{name}.".startswith("fastload.")
    }
    return {(room, at_load) for room, at_load in found if room != room_of(path)}


def room_named(name: str) -> str:
    """Return the room of a dotted name in the package. A public name is one of `__init__`."""
    room = name.partition(".")[2].partition(".")[0]
    return room if room in rooms.ROOMS else "__init__"


def test_the_table_has_every_room() -> None:
    assert {room_of(path) for path in MODULES} == rooms.ROOMS.keys()


def test_a_room_of_the_core_imports_only_rooms_above_it() -> None:
    above: set[str] = set()
    for room in rooms.CORE:
        assert rooms.allowed(room, at_load=True) <= above, room
        above.add(room)


def test_a_room_imports_what_the_table_says() -> None:
    assert not [
        f"{by_name(path)} imports {room}{' as it is loaded' * at_load}"
        for path in MODULES
        for room, at_load in imported_rooms(path)
        if room not in rooms.allowed(room_of(path), at_load=at_load)
    ]


def test_the_table_allows_nothing_that_is_not_needed() -> None:
    needed = {(room_of(path), room) for path in MODULES for room, _ in imported_rooms(path)}
    named = {(room, other) for room in rooms.ROOMS for other in rooms.allowed(room, at_load=False)}
    assert named == needed


def test_the_docstring_of_the_package_names_every_room() -> None:
    assert fastload.__doc__
    named = set(re.findall(r"\w+", fastload.__doc__))
    assert rooms.ROOMS.keys() - {"__init__", "__main__"} <= named


def test_the_root_has_what_a_user_holds() -> None:
    assert len(list(PACKAGE.glob("*.py"))) <= 12


def test_no_import_has_a_name_that_is_computed() -> None:
    """It could not be checked."""
    assert not [by_name(path) for path in MODULES if "" in {name for name, _ in imports_of(path)}]


def test_no_file_imports_a_folder_that_it_lies_in_and_that_imports_files() -> None:
    faults = []
    for folder in {path.parent for path in MODULES} - {PACKAGE}:
        name = ".".join(folder.relative_to(PACKAGE.parent).parts)
        files = tuple(f"{name}.{file.stem}." for file in folder.iterdir())
        if not any(f"{n}.".startswith(files) for n, _ in imports_of(folder / "__init__.py")):
            continue
        for path in {*folder.rglob("*.py")} - {folder / "__init__.py"}:
            own = {f"{n}." for n, _ in imports_of(path) if f"{n}.".startswith(f"{name}.")}
            faults += [f"{by_name(path)} imports {n}" for n in own if not n.startswith(files)]
    assert not faults, "move what both sides need into a file that neither imports"


def test_the_core_needs_torch_and_numpy_only() -> None:
    allowed = {*sys.stdlib_module_names, "annotationlib", "fastload", "numpy", "torch"}
    faults = [
        f"{by_name(path)} imports {name}"
        for path in CORE
        for name, _ in imports_of(path)
        if name.partition(".")[0] not in allowed
    ]
    assert not faults, "what needs more is a plug-in"


THREADS_HERE = {WORKERS, POOL, FLOW, *PROCESS, *WATCHES, *STREAM, *PROBES, *REMOTE}
LOCKS_HERE = {
    *{WINDOW, PACKAGE / "engine" / "waiting.py", SLOTS},
    *{*WATCHES, *PARAMETERS, *STREAM, *PROCESSES, *ORDERS, *REMOTE},
    *{path for path in MODULES if room_of(path) == "random"},
}


def test_threads_and_locks_are_made_in_their_files_only_and_the_core_never_sleeps() -> None:
    faults = []
    for path in MODULES:
        banned: set[str] = set()
        banned |= THREADS if path not in THREADS_HERE else set()
        banned |= LOCKS if path not in LOCKS_HERE else set()
        banned |= SLEEP if path in CORE else set()
        faults += [f"{by_name(path)} has {name}" for name in used(path.read_text(), banned)]
    assert not faults


def test_the_core_is_all_there() -> None:
    """The checks above would pass on an empty package."""
    names = {path.name for path in CORE}
    assert names >= {
        "__init__.py",
        "collate.py",
        "loader.py",
        "sampler.py",
        "window.py",
        "readers.py",
    }
    assert used(WORKERS.read_text(), THREADS)
    assert used(POOL.read_text(), THREADS)
    assert used(WINDOW.read_text(), LOCKS)


def test_an_import_of_a_room_is_seen() -> None:
    sources = [
        "import fastload.datasets.image_files",
        "from fastload.datasets import ImageFolder",
        "from fastload import datasets",
        "from . import datasets",
        "from .datasets.image_files import ImageFileList",
        "def f():\n    from fastload import datasets",
        "def f():\n    importlib.import_module('fastload.datasets')",
        "if TYPE_CHECKING:\n    import fastload.datasets",
    ]
    assert not [
        source
        for source in sources
        if "datasets" not in {room_named(name) for name, _ in imported(source)}
    ]


def test_when_an_import_happens_is_seen() -> None:
    sources = [
        ("import fastload.image", True),
        ("try:\n    import fastload.image\nexcept ImportError: ...", True),
        ("class A:\n    import fastload.image", True),
        ("def f():\n    if x:\n        import fastload.image", False),
        ("if typing.TYPE_CHECKING:\n    import fastload.image", False),
    ]
    assert not [
        source
        for source, at_load in sources
        if ("fastload.image", at_load) not in set(imported(source))
    ]


OF_LIBRARIES = {*dir(torch.Tensor), "_asdict", "_fields", "_replace"}
"""Private names of tensors, and those of a NamedTuple, which are public."""


def private_names(path: Path) -> tuple[set[str], set[str]]:
    """Return the private names that a file defines, and those that it takes from an object or a module."""
    defined, taken = set(), set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            defined.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            defined.add(node.id)
        elif isinstance(node, ast.Attribute):
            if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")):
                taken.add(node.attr)
            elif isinstance(node.ctx, ast.Store):
                defined.add(node.attr)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fastload"):
            taken |= {alias.name for alias in node.names}
    return tuple({n for n in names if n[0] == "_" != n[1:2]} for names in (defined, taken))  # type: ignore[return-value]


def test_no_file_takes_a_private_name_of_another() -> None:
    names = {path: private_names(path) for path in MODULES}
    for path, (defined, taken) in names.items():
        if path.parent.name == "safety" or path.stem == "torch_private":
            continue  # which are there for the private names of libraries
        others = set().union(*(theirs for other, (theirs, _) in names.items() if other != path))
        foreign = (taken - defined) & others - OF_LIBRARIES
        assert not foreign, f"{by_name(path)} takes {foreign} out of another file of fastload"


def test_no_files_of_c_use_one_another_in_a_circle() -> None:
    """A name of kernels.h belongs to the file that has it at the beginning of a line, without `static`."""
    folder, comments = PACKAGE / "image" / "kernels", re.compile(r"/\*.*?\*/", re.DOTALL)
    texts = {path.name: comments.sub("", path.read_text()) for path in folder.glob("*.[ch]")}
    names = re.findall(r"\b(?:\w+_passes|\w+_library|\w+\()", texts.pop("kernels.h"))
    uses: dict[str, set[str]] = {}
    for name in map(re.escape, {*names}):
        found = [file for file, text in texts.items() if re.search(rf"\b{name}", text)]
        own = re.compile(rf"^(?!static|#)\S[^{{\n]*\b{name}", re.MULTILINE)
        for owner in (file for file in found if own.search(texts[file])):
            for file in found:
                uses.setdefault(file, set()).update({owner} - {file})
    assert len(uses) == len(texts)
    assert "checksum.c" in uses["payload.c"]
    assert [*TopologicalSorter(uses).static_order()]
