"""The plan of a graph: which objects each worker gets copies of, found in one walk."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from fastload.isolation import memory, rules
from fastload.isolation.attributes import SCALARS
from fastload.isolation.classify import kind_of
from fastload.isolation.files import CannotReopen
from fastload.isolation.kinds import ATOM, Container, File, Instance, Kind, Memory, Refused


@dataclass(frozen=True, slots=True)
class Node:
    """An object of the graph, and how to reach it from its parent."""

    x: Any
    kind: Kind
    parent: int | None
    label: str


@dataclass(slots=True)
class _Tally:
    """The number and size of the objects below a container that may be data."""

    outer: int | None
    code: bool = False
    """Whether it holds code, so that it is never data."""
    objects: int = 0
    nbytes: int = 0

    def is_full(self, parts: int = 1) -> bool:
        """Return whether what lies below exceeds the container's limits divided by `parts`."""
        full = self.objects * parts > rules.BELOW or self.nbytes * parts > rules.BELOW_BYTES
        return full and not self.code


@dataclass(frozen=True, slots=True)
class Named:
    """An object that cannot be copied, and the expression that reaches it."""

    path: str
    x: Any
    why: str

    def __str__(self) -> str:
        return f"{self.path} ({type(self.x).__module__}.{type(self.x).__qualname__}: {self.why})"


class Plan:
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
        self._kinds: dict[type, Kind] = {}
        self._tallies: dict[int, _Tally] = {}
        self._memory: list[Any] = []  # arrays, tensors and buffers that may be copied
        # By id. They keep the objects alive, so that the ids stay valid.
        self.nodes: dict[int, Node] = {}
        self.shared: dict[int, str] = {}  # the reasons, by id
        self.lists: dict[int, list[Any]] = {}  # what workers have in place of shared lists
        self.shallow: set[int] = set()  # containers with attributes, whose elements are data
        # The memory of which each worker gets a copy, by the id of each object in it.
        self.blocks: dict[int, memory.Block] = {}
        self.refused: list[Named] = []
        self.uncopyable: list[Named] = []
        for label, root in roots.items():
            self._walk(root, label)
        self._settle()

    def _walk(self, root: Any, label: str) -> None:
        """Add an object and all below it to the plan."""
        # On the stack: an object, its parent, the expression from there, and the innermost container around it.
        stack: list[tuple[Any, int | None, str, int | None]] = [(root, None, label, None)]
        while stack:
            x, parent, label, holder = stack.pop()
            kind = self.kind(type(x))
            if kind is ATOM or id(x) in self.nodes:
                continue
            if holder is not None and not self._count(holder, x, kind):
                continue
            self.nodes[id(x)] = Node(x, kind, parent, label)
            why = self._why_shared(x, kind)
            if why is not None:
                self.shared[id(x)] = why
                continue
            parts = kind.parts(x)
            if isinstance(kind, Container):
                if len(x) >= rules.FEW and not self._copy_data:
                    self._tallies[id(x)] = _Tally(holder)
                    holder = id(x)
                if self._is_long(x):
                    self.shallow.add(id(x))
                    parts = kind.attribute_parts(x)
            below = [(y, id(x), way, holder) for way, y in parts if type(y) not in SCALARS]
            stack.extend(reversed(below))  # if two attributes hold it, the first names it

    @cached_property
    def weights(self) -> set[int]:
        """The ids of parameters whose memory workers share: those of models, unless an optimizer may write to them."""
        found = [node.x for node in self.nodes.values()]
        if self._copy_data or any(issubclass(type(x), torch.optim.Optimizer) for x in found):
            return set()
        models = [rules.own_dict(x) for x in found if issubclass(type(x), torch.nn.Module)]
        found = [p for own in models for p in own.get("_parameters", {}).values()]
        return {id(p) for p in found} & self.nodes.keys()

    def keep_lists(self) -> None:
        """Let workers share copies of long lists as they are now. So the loop can shuffle its own in place."""
        shared = [self.nodes[i].x for i in self.shared if type(self.nodes[i].x) is list]
        self.lists = {id(x): x.copy() for x in shared}

    def kind(self, cls: type) -> Kind:
        """Return how instances of a class are copied."""
        try:
            return self._kinds[cls]
        except KeyError:
            kind = self._kinds[cls] = kind_of(cls)
            return kind

    def _is_long(self, x: Any) -> bool:
        """Return whether a container has more elements than the limit, so that workers share it."""
        if len(x) <= rules.ELEMENTS or self._copy_data:
            return False
        return not rules.holds_code(x)

    def _why_shared(self, x: Any, kind: Kind) -> str | None:
        """Return why an object is shared, whatever its parts are, or None."""
        if isinstance(kind, Refused) and rules.is_open(x):
            self.refused.append(Named(self.path(x), x, "open"))
        if kind.shared is not None:
            return kind.shared
        if kind.generator and rules.is_global_generator(x):
            return "global functions draw from it"
        if type(kind) is Instance and kind.of_library and not self._has_attributes(x, kind):
            return "a constant"  # a sentinel, compared by identity
        if isinstance(kind, File) and x in (
            sys.stdin,
            sys.stdout,
            sys.stderr,
            sys.__stdout__,
            sys.__stderr__,
        ):
            return "a standard stream"
        if isinstance(kind, Memory):
            why = memory.why_apart(x, copy_data=self._copy_data)
            if why is None:
                self._memory.append(x)
            return why
        if isinstance(kind, Container) and self._is_long(x):
            return None if self._has_attributes(x, kind) else f"{len(x):,} elements"
        return None

    @staticmethod
    def _has_attributes(x: Any, kind: Instance) -> bool:
        return kind.attributes.any and any(True for _ in kind.attributes.parts(x))

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

    def _count(self, holder: int, x: Any, kind: Kind) -> bool:
        """Count an object in the containers around it. Return False if one of those is data."""
        nbytes = 0
        if isinstance(kind, Memory):
            nbytes = memory.nbytes_of(x)
        elif isinstance(kind, Container):
            nbytes = 8 * len(x)
        around: list[int] = []
        at: int | None = holder
        while at is not None:
            if at in self.shared:
                return False
            around.append(at)
            at = self._tallies[at].outer
        full = False
        for at in around:
            tally = self._tallies[at]
            tally.objects += 1
            tally.nbytes += nbytes
            full |= tally.is_full()
        return not (full and self._make_data(around))

    def _make_data(self, around: list[int]) -> bool:
        """Share the innermost container with most of what was counted. Return False if it holds code."""
        k, at = next((k, at) for k, at in enumerate(around) if self._tallies[at].is_full(2))
        node, tally = self.nodes[at], self._tallies[at]
        assert isinstance(node.kind, Container)
        if self._has_attributes(node.x, node.kind) or rules.holds_code(node.x):
            for outer in around[k:]:  # the outer containers hold its elements too
                self._tallies[outer].code = True
            return False
        self.shared[at] = f"{tally.objects:,} objects or {tally.nbytes / 2**20:.1f} MiB below it"
        for outer in around[k + 1 :]:
            self._tallies[outer].objects -= tally.objects
            self._tallies[outer].nbytes -= tally.nbytes
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
            if node.kind.generator and i not in self.shared and mine is not None:
                place = self.path(node.x)
                seen[place] += 1
                found.append((place if seen[place] == 1 else f"{place} ({seen[place]})", mine))
        return found

    def share(self, x: Any, error: Exception) -> None:
        """Share an object that cannot be copied, and note why."""
        why = str(error) if isinstance(error, CannotReopen) else f"{type(error).__name__}: {error}"
        self.uncopyable.append(Named(self.path(x), x, why))
        self.shared[id(x)] = why
