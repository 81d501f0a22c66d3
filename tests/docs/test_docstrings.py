"""Promise: The docstring of each public name has arguments, what it returns and raises, and an example that runs.

The public names are those of docs/reference. Their examples find the names and files of `NAMES` and `prepare`.
"""

from __future__ import annotations

import dataclasses
import doctest
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader as TorchDataLoader

import fastload
from fastload.streams import Shards
from tests.docs.pages import DOCS
from tests.docs.test_page_examples import Small
from tests.plain_words import hard_words

SECTION = r"^{}:\n((?:    .*\n|\n(?=    ))*)"
CODE = re.compile(r"``?[^`]+``?|^Examples:\n.*", re.M | re.S)
RUN_ELSEWHERE = {"fastload.compat"}
"""Names of other libraries: `tests/compat` runs the programs that call them."""
NO_EXAMPLE = {
    "fastload.distributed.WindowDataset": "needs ranks of MPI",
    "fastload.streams.EvenSteps": "needs ranks",
    "fastload.streams.adapters.from_hub": "needs another library",
    "fastload.streams.adapters.from_webdataset": "needs another library",
}


def public() -> Iterator[tuple[str, Any]]:
    """Yield each class and function of the reference, with its full name."""
    for page in sorted((DOCS / "reference").glob("*.md")):
        for name in re.findall(r"^::: (\S+)$", page.read_text(), flags=re.M):
            module, _, inner = name.rpartition(".")
            found = inspect.unwrap(getattr(importlib.import_module(module), inner))
            ours = getattr(found, "__module__", "").startswith("fastload")
            if ours and callable(found) and module.rpartition(".")[0] not in RUN_ELSEWHERE:
                yield name, found


def methods(cls: Any) -> Iterator[tuple[str, Any]]:
    for name, found in vars(cls).items():
        method = getattr(found, "__func__", found)
        if inspect.isfunction(method) and not name.startswith("_"):
            yield name, method


def section(doc: str, name: str) -> str:
    found = re.search(SECTION.format(name), doc + "\n", re.M)
    return found[1] if found else ""


def parameters(found: Any) -> set[str]:
    """Return the names of the arguments that a caller gives."""
    if isinstance(found, type):
        plain = dataclasses.is_dataclass(found) or issubclass(found, (tuple, BaseException))
        if plain or getattr(found, "_is_protocol", False) or found.__init__ is object.__init__:
            return set()  # fields have their own docstrings
    given = {p.name: p.kind for p in inspect.signature(found).parameters.values()}
    if found is fastload.DataLoader:
        given = {k: given[k] for k in given.keys() - inspect.signature(TorchDataLoader).parameters}
    return {name for name, kind in given.items() if kind is not inspect.Parameter.VAR_KEYWORD}


def faults(name: str, found: Any) -> Iterator[str]:
    """Yield what the docstring of a public name lacks."""
    doc = inspect.getdoc(found) or ""
    is_error = isinstance(found, type) and issubclass(found, (BaseException, Warning))
    described = re.findall(r"^    ([\w*, ]+):", section(doc, "Args"), re.M)
    described += re.findall(r"^    ([\w, ]+):", section(doc, "Attributes"), re.M)
    known = {one.strip("* ") for names in described for one in names.split(",")}
    if missing := parameters(found) - known:
        yield f"Args: lacks {sorted(missing)}"
    if ">>> " not in section(doc, "Examples") and name not in NO_EXAMPLE and not is_error:
        yield "Examples: is missing"
    yield from of_prose(found, doc)
    for inner, method in methods(found) if isinstance(found, type) else ():
        yield from (f"{inner}: {fault}" for fault in of_prose(method, inspect.getdoc(method) or ""))


def of_prose(found: Any, doc: str) -> Iterator[str]:
    """Yield what stands in the prose of a docstring and belongs into a section."""
    first, *rest = re.split(r"(?<=\.)\s+", doc)
    if any(
        re.match(r"(It )?[Rr]aises? `?\w+", sentence) for sentence in rest if sentence != "Raises:"
    ):
        yield "Raises: stands in prose"
    yield from (f"{hard}: write {instead}" for hard, instead in hard_words(CODE.sub("code", doc)))
    hint = getattr(found, "__annotations__", {}).get("return", "None")
    returns = inspect.isfunction(found) and hint not in (None, "None", "NoReturn", "Iterator[None]")
    says = section(doc, "Returns") or re.search(
        r"(^|[.;] |\band )([Rr]eturn|Yield|Raise)\b", doc, re.M
    )
    says = says or re.search(r"\b[Ss]ee `", first)
    if returns and not says:
        yield "Returns: is missing"


def test_each_public_name_says_what_it_takes_returns_and_raises() -> None:
    wrong = [f"{name}: {fault}" for name, found in public() for fault in faults(name, found)]
    assert not wrong, f"{len(wrong)} faults\n" + "\n".join(wrong)


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the examples find: names, and files in the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FASTLOAD_STORE", str(tmp_path / "sets"))
    dataset = Small()
    loader = fastload.DataLoader(dataset, batch_size=50)
    texts = [torch.arange(50 + index % 100) for index in range(300)]
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(48, 2))
    return {
        **{"torch": torch, "np": np, "fastload": fastload, "DataLoader": fastload.DataLoader},
        **{"dataset": dataset, "loader": loader, "texts": texts, "model": model},
    }


@pytest.mark.parametrize(
    "name", [name for name, found in public() if ">>> " in (found.__doc__ or "")]
)
def test_the_example_of_a_public_name_runs(name: str, names: dict[str, Any]) -> None:
    module, _, inner = name.rpartition(".")
    doc = inspect.getdoc(inspect.unwrap(getattr(importlib.import_module(module), inner))) or ""
    prepare(doc, names)
    example = doctest.DocTestParser().get_doctest(doc, names, name, name, 0)
    shown: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    failed, tried = runner.run(example, out=shown.append, clear_globs=False)
    names.clear()  # what the example opened
    assert tried
    assert not failed, "".join(shown)


def prepare(doc: str, names: dict[str, Any]) -> None:
    """Make the files that an example reads, in the current folder."""
    if "stream" in doc:
        Path("numbers.jsonl").write_text("[1, 2]\n[3]\n")
        names["stream"] = Shards(["numbers.jsonl"])
    if "encoded" in doc or '"images' in doc or "train.txt" in doc:
        from PIL import Image

        for number in range(4):
            folder = Path("images", ("cat", "dog")[number % 2])
            folder.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (64, 48), (number, 9, 9)).save(folder / f"{number}.jpg")
        listed = sorted(f"{path}\n" for path in Path("images").rglob("*.jpg"))
        Path("train.txt").write_text("".join(listed))
        names["encoded"] = Path(listed[0].strip()).read_bytes()
