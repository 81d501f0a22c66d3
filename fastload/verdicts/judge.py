"""The verdict: whether threads are known to read a dataset rightly. Its code is read, and none of it runs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from types import GeneratorType
from typing import Any, Literal

from fastload.isolation.plan import Plan
from fastload.random import torch_random
from fastload.random.streams import MODULES, chosen_modules
from fastload.verdicts.changes import VALUES, Changes, kind_of
from fastload.verdicts.findings import Finding, finding
from fastload.verdicts.objects import attribute
from fastload.verdicts.reach import Reach


@dataclass(frozen=True)
class Verdict:
    """What reading the code found. `findings` has proven faults first. Without any, threads are known to be right."""

    findings: tuple[Finding, ...] = ()
    cuda: bool = False
    """Whether the dataset holds CUDA tensors."""

    @property
    def kind(self) -> Literal["thread", "process"]:
        """The kind of workers that is known to be right."""
        return "process" if self.findings else "thread"

    @property
    def proven(self) -> bool:
        """Whether threads would read wrong samples, or fail."""
        return any(fault.proven for fault in self.findings)

    @property
    def reason(self) -> str:
        """A clause that names what decides."""
        nothing = "all code that samples can reach is known to be right in threads"
        return self.findings[0].what if self.findings else nothing


def verdict(
    dataset: Any,
    collate_fn: Callable[[Any], Any] | None = None,
    worker_init_fn: Callable[[int], None] | None = None,
    *,
    copy_dataset: Any = "state",
    random_modules: Collection[str] | None = None,
) -> Verdict:
    """Return whether threads are known to read a dataset rightly.

    It looks at the objects of the dataset's graph, and reads the source of the user's functions that samples can reach.
    It reads no sample. The same program gets the same verdict in each process.

    Args:
        dataset, collate_fn, worker_init_fn: the loader's.
        copy_dataset: the loader's: what each thread gets a copy of.
        random_modules: the loader's: whose global functions draw from the sample's stream.
    """
    roots = {"dataset": dataset, "collate_fn": collate_fn, "worker_init_fn": worker_init_fn}
    reach = Reach(roots, shared=copy_dataset is False)
    plan = Plan(roots, copy_data=copy_dataset is True)
    found = [*reach.findings]
    found += [finding("open handle", path=each.path, kind=kind_of(each.x)) for each in plan.refused]
    for each in plan.obstacles():
        key = "running generator" if isinstance(each.x, GeneratorType) else "no copy"
        found.append(finding(key, path=each.path, kind=kind_of(each.x), why=each.why))
    if not any(fault.proven for fault in found):  # nothing tells more than a proven fault
        found += Changes(reach, plan, shares_all=copy_dataset is False).findings()
        found += () if copy_dataset is False else _two_identities(reach, plan)
    found += _not_routed(random_modules)
    found = sorted(dict.fromkeys(found), key=lambda fault: not fault.proven)
    return Verdict(tuple(found), reach.cuda)


def _not_routed(random_modules: Collection[str] | None) -> Iterator[Finding]:
    """Yield the global generators that threads would share here, for their draws cannot be told apart."""
    torch_random.install()
    modules = {name: MODULES[name] for name in sorted(chosen_modules(random_modules))}
    for name, module in {**modules, "torch": torch_random}.items():
        if why := module.unusable():
            yield finding("not routed", name=_GENERATORS[name], why=why)


_GENERATORS = {"python": "Python's", "numpy": "NumPy's", "torch": "torch's"}


def _two_identities(reach: Reach, plan: Plan) -> Iterator[Finding]:
    """Yield what would be two objects in a thread: code names one, and the dataset has a copy of it.

    `self.mode is TRAIN`, `PARTS.index(self.part)` and a dict with it as a key would find nothing.
    """
    asks = any(function.effects.asks for function in reach.functions)
    for held, at_top in reach.held_twice():
        x = held.x
        if id(x) not in plan.nodes or id(x) in plan.shared or issubclass(type(x), VALUES):
            continue
        if asks or attribute(type(x), "__eq__") is object.__eq__:
            yield finding("two identities", name=at_top.path, kind=kind_of(x), path=held.path)
