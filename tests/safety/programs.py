"""Programs of users as text: each is written to files, imported under a name of its own, and makes a dataset."""

from __future__ import annotations

import contextlib
import importlib
import io
import sqlite3
import sys
import textwrap
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastload.safety import CodeSafety, Survey
from fastload.safety.objects import own_dict

DATASET = """
from torch.utils.data import Dataset
class Images(Dataset):
    def __init__(self):
{init}
    def __len__(self):
        return 4
    def __getitem__(self, i):
{body}
def make():
    return Images()
"""


@dataclass(frozen=True)
class Case:
    """A program and what is expected of it.

    `body` is the code of `__getitem__`, `top` stands at the top of the module, `init` is the code of `__init__`.
    `program` replaces all three. It has a `make()` that returns a dataset, or a dataset, a `collate_fn` and a
    `worker_init_fn`. `files` are further modules, and PKG in every text is a name of
    the case's own.
    """

    name: str
    body: str = "return i"
    top: str = ""
    init: str = "pass"
    program: str = ""
    files: Mapping[str, str] = field(default_factory=dict)
    needs: str = ""
    """A package that may be missing."""

    def text(self) -> str:
        if self.program:
            return textwrap.dedent(self.program)
        body, init = (textwrap.indent(textwrap.dedent(t), " " * 8) for t in (self.body, self.init))
        return textwrap.dedent(self.top) + DATASET.format(init=init, body=body)


@contextlib.contextmanager
def made(case: Case, folder: Path) -> Iterator[tuple[Any, ...]]:
    """Import the program and yield what its `make()` returns, always as a tuple. Forget its modules afterwards."""
    number = zlib.crc32(case.name.encode())  # not the name itself: the reason could match by it
    name, own = f"traps_{number}", f"own_{number}"
    texts = {f"{name}.py": case.text(), **case.files}
    for path, text in texts.items():
        target = folder / path.replace("PKG", own)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(textwrap.dedent(text).replace("PKG", own))
    paths, modules = list(sys.path), set(sys.modules)
    sys.path[:0] = [str(folder), str(folder / "site-packages")]
    importlib.invalidate_caches()
    held: list[Any] = []
    try:
        result = importlib.import_module(name).make()
        arguments = result if isinstance(result, tuple) else (result,)
        held += [value for x in arguments for value in own_dict(x).values()]
        yield arguments
    finally:
        sys.path[:] = paths
        for module in set(sys.modules) - modules:
            if (getattr(sys.modules[module], "__file__", None) or "").startswith(str(folder)):
                held += vars(sys.modules.pop(module)).values()
        for value in held:
            if type(value) in (io.BufferedReader, sqlite3.Connection):
                value.close()


def code_of(case: Case, folder: Path) -> CodeSafety:
    """Return what reading the code of the case's dataset finds."""
    with made(case, folder) as arguments:
        return Survey(*arguments).code()
