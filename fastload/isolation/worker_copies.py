"""The objects that each worker of a loader owns, and those that all workers share."""

from __future__ import annotations

import io
import mmap
import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Any, Literal

import numpy as np
import torch

from fastload._kit.torch_private import is_shared
from fastload.errors import DatasetCopyError, ModuleStateWarning, SharedStateWarning
from fastload.isolation.classify import File, Refused, kind_of
from fastload.isolation.code import ModuleObject, module_level
from fastload.isolation.copies import make_copies
from fastload.isolation.kinds import Instance, Protocolled
from fastload.isolation.memory import IN_SHARED_MEMORY
from fastload.isolation.module_state import ModuleState, original
from fastload.isolation.plan import Named, Plan
from fastload.isolation.rules import is_open, own_dict
from fastload.isolation.users import is_users_module
from fastload.isolation.watch import is_descriptor

CopyDataset = Literal["state"] | bool


@dataclass(frozen=True, slots=True)
class WorkerCopies:
    """The objects that one worker uses in place of the loader's."""

    dataset: Any
    collate_fn: Any
    init_fn: Callable[[int], None] | None
    watched: Sequence[tuple[str, Any]] = ()
    """Objects that samples may change although all workers share them, each with its path in code."""
    watched_modules: Sequence[tuple[str, Any]] = ()
    """Module-level objects and classes that samples may change, each with its path in code."""
    modules: ModuleState = field(default_factory=lambda: ModuleState([]))
    module_copies: Mapping[int, Any] = field(default_factory=dict)
    """The worker's own module-level objects, by the ids of the originals."""
    generators: Sequence[tuple[str, Any]] = ()
    """The random generators in the copies, each with its path."""

    def current_generators(self) -> Sequence[tuple[str, Any]]:
        """Return the generators in the copies now: `init_fn` or a sample may have replaced some."""
        roots = {
            "dataset": self.dataset,
            "collate_fn": self.collate_fn,
            "worker_init_fn": self.init_fn,
        }
        named = dict(self.modules.named())
        roots |= {path: self.module_copies.get(id(x), x) for path, x in named.items()}
        return Plan(roots, left_out={id(x) for x in named.values()}).generators()

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Let this thread use its own module-level objects in the block."""
        _inside.worker = True
        try:
            self.modules.install()
            self.modules.enter(self.module_copies)
            yield
        finally:
            _inside.worker = False
            self.modules.remove()


class _Inside(threading.local):
    """Whether this thread is a worker."""

    worker = False

    def is_worker(self) -> bool:
        return self.worker


_inside = _Inside()


class Isolation:
    """Copies a loader's objects for its workers. `iter()` creates it, and calls `own()` for each worker.

    Args:
        dataset, collate_fn, init_fn: the loader's. They are copied as one graph.
        copy_dataset: "state", True to copy data too, or False to share everything.
    """

    def __init__(
        self,
        dataset: Any,
        collate_fn: Any,
        init_fn: Callable[[int], None] | None,
        *,
        copy_dataset: CopyDataset,
    ) -> None:
        roots = {"dataset": dataset, "collate_fn": collate_fn, "worker_init_fn": init_fn}
        self._originals = WorkerCopies(dataset, collate_fn, init_fn)
        has_lmdb = find_spec("lmdb") is not None
        if has_lmdb:
            from fastload.isolation import lmdb_once  # only if lmdb is installed

            lmdb_once.install(is_worker=_inside.is_worker)
        self._copies = copy_dataset is not False
        self.plan = Plan(roots if self._copies else {}, copy_data=copy_dataset is True)
        self._modules = ModuleState(
            module_level(roots.values()) if self._copies else [],
            (node.x for node in self.plan.nodes.values()),
        )
        for path, x in self._modules.named():
            self.plan.add(path, x)
        if has_lmdb:
            for node in self.plan.nodes.values():
                # A class may leave its environment out of its copies.
                for x in (node.x, *own_dict(node.x).values()):
                    lmdb_once.adopt(x)
        self._unwatchable = [
            found
            for found in self._modules.unreached
            if self._is_handle(found) or found in self._modules.unroutable
        ]

    def check(self) -> None:
        """Raise `DatasetCopyError` if an object of the graph can neither be copied nor shared."""
        if self.plan.refused:
            raise DatasetCopyError(_refusal(self.plan.refused))

    def originals(self) -> WorkerCopies:
        """Return the objects for a loop without workers: the loader's own, not copied."""
        return replace(self._originals, generators=self.plan.generators())

    def in_own_process(self) -> WorkerCopies:
        """Return the objects for a worker process. It can key the generators that threads would have to share."""
        own = self.originals()
        shared = [
            (f"{found.module}.{found.name}", found.value)
            for found in self.unreached
            if getattr(kind_of(original(type(found.value))), "generator", False)
        ]
        return replace(own, generators=[*own.generators, *shared])

    def hears_messages(self) -> bool:
        """Return whether code outside of the workers can tell samples something while workers own their copies."""
        if not self._copies or IN_SHARED_MEMORY in self.plan.shared.values():
            return True
        found = [node.x for node in self.plan.nodes.values()]
        # A class may share its attributes. Then the plan does not have them.
        held = [value for x in found for value in own_dict(x).values()]
        members = [x for value in held if type(value) in (tuple, list) for x in value[:_MEMBERS]]
        return any(map(_brings_messages, (*found, *held, *members)))

    def _is_handle(self, found: ModuleObject) -> bool:
        """Return whether a module-level object is a handle, whose state `watch` cannot see. Refuse an open one."""
        x: Any = found.value
        kind = kind_of(original(type(x)))
        if isinstance(kind, Refused) and is_open(x):
            self.plan.refused.append(Named(f"{found.module}.{found.name}", x, "open"))
        if isinstance(kind, File):
            return not x.closed and not kind.is_standard(x)
        if not isinstance(kind, Protocolled) or kind.generator or kind.memory or kind.plain:
            return False
        return type(x).__module__.partition(".")[0] not in sys.stdlib_module_names

    @property
    def unreached(self) -> Sequence[ModuleObject]:
        """The module-level objects that all workers share."""
        return self._modules.unreached

    @property
    def initialises(self) -> bool:
        """Whether workers begin with a `worker_init_fn`."""
        return self._originals.init_fn is not None

    def own(self, *, watching: bool = False) -> WorkerCopies:
        """Return the objects for the next worker. With `watching`, they list what the worker must watch.

        Raises `DatasetCopyError` if an object of the graph can neither be copied nor shared.
        """
        self.check()
        if not self._copies:
            watched = [("dataset", self._originals.dataset)] if watching else ()
            return replace(self._originals, watched=watched)
        copies, module_copies, generators = make_copies(self.plan, self._modules.roots)
        module_copies |= {id(x): copies[path] for path, x in self._modules.cached.items()}
        return WorkerCopies(
            copies["dataset"],
            copies["collate_fn"],
            copies["worker_init_fn"],
            watched=self._watched() if watching else (),
            watched_modules=[
                (f"{found.module}.{found.name}", found)
                for found in self._modules.unreached
                if found not in self._unwatchable
            ]
            + self._classes(),
            modules=self._modules,
            module_copies=module_copies,
            generators=generators,
        )

    def _classes(self) -> list[tuple[str, Any]]:
        """Return the user's classes that have objects in the graph: samples may store values in these classes."""
        kinds = {original(type(node.x)) for node in self.plan.nodes.values()}
        classes = {k for kind in kinds for k in kind.__mro__ if is_users_module(k.__module__)}
        return [(f"{k.__module__}.{k.__qualname__}", k) for k in classes]

    def _watched(self) -> list[tuple[str, Any]]:
        """Return the objects in the graph that samples may change although no worker has its own copy."""
        plan = self.plan
        found: list[tuple[str, Any]] = []
        for i, node in plan.nodes.items():
            if i in plan.shared and isinstance(node.x, _CHANGING):
                found.append((plan.path(node.x), node.x))
            elif i not in plan.shared and isinstance(node.kind, Instance):
                found += [
                    (f"{plan.path(node.x)}.{name}", value)
                    for name, value in node.kind.attributes.items(node.x)
                    if type(value) is int and is_descriptor(name, value)
                ]
        return found

    def shared_state(self) -> str:
        """Return a clause that names the first object whose state all workers share, or ""."""
        if not self._copies:
            return "copy_dataset=False lets all workers share one dataset"
        paths = [named.path for named in self.plan.uncopyable]
        paths += [f"{found.module}.{found.name}" for found in self._unwatchable]
        return f"all workers share {paths[0]}, which is not copied" if paths else ""

    def warn_of_shared(self, stacklevel: int) -> None:
        """Warn of objects that could not be copied. Call this after the first `own()`, which finds them."""
        for found in self._unwatchable:
            warnings.warn(
                f"fastload: samples use the module-level `{found.module}.{found.name}` "
                f"({type(found.value).__qualname__}), which all workers share: samples can be wrong. Make it an "
                "attribute of the dataset, of which each worker gets its own copy, or create it for each sample.",
                ModuleStateWarning,
                stacklevel=stacklevel + 1,
            )
        if not self.plan.uncopyable:
            return
        named = "; ".join(map(str, self.plan.uncopyable[:8]))
        more = len(self.plan.uncopyable) - 8
        warnings.warn(
            f"fastload: all workers share what cannot be copied: {named}{f'; and {more} more' if more > 0 else ''}. If "
            "such an object keeps a position or a value between two calls, samples can be wrong. Create it at the "
            'first sample, or pass num_workers=0. worker_method="process" helps, unless it is an open file.',
            SharedStateWarning,
            stacklevel=stacklevel + 1,
        )


def _brings_messages(x: Any) -> bool:
    """Return whether code elsewhere writes to `x`, or calls it before an epoch.

    That is a shared tensor, a `multiprocessing.Value` or Queue, a manager's proxy, or an object with `set_epoch()`.
    """
    kind = type(x)
    try:
        return (
            (isinstance(x, torch.Tensor) and is_shared(x))
            or hasattr(kind, "set_epoch")
            or any(base.__module__.partition(".")[0] == "multiprocessing" for base in kind.__mro__)
        )
    except Exception:  # a sparse tensor has no storage, and a metaclass may raise
        return True


_MEMBERS = 64
"""The members of a tuple or list that are looked at."""


_CHANGING = (io.IOBase, mmap.mmap, np.ndarray, torch.Tensor, list, dict, set, deque)


def _refusal(refused: Sequence[Named]) -> str:
    first = refused[0]
    what = f"{type(first.x).__module__}.{type(first.x).__qualname__}"
    others = (
        f" The same holds for {', '.join(named.path for named in refused[1:])}."
        if len(refused) > 1
        else ""
    )
    return (
        f"{first.path} is an open {what}. It cannot be copied for each worker, and threads must not share it.{others} "
        "Open it at the first sample, not in __init__. If a sample was read before the loop, set the attribute to "
        "None again. Worker processes need that too, because forks share an open file. Or pass num_workers=0."
    )
