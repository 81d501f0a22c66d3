"""The graph of a loader's objects: which each worker thread gets a copy of, found in one walk."""

from __future__ import annotations

import io
import struct
import sys
import tarfile
import types
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import Any

import numpy as np
import torch

from fastload.safety import kinds, memory, objects
from fastload.safety.callables import EXACT
from fastload.safety.files import CannotReopen


@dataclass(frozen=True, slots=True)
class Node:
    """An object of the graph, and how to reach it from its parent."""

    x: Any
    kind: kinds.Kind
    parent: int | None
    label: str


@dataclass(slots=True)
class _Tally:
    """The number and size of the objects below a container that may be data."""

    outer: int | None
    objects: float = 0
    nbytes: float = 0

    def add(self, objects: float, nbytes: float) -> None:
        self.objects += objects
        self.nbytes += nbytes

    def is_full(self, parts: int = 1) -> bool:
        """Return whether what lies below exceeds the container's limits divided by `parts`."""
        return self.objects * parts > objects.BELOW or self.nbytes * parts > objects.BELOW_BYTES


@dataclass(frozen=True, slots=True)
class Named:
    """An object that cannot be copied, and the expression that reaches it."""

    path: str
    x: Any
    why: str

    def __str__(self) -> str:
        return f"{self.path} ({type(self.x).__module__}.{type(self.x).__qualname__}: {self.why})"


class Graph:
    """Which objects of a graph each worker gets its own copy of, and which all workers share.

    Args:
        roots: the objects at which the graph begins, by name. They are copied as one graph: if two of them hold the
            same object, their copies hold the same copy.
        copy_data: copy data too, whatever its size.

    It reads the graph once, in the caller's thread: nothing may change it meanwhile.
    """

    def __init__(self, roots: Mapping[str, Any], *, copy_data: bool = False) -> None:
        self.roots = roots
        self._copy_data = copy_data
        self.kinds = Kinds()
        self._tallies: dict[int, _Tally] = {}
        self._memory: list[Any] = []  # arrays, tensors and buffers that may be copied
        # By id. They keep the objects alive, so that the ids stay valid.
        self.nodes: dict[int, Node] = {}
        self.shared: dict[int, str] = {}  # the reasons, by id
        self.lists: dict[int, list[Any]] = {}  # what workers have in place of shared lists
        # The memory of which each worker gets a copy, by the id of each object in it.
        self.blocks: dict[int, memory.Block] = {}
        self.refused: list[Named] = []
        self.uncopyable: list[Named] = []
        for label, root in roots.items():
            self._walk(root, label)
        self._settle()

    def _walk(self, root: Any, label: str) -> None:
        """Add an object and all below it to the graph."""
        # On the stack: an object, its parent, the expression from there, and the innermost container around it.
        stack: list[tuple[Any, int | None, str, int | None]] = [(root, None, label, None)]
        while stack:
            x, parent, label, holder = stack.pop()
            kind = self.kinds[type(x)]
            if kind is kinds.ATOM or id(x) in self.nodes:
                continue
            if holder is not None and not self._count(holder, x, kind):
                continue
            self.nodes[id(x)] = Node(x, kind, parent, label)
            why = self._why_shared(x, kind)
            if why is not None:
                self.shared[id(x)] = why
                continue
            if isinstance(kind, kinds.Container) and len(x) >= objects.FEW and not self._copy_data:
                self._tallies[id(x)] = _Tally(holder)
                holder = id(x)
            parts = _attributes(x, kind) if self._is_long(x, kind) else kind.parts(x)
            below = [(y, id(x), way, holder) for way, y in parts if type(y) not in objects.LEAVES]
            stack.extend(reversed(below))  # if two attributes hold it, the first names it

    @cached_property
    def weights(self) -> set[int]:
        """The ids of parameters whose memory workers share: those of models, unless an optimizer may write to them."""
        found = [node.x for node in self.nodes.values()]
        if self._copy_data or any(issubclass(type(x), torch.optim.Optimizer) for x in found):
            return set()
        models = [objects.own_dict(x) for x in found if issubclass(type(x), torch.nn.Module)]
        found = [p for own in models for p in own.get("_parameters", {}).values()]
        return {id(p) for p in found} & self.nodes.keys()

    def keep_lists(self) -> None:
        """Let workers share copies of long lists as they are now. So the loop can shuffle its own in place."""
        shared = [self.nodes[i].x for i in self.shared if type(self.nodes[i].x) is list]
        self.lists = {id(x): x.copy() for x in shared}

    def _why_shared(self, x: Any, kind: kinds.Kind) -> str | None:
        """Return why an object is shared, whatever its parts are, or None."""
        if isinstance(kind, kinds.Refused) and objects.is_open(x):
            self.refused.append(Named(self.path(x), x, "open"))
        if kind.shared is not None:
            return kind.shared
        if isinstance(kind, kinds.Generator) and objects.is_global_generator(x):
            return "global functions draw from it"
        if type(kind) is kinds.Instance and kind.is_constant and not _attributes(x, kind):
            return "a constant"
        if isinstance(kind, kinds.File) and x in _streams():
            return "a standard stream"
        if isinstance(kind, kinds.Memory):
            why = memory.why_apart(x, copy_data=self._copy_data)
            if why is None:
                self._memory.append(x)
            return why
        is_data = self._is_long(x, kind) and not _attributes(x, kind)
        return f"{len(x):,} elements" if is_data else None

    def _is_long(self, x: Any, kind: kinds.Kind) -> bool:
        """Return whether the elements of a container are data: there are many, and they are no code."""
        few = not isinstance(kind, kinds.Container) or len(x) <= objects.ELEMENTS
        return not (few or self._copy_data or objects.holds_code(x))

    def _settle(self) -> None:
        """Decide for each piece of memory whether workers share it."""
        process = memory.ProcessMemory()
        for block in memory.blocks_of(self._memory):
            why = block.why_shared(process, copy_data=self._copy_data)
            if why is None:
                block.members = [member for member in block.members if memory.is_view(member)]
                self.blocks.update((id(member), block) for member in block.members)
            else:
                self.shared.update((id(member), why) for member in block.members)

    # ---- containers that are data by what is below them ----

    def _count(self, holder: int, x: Any, kind: kinds.Kind) -> bool:
        """Count an object in the containers around it. Return False if one of those is data."""
        around: list[int] = []
        at: int | None = holder
        while at is not None:
            if at in self.shared:
                return False
            around.append(at)
            at = self._tallies[at].outer
        nbytes = memory.nbytes_of(x) if isinstance(kind, kinds.Memory) else 0
        nbytes = 8 * len(x) if isinstance(kind, kinds.Container) else nbytes
        for at in around:
            self._tallies[at].add(1, nbytes)
        full = any(self._tallies[at].is_full() for at in around)
        return not (full and self._make_data(around))

    def _make_data(self, around: list[int]) -> bool:
        """Share the innermost container with most of what was counted. Return False if it holds code."""
        k, at = next((k, at) for k, at in enumerate(around) if self._tallies[at].is_full(2))
        node, tally = self.nodes[at], self._tallies[at]
        if _attributes(node.x, node.kind) or objects.holds_code(node.x):
            for outer in around[k:]:  # the outer containers hold its elements too
                self._tallies[outer].add(-inf, -inf)
            return False
        self.shared[at] = f"{tally.objects:,} objects or {tally.nbytes / 2**20:.1f} MiB below it"
        for outer in around[k + 1 :]:
            self._tallies[outer].add(-tally.objects, -tally.nbytes)
        return True

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
        why = str(error) if isinstance(error, CannotReopen) else f"{type(error).__name__}: {error}"
        self.uncopyable.insert(0, Named(self.path(x), x, why))
        self.shared[id(x)] = why


def _streams() -> tuple[Any, ...]:
    return sys.stdin, sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__


def _attributes(x: Any, kind: Any) -> list[kinds.Part]:
    return [*kinds.Instance.parts(kind, x)] if kind.any else []


_ATOMS = (
    *(objects.LEAVES - {object}),
    *objects.CONSTANTS,
    *(type, property, staticmethod, classmethod, struct.Struct, np.ufunc, torch.layout),
    *(torch.finfo, torch.iinfo, torch.jit.ScriptFunction, types.CodeType, types.GenericAlias),
    *(types.GetSetDescriptorType, types.MemberDescriptorType, types.MethodDescriptorType),
    *(types.ModuleType, types.NotImplementedType, types.UnionType, types.WrapperDescriptorType),
)


class Kinds(dict[type, kinds.Kind]):
    """The kind of each class. It says which parts instances have, and how they are copied."""

    def __missing__(self, cls: type) -> kinds.Kind:
        kind = self[cls] = kind_of(cls)
        return kind


def kind_of(cls: type) -> kinds.Kind:
    """Return the kind of a class."""
    if cls in EXACT:
        return EXACT[cls]
    if (names := objects.per_worker(cls)) is not None:
        return kinds.Instance(cls, names)
    if cls is object or issubclass(cls, _ATOMS):
        return kinds.ATOM
    if objects.is_one_of(cls, objects.REFUSED):
        return kinds.Refused()
    if issubclass(cls, memory.MEMORY):  # multiprocessing makes some of these classes
        return kinds.Memory()
    if (why := objects.shared_class(cls)) is not None:
        return kinds.Kind(why)
    if issubclass(cls, objects.GENERATORS):
        return kinds.Generator(cls)
    in_memory = issubclass(cls, io.BytesIO | io.StringIO)
    if issubclass(cls, io.IOBase | tarfile.TarFile) and not in_memory:
        return kinds.File()
    base = kinds.solid_base(cls)
    if base in kinds.BASES:
        return kinds.Container(cls, base)
    in_c = objects.is_one_of(cls, objects.REDUCED) or not kinds.is_plain(cls)
    return kinds.InC(cls) if in_c else kinds.Instance(cls)
