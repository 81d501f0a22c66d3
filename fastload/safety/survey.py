"""The survey of a loader's objects: what each worker thread owns, and whether the code is thread-safe.

It runs no code of the user's.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import FunctionType
from typing import Any, Literal

import torch
from torch.utils.data import IterableDataset, default_collate, default_convert

from fastload._kit.torch_private import has_function_modes, is_shared
from fastload._kit.user_errors import shown
from fastload.errors import DatasetCopyError, SharedStateWarning
from fastload.random import torch_random
from fastload.random.streams import MODULES, OWNERS, chosen_modules
from fastload.safety.copies import make_copies
from fastload.safety.graph import Graph, Named
from fastload.safety.kinds import EXACT
from fastload.safety.memory import IN_SHARED_MEMORY
from fastload.safety.named import generators_by_name
from fastload.safety.objects import UNCOPIED, own_dict
from fastload.safety.plain import Finding
from fastload.safety.walk import Walk

CopyDataset = Literal["state", False]


@dataclass(frozen=True, slots=True)
class WorkerCopies:
    """The objects that one worker uses in place of the loader's."""

    dataset: Any
    collate_fn: Any
    init_fn: Callable[[int], None] | None
    generators: Sequence[tuple[str, Any]] | None = ()
    """The random generators in the copies, each with its path. None: nothing has looked for them."""

    def current_generators(self, *, alone: bool) -> Sequence[tuple[str, Any]]:
        """Return the generators now: `init_fn` or a sample may have replaced some.

        Args:
            alone: whether no other worker shares modules with this one, so that their generators count.
        """
        survey = Survey(self.dataset, self.collate_fn, self.init_fn)
        return survey.generators() if alone else survey.graph.generators()


@dataclass(frozen=True)
class CodeSafety:
    """What reading the code found. Without findings, the code is plainly thread-safe."""

    findings: tuple[Finding, ...] = ()
    cuda: bool = False
    """Whether the dataset holds CUDA tensors, as far as it was looked at."""

    @property
    def plain(self) -> bool:
        """Whether the code is plainly safe."""
        return not self.findings

    @property
    def reason(self) -> str:
        """A clause that names what decides."""
        return next((f.what for f in self.findings), "all code that samples reach is plainly safe")


class Survey:
    """What is known of the objects of a loader. `iter()` makes it. It walks over them when it is first asked.

    Args:
        dataset, collate_fn, worker_init_fn: the loader's. They are copied as one graph.
        copy_dataset: "state", or False to share everything.
    """

    def __init__(
        self,
        dataset: Any,
        collate_fn: Any = None,
        worker_init_fn: Callable[[int], None] | None = None,
        *,
        copy_dataset: CopyDataset = "state",
    ) -> None:
        self._originals = WorkerCopies(dataset, collate_fn, worker_init_fn)
        self._copy_dataset = copy_dataset
        self.roots = {
            "dataset": dataset,
            "collate_fn": collate_fn,
            "worker_init_fn": worker_init_fn,
        }
        """What the user gave, by the names of the arguments."""

    @cached_property
    def graph(self) -> Graph:
        """The objects that the loader's hold, and which of them threads share."""
        return Graph(self.roots)

    # ---- whether the code is thread-safe ----

    def code(
        self, random_modules: Collection[str] | None = None, *, whole: bool = False
    ) -> CodeSafety:
        """Read the code that samples can run, and return whether it is plainly thread-safe.

        Args:
            random_modules: the loader's: whose global functions draw from the sample's stream.
            whole: whether to go on after the first finding.
        """
        chosen = chosen_modules(random_modules)
        found = [*_not_routed(chosen), *_of_arguments(**self.roots)]
        try:
            walk = Walk(self.roots, found, whole=whole, routed=chosen == MODULES.keys())
        except Exception as error:  # of the user's `__getattribute__` or `__class__`
            return CodeSafety((*found, Finding(f"it cannot be read: {shown(error)}")))
        return CodeSafety(tuple(dict.fromkeys(walk.findings)), walk.cuda)

    # ---- what each worker owns ----

    def check(self) -> None:
        """Raise `DatasetCopyError` if an object of the graph can neither be copied nor shared."""
        if self._copy_dataset is not False and self.graph.refused:
            raise refusal(self.graph.refused, "threads must not share it")

    def originals(self) -> WorkerCopies:
        """Return the objects for a loop without workers: the loader's own, not copied."""
        if self._copy_dataset is False:
            return self._originals
        return replace(self._originals, generators=self.generators())

    def generators(self) -> list[tuple[str, Any]]:
        """Return the generators that samples may draw from, those of modules and classes too. One reader owns them."""
        return [*self.graph.generators(), *generators_by_name(self.graph)]

    def own(self) -> WorkerCopies:
        """Return the objects for the next worker.

        Raises `DatasetCopyError` if an object of the graph can neither be copied nor shared.
        """
        self.check()
        if self._copy_dataset is False:
            return self._originals
        (dataset, collate_fn, init_fn), generators = make_copies(self.graph)
        return WorkerCopies(dataset, collate_fn, init_fn, generators)

    def hears_messages(self) -> bool:
        """Return whether other code can change what samples are while workers own their copies.

        The dataset then holds a shared tensor, an object of multiprocessing, one without a copy, or `set_epoch()`.
        """
        if self._copy_dataset is False or IN_SHARED_MEMORY in self.graph.shared.values():
            return True
        found = [node.x for node in self.graph.nodes.values()]
        # A class may share its attributes. Then the graph does not have them.
        for value in [value for x in found for value in own_dict(x).values()]:
            found += [value, *(value[:64] if type(value) in (tuple, list) else ())]
        return any(map(_brings_messages, found))

    # ---- what workers share ----

    def warn_of_shared(self, stacklevel: int) -> None:
        """Warn of objects that could not be copied. Call this after the first `own()`, which finds them."""
        if said := self.said_of_shared():
            warnings.warn(f"fastload: {said}", SharedStateWarning, stacklevel=stacklevel + 1)

    def said_of_shared(self) -> str:
        """Return what `warn_of_shared` says, or ""."""
        found = [] if self._copy_dataset is False else [*map(str, self.graph.uncopyable)]
        named = "; ".join(found[:8] + [f"and {len(found) - 8} more"] * (len(found) > 8))
        return named and (
            f"all workers share what cannot be copied: {named}. If such an object keeps a position or "
            "a value between two calls, samples can be wrong. Create it at the first sample, or pass "
            'worker_method="process" without worker_processes.'
        )


def _brings_messages(x: Any) -> bool:
    """Return whether code elsewhere writes to `x`, or calls it before an epoch."""
    kind = type(x)
    try:
        return (
            (isinstance(x, torch.Tensor) and is_shared(x))
            or hasattr(kind, "set_epoch")
            or (issubclass(kind, UNCOPIED) and kind not in EXACT)  # a partial is copied
            or any(base.__module__.partition(".")[0] == "multiprocessing" for base in kind.__mro__)
        )
    except Exception:  # a sparse tensor has no storage, and a metaclass may raise
        return True


def refusal(refused: Sequence[Named], why: str) -> DatasetCopyError:
    """Return the error that names open handles, and says `why` they cannot be used."""
    named = ", ".join(map(str, refused))
    return DatasetCopyError(
        f"{named} cannot be copied for each worker, and {why}. Open it in `__getitem__`, not in `__init__`. "
        "If a sample was read before the loop, set the attribute to None again. Or pass num_workers=0."
    )


def _of_arguments(dataset: Any, collate_fn: Any, worker_init_fn: Any) -> Iterator[Finding]:
    if has_function_modes():
        yield Finding("a mode of torch's functions is on in this thread, and in no other")
    if issubclass(type(dataset), IterableDataset):
        yield Finding("the dataset is iterable")
    if worker_init_fn is not None:
        yield Finding("there is a worker_init_fn")
    kind = type(collate_fn)
    module = collate_fn.__module__ if kind is FunctionType else vars(kind).get("__module__", "")
    ours = collate_fn is None or str(module).partition(".")[0] == "fastload"
    if collate_fn is default_convert:
        yield Finding("without batches a sample may be the dataset's own memory")
    elif not ours and collate_fn is not default_collate:
        yield Finding(
            "a collate_fn of yours is always read by processes: it may pass on the dataset's own memory"
        )


def _not_routed(chosen: Collection[str]) -> Iterator[Finding]:
    """Yield the global generators that threads would share here, for their draws cannot be told apart."""
    torch_random.install()
    for name, module in {**MODULES, "torch": torch_random}.items():
        if name in (*chosen, "torch") and (why := module.unusable()):
            what = f"threads would share {OWNERS[name]} global random generator, which this installation"
            yield Finding(f"{what} cannot patch per thread: {why}", shared=True)
