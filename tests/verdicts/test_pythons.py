"""Promises:
- `worker_method="auto"` finds the same changes of shared objects on all Pythons.
- `worker_method="auto"` takes processes for a dataset with an iterator that the Python at hand cannot copy.
"""

from __future__ import annotations

import copy
import csv
import functools
import itertools
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import fastload
from fastload.isolation.rules import changes_itself
from fastload.verdicts import verdict
from tests.verdicts.programs import Case, verdict_of

LISTS = "L, K = [[1], [2]], [3]\n"
AT_COLUMN = LISTS + "\n" * 10 + "f = lambda: L.append(1)\n"


@pytest.mark.parametrize(
    "case",
    [
        Case("variable of a comprehension", r"\.L`", "n = [L for L in [1]]; L.append(i); return i", LISTS),
        Case("comprehension in a branch", r"\.K`", "if i: [K for K in 'a']\nK.append(i); return i", LISTS),
        Case("slice", r"\.L`", "L[0:1] = [i]; return i", LISTS),
        Case("after a finally", r"\.L`", "try: return i\nfinally: L.append(1)", LISTS),
        Case("lambda in the column of its line", r"\.L`", "return f(i)", AT_COLUMN),
        Case("annotation of a variable", r"\.L`", "x: Missing = L; x.append(1); return i", LISTS),
    ],
    ids=lambda case: case.name,
)  # fmt: skip
def test_changes_are_found(case: Case, tmp_path: Path) -> None:
    found = verdict_of(case, tmp_path)
    assert found.kind == "process"
    assert case.culprit.strip("\\.`") in found.reason


@pytest.mark.skipif(sys.version_info < (3, 14), reason="this Python has no t-strings")
def test_what_a_template_string_holds_escapes(tmp_path: Path) -> None:
    top = "D = {'a': []}\ndef put(x): x.values[0]['a'] = 1\n"
    found = verdict_of(Case("t-string", body="put(t'{D}'); return i", top=top), tmp_path)
    assert found.kind == "process"
    text = Case("f-string", body="put(f'{D}'); return i", top=top)
    assert verdict_of(text, tmp_path).kind == "thread"


class Buffer:
    def __init__(self) -> None:
        self.words = [0, 0]

    def take(self, x: list[int], k: int) -> None:
        self.words[0:k] = x


def test_a_class_that_sets_a_slice_changes_itself() -> None:
    assert changes_itself(Buffer)


def made_by(text: str) -> dict[str, Any]:
    """Run code in a module without a file, and without this file's `from __future__ import annotations`."""
    module = types.ModuleType("without_source")
    exec(compile(text, "<no file>", "exec", dont_inherit=True), vars(module))
    return vars(module)


class Calls:
    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return self.call(index)


def test_a_function_without_source_that_sets_a_slice() -> None:
    space = made_by("L = [1, 2]\ndef call(i, k): L[i:k] = [i]\ndef read(i): return L[i]\n")
    found = verdict(Calls(space["call"]))
    assert "source" in found.reason
    assert verdict(Calls(space["read"])).kind == "thread"


@pytest.mark.parametrize(("result", "kind"), [("int", "thread"), ("list", "process")])
def test_annotations_of_a_cached_function_are_not_computed(result: str, kind: str) -> None:
    """As a name that is imported under `TYPE_CHECKING` only."""
    space = made_by(f"Here = int\ndef call(x: Here) -> {result}: return x\n")
    cached = functools.lru_cache(space["call"])
    del space["Here"]
    assert verdict(Calls(cached)).kind == kind


def test_annotations_of_a_class_are_no_code_that_samples_run(tmp_path: Path) -> None:
    names = "class Notes:\n    def append_note(self): RUNS.append(1)\nRUNS = []\nNOTES = Notes()\n"
    top = f"{names}class Own:\n    x: NOTES.append_note()\n"
    body = "Own(); return i"
    text = Case("annotated class", body=body, top=f"from __future__ import annotations\n{top}")
    assert verdict_of(text, tmp_path).kind == "thread"
    if sys.version_info >= (3, 14):  # before, it runs as the class is defined
        assert verdict_of(Case("lazy class", body=body, top=top), tmp_path).kind == "thread"


def copies(x: Iterator[Any]) -> bool:
    try:
        copy.copy(x)
    except TypeError:
        return False
    return True


ITERATORS: dict[str, Callable[[], Iterator[Any]]] = {
    "count": itertools.count,
    "cycle": lambda: itertools.cycle([1]),
    "map of count": lambda: map(str, itertools.count()),
    "reader of csv": lambda: csv.reader(["a", "b", "c", "d"]),
    "zip": lambda: zip([1] * 4, [2] * 4, strict=True),
}


@pytest.mark.filterwarnings("ignore:Pickle, copy, and deepcopy support")
@pytest.mark.parametrize("name", ITERATORS)
def test_an_iterator_that_this_python_cannot_copy(name: str) -> None:
    copyable = copies(ITERATORS[name]()) and copies(
        itertools.count() if "map" in name else iter("")
    )
    dataset = Calls(functools.partial(next))
    dataset.ids = ITERATORS[name]()  # type: ignore[attr-defined]
    found = verdict(dataset)
    assert found.kind == ("thread" if copyable else "process")
    if not copyable:
        assert "cannot be copied (TypeError: cannot pickle" in found.reason


class Ids:
    """Draws from an iterator in C."""

    def __init__(self) -> None:
        self.lines = csv.reader([str(k) for k in range(8)])

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return int(next(self.lines)[0])


def test_each_worker_process_has_its_own_iterator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FASTLOAD_WORKER_METHOD", raising=False)
    options: dict[str, Any] = {"multiprocessing_context": "fork", "worker_method": "auto"}
    with fastload.DataLoader(Ids(), 4, num_workers=1, **options) as loader:
        assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]
        assert loader.stats().worker_method == "process"
