"""Promise: Threads read from any graph of objects and data what one process would read, with the same aliases.

Hypothesis describes a graph of objects and what each sample does to it. The same description always builds the
same graph. So a graph built for each worker, and read serially, is the model of a process: it says what each
sample of that worker sees, and which of its objects are one and the same.
"""

from __future__ import annotations

import collections
import copy
import functools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, get_worker_info

import fastload

DEADLINE_SECONDS = 30.0
SAMPLES = 6
EPOCHS = 2


# ---- what a graph is made of ----


class Plain:
    """Has three attributes: a value and what it refers to."""

    def __init__(self, value: int, first: Any, second: Any) -> None:
        self.value, self.first, self.second = value, first, second

    def store(self, value: int) -> None:
        self.value = value


class Slotted:
    """Has the same in slots: one of a private name, and one without a value."""

    __slots__ = ("__value", "__weakref__", "first", "second", "unset")

    def __init__(self, value: int, first: Any, second: Any) -> None:
        self.store(value)
        self.first, self.second = first, second

    @property
    def value(self) -> int:
        return self.__value

    def store(self, value: int) -> None:
        self.__value = value


class SlotsAndDict(Slotted):
    """Has an attribute too: its value."""

    def store(self, value: int) -> None:
        self.attribute = value

    @property
    def value(self) -> int:
        return self.attribute


class Called(Plain):
    """Is a transform."""

    def __call__(self, value: int) -> None:
        self.value = value


class Copies(Plain):
    """Copies itself, and what it holds knows it: as the nodes of OmegaConf, and of torch's graphs."""

    def __deepcopy__(self, memo: Any) -> Any:
        mine = memo[id(self)] = object.__new__(Copies)
        vars(mine).update((name, copy.deepcopy(x, memo)) for name, x in vars(self).items())
        return mine


class Hashed(Plain):
    """Equals what has the same name; an empty copy has none."""

    def __init__(self, value: int, first: Any, second: Any) -> None:
        super().__init__(value, first, second)
        self.name = "hashed"

    def __hash__(self) -> int:
        return hash(self.name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Hashed) and self.name == other.name


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass(frozen=True, slots=True)
class Frozen:
    first: Any
    second: Any


class Rows(list[Any]):
    """A list with an attribute, and with methods that would not fill a copy as it was."""

    first: Any = None

    def append(self, row: Any) -> None:
        super().extend([row, row])

    extend = __iadd__ = append  # type: ignore[assignment]


class Config(dict[str, Any]):
    """A dict whose keys are attributes, too."""

    def __init__(self, **items: Any) -> None:
        super().__init__(**items)
        self.__dict__ = self


def closure_over(value: int, first: Any, second: Any) -> Callable[..., Any]:
    def call(do: str = "read", new: Any = None) -> Any:
        nonlocal value, first
        if do == "write":
            value = new
        elif do == "link":
            first = new
        return value, first, second

    return call


def function_with(value: int, given: Any, more: Any) -> Callable[..., Any]:
    def call(first: Any = given, *, second: Any = more) -> tuple[Any, Any]:
        return first, second

    call.value, call.held = value, more  # type: ignore[attr-defined]
    return call


def give(*arguments: Any, **named: Any) -> Any:
    return arguments, named


INSTANCES = (Plain, Slotted)  # and their subclasses


# ---- a graph from its description ----


@dataclass(frozen=True)
class Node:
    """One object: its kind, a number in it, and the numbers that choose what it refers to."""

    kind: str
    value: int
    first: int
    second: int


@dataclass(frozen=True)
class Description:
    """A graph, and for each sample its steps: what to do, where, and with which number."""

    nodes: tuple[Node, ...]
    attributes: tuple[int, ...]
    script: tuple[tuple[tuple[str, int, int], ...], ...]


class Builder:
    """Makes the objects of one graph, in the order of their description."""

    def __init__(self, dataset: Graph) -> None:
        self.made: list[Any] = [dataset]

    def one(self, choice: int) -> Any:
        return self.made[choice % len(self.made)]

    def of(self, kinds: tuple[type, ...], choice: int, otherwise: Callable[[], Any]) -> Any:
        """Return one of the objects made so far of these types, no data, or a new one of its own."""
        found = [x for x in self.made if isinstance(x, kinds) and not is_data(x)]
        return found[choice % len(found)] if found else otherwise()

    def array(self, choice: int) -> np.ndarray:
        return self.of((np.ndarray,), choice, lambda: np.arange(8))

    def tensor(self, choice: int) -> torch.Tensor:
        return self.of((torch.Tensor,), choice, lambda: torch.arange(8))

    def instance(self, choice: int) -> Any:
        return self.of(INSTANCES, choice, lambda: Plain(7, None, None))

    def make(self, node: Node) -> Any:
        return KINDS[node.kind](self, node.value, node)


def instance_of(kind: type) -> Callable[[Builder, int, Node], Any]:
    return lambda b, value, node: kind(value, b.one(node.first), b.one(node.second))


def is_data(x: Any) -> bool:
    """Return whether all workers share it, so that no sample may change it."""
    return isinstance(x, list) and len(x) > 1_000


def read_only(a: np.ndarray) -> np.ndarray:
    a = a.view()
    a.flags.writeable = False
    return a


KINDS: dict[str, Callable[[Builder, int, Node], Any]] = {
    **{c.__name__: instance_of(c) for c in (Plain, Slotted, SlotsAndDict)},
    **{c.__name__: instance_of(c) for c in (Called, Copies, Hashed)},
    "list": lambda b, value, node: [value, b.one(node.first), b.one(node.second)],
    "rows": lambda b, value, node: Rows([value, b.one(node.first)]),
    "deque": lambda b, value, node: collections.deque([value, b.one(node.first)], maxlen=9),
    "dict": lambda b, value, node: {"value": value, "first": b.one(node.first)},
    "dict by key": lambda b, value, node: {b.instance(node.first): b.one(node.second)},
    "set": lambda b, value, node: {value, b.instance(node.first)},
    "frozenset": lambda b, value, node: frozenset([value, b.instance(node.first)]),
    "tuple": lambda b, value, node: (b.one(node.first), value, b.one(node.second)),
    "attribute dict": lambda b, value, node: Config(value=value, first=b.one(node.first)),
    "frozen": lambda b, value, node: Frozen(b.one(node.first), b.one(node.second)),
    "named tuple": lambda b, value, node: Pair(b.one(node.first), b.one(node.second)),
    "closure": lambda b, value, node: closure_over(value, b.one(node.first), b.one(node.second)),
    "function": lambda b, value, node: function_with(value, b.one(node.first), b.one(node.second)),
    "partial": lambda b, value, node: functools.partial(
        give, b.one(node.first), key=b.one(node.second)
    ),
    "bound method": lambda b, value, node: b.instance(node.first).store,
    "bound append": lambda b, value, node: b.of((list,), node.first, lambda: [0]).append,
    "array": lambda b, value, node: np.arange(value, value + 8),
    "grid": lambda b, value, node: np.arange(value, value + 8).reshape(2, 4).T,
    "view": lambda b, value, node: b.array(node.first)[1:],
    "reversed view": lambda b, value, node: b.array(node.first)[::-1],
    "row": lambda b, value, node: np.atleast_2d(b.array(node.first))[0],
    "read-only view": lambda b, value, node: read_only(b.array(node.first)),
    "array of a tensor": lambda b, value, node: b.tensor(node.first).numpy(),
    "tensor": lambda b, value, node: torch.arange(value, value + 8),
    "tensor view": lambda b, value, node: b.tensor(node.first).flatten()[1:],
    "tensor of an array": lambda b, value, node: tensor_of(b.array(node.first)),
    "data": lambda b, value, node: [value] * 1_001,
    "read-only data": lambda b, value, node: read_only(np.arange(value, value + 4).copy()),
    "lock": lambda b, value, node: threading.Lock(),
}


def tensor_of(a: np.ndarray) -> torch.Tensor:
    """Return a tensor of the array's memory, or, where torch makes none, of new memory."""
    return torch.from_numpy(a if a.flags.writeable and min(a.strides, default=1) > 0 else a.copy())


class Graph(Dataset[Any]):
    """A graph as a dataset. A sample does its steps, and returns what the whole graph is then."""

    def __init__(self, description: Description) -> None:
        self.meeting: threading.Barrier | None = None
        self.script = description.script
        builder = Builder(self)
        for node in description.nodes:
            builder.made.append(builder.make(node))
        for made, node in zip(builder.made[1:], description.nodes, strict=True):
            link(made, builder.one(node.first + node.second))  # later ones too, and so cycles
        self.parts = [builder.one(choice) for choice in description.attributes]
        for place, part in enumerate(self.parts):
            setattr(self, f"part{place}", part)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        if self.meeting is not None:
            self.meeting.wait(DEADLINE_SECONDS)  # so each worker reads as many samples
        worker = get_worker_info()
        assert worker is not None
        assert worker.dataset is self
        return worker.id, index, self.seen_after(index)

    def seen_after(self, index: int) -> Any:
        for do, place, value in self.script[index]:
            nodes = reached(self)
            node = nodes[place % len(nodes)]
            if do == "write":
                write(node, value)
            else:
                link(node, nodes[value % len(nodes)])
        return shape_of(self)


# ---- what code can see of a graph, and do to it ----


def parts_of(x: Any) -> Any:
    """Return what an object refers to, in an order that all equal graphs have in common."""
    if isinstance(x, Graph):
        return [x.parts, *x.parts]
    if isinstance(x, INSTANCES):
        also = [x.transform] if hasattr(type(x), "transform") else []
        return [x.first, x.second, *also]
    if isinstance(x, Frozen):
        return [x.first, x.second]
    if isinstance(x, Rows):
        return [*x, x.first]
    if isinstance(x, dict):
        return [*x, *x.values()]
    if isinstance(x, functools.partial):
        return [*x.args, *x.keywords.values()]
    if hasattr(x, "__self__"):
        return [x.__self__]
    if callable(x):
        return [*x(), *vars(x).values()]
    if isinstance(x, (list, tuple, set, frozenset, collections.deque)):
        return [] if is_data(x) else x
    return []


def is_node(x: Any) -> bool:
    return x is not None and not isinstance(x, (int, str))


def reached(graph: Graph) -> list[Any]:
    """Return all objects of a graph, each once, in an order that all equal graphs have in common."""
    found, seen = [graph], {id(graph)}
    for x in found:
        for part in parts_of(x):
            if is_node(part) and id(part) not in seen:
                seen.add(id(part))
                found.append(part)
    return found


def value_of(x: Any) -> Any:
    if isinstance(x, (np.ndarray, torch.Tensor)):
        return x.tolist(), str(x.dtype)
    if is_data(x):
        return x[0], len(x)
    return getattr(x, "value", None)  # of an instance or a function


def write(x: Any, value: int) -> None:
    """Store a number in an object, in the way that its kind allows; data is left alone."""
    if isinstance(x, INSTANCES):
        x.store(value)
        if hasattr(type(x), "transform"):
            x.transform(value)
    elif isinstance(x, (np.ndarray, torch.Tensor)):
        if isinstance(x, torch.Tensor) or x.flags.writeable:
            x[(0,) * x.ndim] = value
    elif isinstance(x, dict):
        x["value"] = value
    elif isinstance(x, set):
        x.add(value)
    elif isinstance(x, (list, collections.deque)):
        if not is_data(x):
            x[0] = value
    elif isinstance(x, functools.partial) or not callable(x):
        pass
    elif hasattr(x, "__self__"):
        x(value)
    elif hasattr(x, "value"):
        x.value = value
    else:
        x("write", value)


def link(x: Any, target: Any) -> None:
    """Let an object refer to another one, in the way that its kind allows."""
    if isinstance(x, INSTANCES):
        x.second = target
    elif isinstance(x, Rows):
        x.first = target
    elif isinstance(x, dict):
        x["second"] = target
    elif isinstance(x, (list, collections.deque)):
        if not is_data(x):
            x.append(target)
    elif callable(x) and getattr(x, "__name__", "") == "call" and not hasattr(x, "value"):
        x("link", target)


def memory_of(x: Any) -> tuple[int, int] | None:
    """Return where the bytes of an object begin and end, or None if it has none."""
    if isinstance(x, torch.Tensor):
        x = x.numpy()
    if not isinstance(x, np.ndarray) or not x.size:
        return None
    bounds = np.lib.array_utils.byte_bounds if hasattr(np.lib, "array_utils") else np.byte_bounds
    return bounds(x)  # type: ignore[no-any-return]


def overlaps(nodes: list[Any]) -> Iterator[tuple[int, int, int, int]]:
    """Yield which objects share bytes: their places in the list, and how far apart they begin and end."""
    bounds = {k: memory for k, x in enumerate(nodes) if (memory := memory_of(x))}
    for i, (start, end) in bounds.items():
        for j, (other_start, other_end) in bounds.items():
            if i < j and start < other_end and other_start < end:
                yield i, j, other_start - start, other_end - end


def shape_of(graph: Graph) -> Any:
    """Return all that code can see of a graph: types, values, what refers to what, whose memory is one."""
    nodes = reached(graph)
    place = {id(x): k for k, x in enumerate(nodes)}
    objects = []
    for x in nodes:
        parts = [place[id(part)] if is_node(part) else repr(part) for part in parts_of(x)]
        if isinstance(x, (set, frozenset)):
            parts.sort(key=repr)
        objects.append((type(x).__name__, value_of(x), parts))
    return objects, list(overlaps(nodes))


# ---- the descriptions, the model and the tests ----

NUMBERS = st.integers(0, 60)
NODES = st.builds(Node, st.sampled_from(sorted(KINDS)), NUMBERS, NUMBERS, NUMBERS)
STEPS = st.lists(
    st.tuples(st.sampled_from(["write", "write", "link"]), NUMBERS, NUMBERS), max_size=5
)


def tuples_of(lists: st.SearchStrategy[list[Any]]) -> st.SearchStrategy[tuple[Any, ...]]:
    return lists.map(tuple)


def every_kind(order: int = 1) -> Description:
    """Return a graph with each kind twice: made of an instance that refers to it, which is hashed by its name or not.

    So it can be made only after that instance, while the instance is not complete without it. In order -1, who walks
    the graph comes to it first.
    """
    nodes: list[Node] = []
    for holder in ("Plain", "Hashed"):
        for kind in sorted(KINDS):
            nodes.append(Node(holder, 1, 0, len(nodes) + 2))  # the one after it
            nodes.append(Node(kind, 2, -1, -1))  # the one before it
    places = range(1, len(nodes) + 1)
    steps = [[("write", at, 10 + s) for at in places if at % 3 == s % 3] for s in range(SAMPLES)]
    return Description(tuple(nodes), tuple(places[::order]), tuple(map(tuple, steps)))


DESCRIPTIONS = st.builds(
    Description,
    nodes=tuples_of(st.lists(NODES, min_size=1, max_size=14)),
    attributes=tuples_of(st.lists(NUMBERS, min_size=1, max_size=5)),
    script=tuples_of(st.lists(tuples_of(STEPS), min_size=SAMPLES, max_size=SAMPLES)),
)


def read(dataset: Graph, workers: int, **options: Any) -> list[list[tuple[int, int, Any]]]:
    """Return, for each epoch, the worker, the index and the graph of each sample, in the order of the loader."""
    # Shuffled, so that no worker reads ahead into the next epoch.
    options |= {"shuffle": True, "generator": torch.Generator().manual_seed(0)}
    options |= {"batch_size": None, "num_workers": workers, "collate_fn": give_back}
    with fastload.DataLoader(dataset, **options) as loader:
        return [list(loader) for _ in range(EPOCHS)]


def give_back(sample: Any) -> Any:
    return sample


def assert_as_in_processes(
    description: Description, epochs: list[list[tuple[int, int, Any]]], *, persistent: bool
) -> None:
    """Compare what workers saw with graphs of their own, read serially in the same order."""
    graphs: dict[int, Graph] = {}
    for samples in epochs:
        if not persistent:
            graphs.clear()
        for worker, index, seen in samples:
            graph = graphs.setdefault(worker, Graph(description))
            assert seen == graph.seen_after(index), (worker, index)


@example(every_kind(), 2, False)
@example(every_kind(-1), 2, False)
@given(DESCRIPTIONS, st.sampled_from([1, 2, 3]), st.booleans())
def test_threads_see_what_processes_would(
    description: Description, workers: int, persistent: bool
) -> None:
    dataset = Graph(description)
    dataset.meeting = threading.Barrier(workers)
    epochs = read(dataset, workers, persistent_workers=persistent, copy_dataset="state")
    assert [len({worker for worker, *_ in one}) for one in epochs] == [workers] * EPOCHS
    assert_as_in_processes(description, epochs, persistent=persistent)
    changed = "the main process's objects changed"
    assert shape_of(dataset) == shape_of(Graph(description)), changed


@settings(max_examples=4)
@given(DESCRIPTIONS, st.booleans())
def test_the_model_is_what_processes_do(description: Description, persistent: bool) -> None:
    processes = {"worker_method": "torch", "multiprocessing_context": "fork"}
    epochs = read(Graph(description), 2, persistent_workers=persistent, **processes)
    assert_as_in_processes(description, epochs, persistent=persistent)
