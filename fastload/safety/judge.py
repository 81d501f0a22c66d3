"""The verdict: whether the code that samples can reach is plainly safe in threads. It is read, and none of it runs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from torch.utils.data import IterableDataset, default_collate, default_convert

from fastload._kit.torch_private import has_function_modes
from fastload._kit.user_errors import shown
from fastload.random import torch_random
from fastload.random.streams import MODULES, chosen_modules
from fastload.safety.findings import Finding
from fastload.safety.walk import Walk


@dataclass(frozen=True)
class Verdict:
    """What reading the code found. Without findings, the code is plainly safe."""

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


def verdict(
    dataset: Any,
    collate_fn: Callable[[Any], Any] | None = None,
    worker_init_fn: Callable[[int], None] | None = None,
    *,
    random_modules: Collection[str] | None = None,
    whole: bool = False,
) -> Verdict:
    """Return whether threads may plainly read a dataset.

    Args:
        dataset, collate_fn, worker_init_fn: the loader's.
        random_modules: the loader's: whose global functions draw from the sample's stream.
        whole: whether to go on after the first finding.
    """
    roots = {"dataset": dataset, "collate_fn": collate_fn, "worker_init_fn": worker_init_fn}
    found = [*_not_routed(random_modules), *_of_arguments(dataset, collate_fn, worker_init_fn)]
    try:
        walk = Walk(roots, found, whole=whole)
    except (
        Exception
    ) as error:  # `__getattribute__` or `__class__` of the user's: it runs where the reader looks
        return Verdict((*found, Finding(f"it cannot be read: {shown(error)}")))
    return Verdict(tuple(dict.fromkeys(walk.findings)), walk.cuda)


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


def _not_routed(random_modules: Collection[str] | None) -> Iterator[Finding]:
    """Yield the global generators that threads would share here, for their draws cannot be told apart."""
    torch_random.install()
    modules = {name: MODULES[name] for name in sorted(chosen_modules(random_modules))}
    for name, module in {**modules, "torch": torch_random}.items():
        if why := module.unusable():
            what = f"threads would share {_GENERATORS[name]} global random generator, which this installation"
            yield Finding(f"{what} cannot route: {why}", shared=True)


_GENERATORS = {"python": "Python's", "numpy": "NumPy's", "torch": "torch's"}
