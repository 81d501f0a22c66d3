"""The graph of a loader's objects: which each worker thread gets a copy of, found in one walk."""

from __future__ import annotations

import io
import itertools
import tarfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from fastload.safety import kinds, memory, objects


@dataclass(frozen=True, slots=True)
class Node:
    """An object of the graph, and how to reach it from its parent."""

    x: Any
    kind: kinds.Kind
    parent: int | None
    label: str


@dataclass(frozen=True, slots=True)
class Named:
    """An object that cannot be copied, and the expression that reaches it."""

    path: str
    x: Any
    why: str

    def __str__(self) -> str:
        return f"{self.path} ({type(self.x).__module__}.{type(self.x).__qualname__}: {self.why})"


class Graph:
    """Which objects each worker gets its own copy of, and which all workers share.

    Args:
        roots: the objects at which the graph begins, by name. They are copied as one graph: if two of them hold the
            same object, their copies hold the same copy.

    It reads the objects once, in the caller's thread: nothing may change them meanwhile.
    """

    def __init__(self, roots: Mapping[str, Any]) -> None:
        self.roots = roots
        self.kinds = Kinds()
        self._memory: list[Any] = []  # arrays, tensors and buffers that may be copied
        # By id. They keep the objects alive, so that the ids stay valid.
        self.nodes: dict[int, Node] = {}
        self.code: list[Any] = []  # the classes and modules, which have no nodes
        self.shared: dict[int, str] = {}  # the reasons, by id
        self.lists: dict[int, list[Any]] = {}  # what workers have in place of shared lists
        # The memory of which each worker gets a copy, by the id of each object in it.
        self.blocks: dict[int, memory.Block] = {}
        self.refused: list[Named] = []
        self.uncopyable: list[Named] = []
        for label, root in roots.items():
            self.add(root, label)
        self._settle()

    def add(self, root: Any, label: str) -> None:
        """Add an object and all below it to the graph."""
        stack: list[tuple[Any, int | None, str]] = [(root, None, label)]
        while stack:
            x, parent, label = stack.pop()
            kind = self.kinds[type(x)]
            if kind is kinds.ATOM and issubclass(type(x), type | ModuleType):
                self.code.append(x)
            if kind is kinds.ATOM or id(x) in self.nodes:
                continue
            self.nodes[id(x)] = Node(x, kind, parent, label)
            elements = not self._is_data(x, kind)
            why = self._why_shared(x, kind, elements)
            if why is not None:
                self.shared[id(x)] = why
                continue
            parts = kind.parts(x) if elements else kinds.Instance.parts(kind, x)  # type: ignore[arg-type]
            below = [(y, id(x), way) for way, y in parts if type(y) not in objects.LEAVES]
            stack.extend(reversed(below))  # if two attributes hold it, the first names it

    def keep_lists(self) -> None:
        """Let workers share copies of long lists as they are now. So the loop can shuffle its own in place."""
        shared = [self.nodes[i].x for i in self.shared if type(self.nodes[i].x) is list]
        self.lists = {id(x): x.copy() for x in shared}

    def _why_shared(self, x: Any, kind: kinds.Kind, elements: bool) -> str | None:
        """Return why an object is shared, whatever its parts are, or None."""
        if isinstance(kind, kinds.Refused) and objects.is_open(x):
            self.refused.append(Named(self.path(x), x, "open"))
        if kind.shared is not None:
            return kind.shared
        if isinstance(kind, kinds.Generator) and objects.is_global_generator(x):
            return "global functions draw from it"
        if isinstance(kind, kinds.Memory):
            why = memory.why_apart(x)
            if why is None:
                self._memory.append(x)
            return why
        if isinstance(kind, kinds.Instance) and not (kind.any and [*kinds.Instance.parts(kind, x)]):
            if isinstance(kind, kinds.Container) and not elements:
                return f"{kind.size(x):,} elements"
            return "a constant" if type(kind) is kinds.Instance and kind.is_constant else None
        return None

    # ---- containers that are data ----

    def _is_data(self, x: Any, kind: kinds.Kind) -> bool:
        """Return whether the elements of a container are data: there is much below it, and it is no code."""
        size = kind.size(x) if isinstance(kind, kinds.Container) else 0
        if size < objects.FEW or objects.holds_code(x):
            return False
        return size > objects.ELEMENTS or self._is_heavy(x, kind)

    def _is_heavy(self, x: Any, kind: kinds.Kind) -> bool:
        """Return whether much is below a container. An element that is no array adds an eighth at most."""
        nbytes, seen, most = 0, {id(x)}, objects.BELOW_BYTES // 8
        for _, part in kind.parts(x):
            todo, size = [part], 0
            while todo and size < most:
                y = todo.pop()
                of = self.kinds[type(y)]
                if of is kinds.ATOM or id(y) in seen or type(y) in objects.LEAVES:
                    continue
                seen.add(id(y))
                size += objects.OBJECT_BYTES
                if isinstance(of, kinds.Memory):
                    size += memory.nbytes_of(y)
                elif isinstance(of, kinds.Container):
                    size += 8 * of.size(y)
                if of.shared is None:
                    todo += (p for _, p in itertools.islice(of.parts(y), objects.ELEMENTS))
            nbytes += size if isinstance(self.kinds[type(part)], kinds.Memory) else min(size, most)
            if nbytes > objects.BELOW_BYTES:
                return True
        return False

    # ---- memory ----

    def _settle(self) -> None:
        """Decide for each piece of memory whether workers share it."""
        maps = memory.shared_maps() if self._memory else []  # it takes 1 ms
        for block in memory.blocks_of(self._memory):
            why = block.why_shared(maps)
            if why is None:
                block.members = [member for member in block.members if memory.is_view(member)]
                self.blocks.update((id(member), block) for member in block.members)
            else:
                self.shared.update((id(member), why) for member in block.members)

    # ---- what is known of an object ----

    def path(self, x: Any) -> str:
        """Return the expression that reaches an object of the graph."""
        labels: list[str] = []
        node = self.nodes.get(id(x))
        while node is not None:
            labels.append(node.label)
            node = None if node.parent is None else self.nodes.get(node.parent)
        return "".join(reversed(labels))

    def generators(self, copies: Mapping[int, Any] | None = None) -> list[tuple[str, Any]]:
        """Return the random generators, each with a unique path: the graph's own, or their `copies` by id.

        The path is the expression that reaches a generator, with a number if it is not the first with that expression.
        """
        found: list[tuple[str, Any]] = []
        seen = Counter[str]()
        for i, node in self.nodes.items():
            mine = node.x if copies is None else copies.get(i)
            if isinstance(node.kind, kinds.Generator) and i not in self.shared and mine is not None:
                place = self.path(node.x)
                seen[place] += 1
                found.append((place if seen[place] == 1 else f"{place} ({seen[place]})", mine))
        return found

    def share(self, x: Any, error: Exception) -> None:
        """Share an object that cannot be copied, and note why."""
        why = str(error) if isinstance(error, kinds.NoCopy) else f"{type(error).__name__}: {error}"
        self.uncopyable.insert(0, Named(self.path(x), x, why))  # copies begin with the last
        self.shared[id(x)] = why


class Kinds(dict[type, kinds.Kind]):
    """The kind of each class. It says which parts instances have, and how they are copied."""

    def __missing__(self, cls: type) -> kinds.Kind:
        kind = self[cls] = kind_of(cls)
        return kind


def kind_of(cls: type) -> kinds.Kind:
    """Return the kind of a class."""
    if cls in kinds.EXACT:
        return kinds.EXACT[cls]
    if (names := objects.per_worker(cls)) is not None:
        return kinds.Instance(cls, names)
    if objects.is_atom(cls):
        return kinds.ATOM
    if objects.is_one_of(cls, objects.REFUSED):
        return kinds.Refused()
    if issubclass(cls, objects.UNCOPIED):  # multiprocessing makes some of these classes
        return kinds.Uncopied()
    if issubclass(cls, memory.MEMORY):
        return kinds.Memory()
    if (why := objects.shared_class(cls)) is not None:
        return kinds.Kind(why)
    if issubclass(cls, objects.GENERATORS):
        return kinds.Generator(cls)
    in_memory = issubclass(cls, io.BytesIO | io.StringIO)
    if issubclass(cls, io.IOBase | tarfile.TarFile) and not in_memory:
        return kinds.File()
    if objects.has_finalizer(cls):
        return kinds.Finalized(cls)
    base = objects.solid_base(cls)
    if base in objects.BASES:
        return kinds.Container(cls, base)
    in_c = objects.is_one_of(cls, objects.REDUCED) or not objects.is_plain(cls)
    return kinds.InC() if in_c else kinds.Instance(cls)
