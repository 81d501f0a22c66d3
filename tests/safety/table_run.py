"""Runs one program of `table_cases` with torch's loader and with fastload's, and prints what both saw, as JSON.

    python -m tests.safety.table_run NAME FOLDER WAY...

A way is "WORKERS PERSISTENT METHOD", as in "2 True fork"; METHOD "" is the platform's own.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import importlib
import itertools
import json
import logging
import multiprocessing
import os
import pickle
import random
import signal
import sys
import textwrap
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

import fastload

EPOCHS = 3

DATASET = """
from torch.utils.data import Dataset
class Data(Dataset):
    def __init__(self):
{init}
    def __len__(self):
        return {length}
    def __getitem__(self, i):
{body}
"""


@dataclass(frozen=True)
class Program:
    """A user's program, as text, and what is expected of it.

    `body` is the code of `__getitem__`, `init` that of `__init__`, `top` stands at the top of the module. The module
    may have `loop(batch)`, whose result the main thread notes after each batch, `between(dataset, epoch)`, which it
    calls after an epoch, and `look()`, whose result must stay the same. PKG is the name of a package of the
    program's own; `files` are its modules.
    """

    line: int
    """The line of the issue's table."""
    name: str
    body: str = "return i"
    top: str = ""
    init: str = "pass"
    files: dict[str, str] = field(default_factory=dict)
    needs: str = ""
    """A package that may be missing."""
    length: int = 48
    batch: int = 4
    env: dict[str, str] = field(default_factory=dict)
    rare: bool = False
    """Whether it takes some seconds."""

    def write(self, folder: Path) -> str:
        """Write the program's modules and return the name of the first."""
        name = f"user_{hashlib.sha1(self.name.encode()).hexdigest()[:8]}"
        body, init = (textwrap.indent(textwrap.dedent(t), " " * 8) for t in (self.body, self.init))
        text = DATASET.format(init=init, length=self.length, body=body)
        for path, code in {f"{name}.py": textwrap.dedent(self.top) + text, **self.files}.items():
            file = folder / path.replace("PKG", f"own_{name}")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(textwrap.dedent(code).replace("PKG", f"own_{name}"))
        return name


def plain(x: Any) -> Any:
    """Return what JSON can hold of a batch: values, types of tensors, and texts."""
    if isinstance(x, torch.Tensor):
        return [str(x.dtype), *x.flatten().tolist()]
    if isinstance(x, list | tuple):
        return [plain(each) for each in x]
    return x


def surroundings(module: ModuleType) -> dict[str, Any]:
    """Return what must stay as it is for the main thread, apart from random numbers."""
    found: dict[str, Any] = {f"module's {k}": (id(v), type(v)) for k, v in vars(module).items()}
    look = getattr(module, "look", lambda: None)
    return found | {
        "stdout": sys.stdout,
        "stderr": sys.stderr,
        "cwd": os.getcwd(),
        "environ": dict(os.environ),
        "filters": list(warnings.filters),
        "dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
        "handlers": [signal.getsignal(each) for each in sorted(signal.valid_signals())],
        "random": random.getstate(),
        "numpy": pickle.dumps(np.random.get_state()),
        "look": look(),
    }


def changed(before: dict[str, Any], module: ModuleType) -> list[str]:
    """Return the names of what is not as it was."""
    now = surroundings(module)
    return sorted(name for name in before.keys() | now if before.get(name) != now.get(name))


def seen(loader_class: Any, program: Program, module: ModuleType, way: str) -> dict[str, Any]:
    """Return what three epochs gave, and what the main thread saw meanwhile."""
    workers, persistent, *method = way.split()
    dataset = module.Data()
    loop, between = getattr(module, "loop", None), getattr(module, "between", None)
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(3)  # type: ignore[operator]
    before = surroundings(module)
    differs: set[str] = set()
    found: dict[str, Any] = {"epochs": [], "loop": [], "error": ""}
    loader = None
    try:
        loader = loader_class(
            dataset,
            batch_size=program.batch,
            num_workers=int(workers),
            persistent_workers=persistent == "True",
            multiprocessing_context=method[0] if method else None,
        )
        for epoch in range(EPOCHS):
            found["epochs"].append([])
            for batch in loader:
                found["epochs"][-1].append(plain(batch))
                if loop is not None:
                    found["loop"].append(plain(loop(batch)))
                differs.update(changed(before, module))
            if between is not None:
                between(dataset, epoch)
                before |= {k: v for k, v in surroundings(module).items() if k == "random"}
    except Exception as exc:
        found["error"] = type(exc).__name__
        found["message"] = str(exc)[-300:]
    found["during"] = sorted(differs)
    found["repr"] = repr(loader)
    del loader
    gc.collect()
    found["after"] = changed(before, module)
    found["torch_random"] = hashlib.sha1(torch.get_rng_state().numpy().tobytes()).hexdigest()
    return found


class _Reasons(logging.Handler):
    """Keeps what fastload logs of the kind of workers."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def main(name: str, folder: str, *ways: str) -> None:
    """Print a list with, for each way, what torch's loader and fastload's gave."""
    from tests.safety.table_cases import TABLE

    program = next(each for each in TABLE if each.name == name)
    reasons = _Reasons()
    log = logging.getLogger("fastload")
    log.addHandler(reasons)
    log.setLevel(logging.INFO)
    os.environ.update(program.env)
    multiprocessing.set_start_method("fork")  # torch's workers, unless the way says otherwise
    multiprocessing.set_forkserver_preload(["torch", "fastload.loader"])
    sys.path[:0] = [folder, f"{folder}/site-packages"]
    warnings.simplefilter("ignore", DeprecationWarning)
    sys.setswitchinterval(1e-5)  # threads would meet in each sample
    module = importlib.import_module(program.write(Path(folder)))
    results = []
    for way in ways:
        with contextlib.redirect_stdout(sys.stderr):
            pair = [
                seen(each, program, module, way)
                for each in (torch.utils.data.DataLoader, fastload.DataLoader)
            ]
        results.append(dict(zip(("torch", "fastload"), pair, strict=True)))
    print(json.dumps({"results": results, "reasons": reasons.said}))


def ways(workers: tuple[int, ...], method: str = "") -> list[str]:
    """Return the ways with these numbers of workers, persistent or not."""
    return [f"{w} {p} {method}" for w, p in itertools.product(workers, (False, True))]


if __name__ == "__main__":
    main(*sys.argv[1:])
