"""The objects that each worker of a loader owns, and those that all workers share."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from fastload._kit.torch_private import is_shared
from fastload.errors import DatasetCopyError, SharedStateWarning
from fastload.safety.copies import make_copies
from fastload.safety.memory import IN_SHARED_MEMORY
from fastload.safety.plan import Named, Plan
from fastload.safety.rules import own_dict

CopyDataset = Literal["state"] | bool


@dataclass(frozen=True, slots=True)
class WorkerCopies:
    """The objects that one worker uses in place of the loader's."""

    dataset: Any
    collate_fn: Any
    init_fn: Callable[[int], None] | None
    generators: Sequence[tuple[str, Any]] = ()
    """The random generators in the copies, each with its path."""

    def current_generators(self) -> Sequence[tuple[str, Any]]:
        """Return the generators in the copies now: `init_fn` or a sample may have replaced some."""
        return Plan(self.roots()).generators()

    def roots(self) -> dict[str, Any]:
        """Return what the user gave, by the names of the arguments."""
        names = "dataset", "collate_fn", "worker_init_fn"
        return dict(zip(names, (self.dataset, self.collate_fn, self.init_fn), strict=True))


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
        self._originals = WorkerCopies(dataset, collate_fn, init_fn)
        self._copies = copy_dataset is not False
        roots = self._originals.roots() if self._copies else {}
        self.plan = Plan(roots, copy_data=copy_dataset is True)

    def check(self) -> None:
        """Raise `DatasetCopyError` if an object of the graph can neither be copied nor shared."""
        if self.plan.refused:
            raise refusal(self.plan.refused, "threads must not share it")

    def originals(self) -> WorkerCopies:
        """Return the objects for a loop without workers: the loader's own, not copied."""
        return replace(self._originals, generators=self.plan.generators())

    def hears_messages(self) -> bool:
        """Return whether code outside of the workers can tell samples something while workers own their copies."""
        if not self._copies or IN_SHARED_MEMORY in self.plan.shared.values():
            return True
        found = [node.x for node in self.plan.nodes.values()]
        # A class may share its attributes. Then the plan does not have them.
        held = [value for x in found for value in own_dict(x).values()]
        members = [x for value in held if type(value) in (tuple, list) for x in value[:_MEMBERS]]
        return any(map(_brings_messages, (*found, *held, *members)))

    @property
    def initialises(self) -> bool:
        """Whether workers begin with a `worker_init_fn`."""
        return self._originals.init_fn is not None

    def own(self) -> WorkerCopies:
        """Return the objects for the next worker.

        Raises `DatasetCopyError` if an object of the graph can neither be copied nor shared.
        """
        self.check()
        if not self._copies:
            return self._originals
        copies, generators = make_copies(self.plan)
        dataset, collate_fn, init_fn = copies.values()
        return WorkerCopies(dataset, collate_fn, init_fn, generators)

    def shared_state(self) -> str:
        """Return a clause that names the first object whose state all workers share, or ""."""
        if not self._copies:
            return "copy_dataset=False lets all workers share one dataset"
        paths = [named.path for named in self.plan.uncopyable]
        return f"all workers share {paths[0]}, which is not copied" if paths else ""

    def warn_of_shared(self, stacklevel: int) -> None:
        """Warn of objects that could not be copied. Call this after the first `own()`, which finds them."""
        if said := self.said_of_shared():
            warnings.warn(f"fastload: {said}", SharedStateWarning, stacklevel=stacklevel + 1)

    def said_of_shared(self) -> str:
        """Return what `warn_of_shared` says, or ""."""
        found = [*map(str, self.plan.uncopyable)]
        named = "; ".join(found[:8] + [f"and {len(found) - 8} more"] * (len(found) > 8))
        return named and (
            f"all workers share what cannot be copied: {named}. If such an object keeps a position or "
            "a value between two calls, samples can be wrong. Create it at the first sample, or pass "
            'worker_method="process" without worker_processes.'
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


def refusal(refused: Sequence[Named], why: str) -> DatasetCopyError:
    """Return the error that names open handles, and says `why` they cannot be used."""
    named = ", ".join(map(str, refused))
    return DatasetCopyError(
        f"{named} cannot be copied for each worker, and {why}. Open it in `__getitem__`, not in `__init__`. "
        "If a sample was read before the loop, set the attribute to None again. Or pass num_workers=0."
    )
