"""Programs that torch's worker processes read rightly, although they share process-wide state.

    python -m tests.safety.programs_of_process FOLDER WAY...

runs each with torch's loader and with fastload's, and writes what both saw to `results.json`. A way is "WORKERS
PERSISTENT METHOD", as in "2 True fork". All programs run in one process.
"""

from __future__ import annotations

import gc
import importlib
import json
import logging
import multiprocessing
import os
import pickle
import random
import sys
import textwrap
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

import fastload

EPOCHS = 3

DATASET = """
import random, tempfile
import numpy as np
import torch
from torch.utils.data import Dataset
{top}
class Data(Dataset):
    def __init__(self):
{init}
    def __len__(self):
        return {length}
    def __getitem__(self, i):
{body}
"""

CONFIG = """
class Config:
    def __init__(self, n):
        self.n, self.seen = n, []
    def __eq__(self, other): return type(self) is type(other) and self.n == other.n
    def __hash__(self): return hash(self.n)
    def is_default(self): return self is CFG
    def note(self, i):
        self.seen.append(i)
        return len(self.seen) > 0
CFG = Config(1)
HANDLERS = {Config: "config", CFG: 3}
def look(): return CFG == Config(1), HANDLERS.get(type(CFG)), type(CFG) is Config, list(CFG.seen)
"""
CACHE = """
if not self.use_cache:
    for cache in self.caches: cache[i] = i + 1
return [float(cache[i]) for cache in self.caches]
"""
BETWEEN = "def between(dataset, epoch): dataset.use_cache = True\n"
MAPPED = "torch.from_numpy(np.memmap(tempfile.TemporaryFile(), np.float32, 'w+', shape=48))"
INSTALLED = """
CURRENT = {}
def both(i):
    CURRENT["left"] = i
    text = "".join(str(k) for k in range(50))
    CURRENT["right"] = CURRENT["left"]
    return CURRENT["left"], CURRENT["right"], len(text)
def look(): return dict(CURRENT)
"""

PROGRAMS: dict[str, tuple[str, str, str]] = {
    "boxes *= 2": (
        "boxes = self.rows[i]['boxes']; boxes *= 2; return float(boxes[0, 0])",
        "",
        "self.rows = [{'boxes': np.ones((3, 4)), 'id': k} for k in range(2_000)]",
    ),
    "tokens.append(EOS)": (
        "tokens = self.tokens[i]; tokens.append(0); return len(tokens)",
        "",
        "self.tokens = [[k] for k in range(2_000)]",
    ),
    "caches in shared memory": (
        CACHE,
        BETWEEN,
        f"self.use_cache, self.caches = False, [torch.zeros(48).share_memory_(), {MAPPED}]",
    ),
    "a list of 2,000 shuffled in place between epochs": (
        "return self.items[i]",
        "def between(dataset, epoch): random.shuffle(dataset.items)\n",
        "self.items = list(range(2_000))",
    ),
    "state at the top of an installed package": (
        "return pairs.both(i)",
        "from own_package import pairs\n",
        "pass",
    ),
    "standard output, directory, environment and filters": (
        "sys.stdout = io.StringIO(); os.chdir('/'); os.environ['A'] = str(i)\n"
        "warnings.simplefilter('error'); return i, os.getcwd()",
        "import io, os, sys, warnings\n",
        "pass",
    ),
    "torch.set_default_dtype": (
        "torch.set_default_dtype(torch.float64 if i % 2 else torch.float32)\nreturn str(torch.zeros(1).dtype)",
        "",
        "pass",
    ),
    "self is DEFAULT": ("return CFG.is_default(), HANDLERS[CFG], CFG.note(i)", CONFIG, "pass"),
    "self is DEFAULT, held": (
        "return self.it.is_default(), self.it in HANDLERS",
        CONFIG,
        "self.it = CFG",
    ),
}
"""By name: the code of `__getitem__`, what stands at the top of the module, and the code of `__init__`.

The module may have `between(dataset, epoch)`, which runs after an epoch, and `look()`, whose result must stay the same.
"""


def module_of(number: int, name: str) -> ModuleType:
    body, top, init = PROGRAMS[name]
    length = 2_000 if "2,000" in name else 48
    body, init = (textwrap.indent(text.strip(), " " * 8) for text in (body, init))
    text = DATASET.format(top=top, init=init, body=body, length=length)
    Path(sys.path[0], f"program_{number}.py").write_text(text)
    return importlib.import_module(f"program_{number}")


def plain(x: Any) -> Any:
    """Return what JSON can hold of a batch."""
    if isinstance(x, torch.Tensor):
        return [str(x.dtype), *x.flatten().tolist()]
    return [plain(each) for each in x] if isinstance(x, list | tuple) else x


def surroundings(module: ModuleType) -> dict[str, Any]:
    """Return what must stay as it is for the main thread, apart from torch's random state."""
    found: dict[str, Any] = {f"module's {k}": (id(v), type(v)) for k, v in vars(module).items()}
    return found | {
        "cwd": os.getcwd(),
        "stdout": id(sys.stdout),
        "environ": dict(os.environ),
        "filters": list(warnings.filters),
        "dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
        "random": random.getstate(),
        "numpy": pickle.dumps(np.random.get_state()),
        "look": getattr(module, "look", lambda: None)(),
    }


def seen(loader_class: Any, module: ModuleType, way: str) -> dict[str, Any]:
    """Return what the epochs gave, and what the main thread saw meanwhile."""
    workers, persistent, *method = way.split()
    dataset, between = module.Data(), getattr(module, "between", None)
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(3)  # type: ignore[operator]
    before = surroundings(module)
    found: dict[str, Any] = {"epochs": [], "changed": set()}
    loader = loader_class(
        dataset,
        batch_size=len(dataset) // 12,
        num_workers=int(workers),
        persistent_workers=persistent == "True",
        multiprocessing_context=method[0] if method else None,
    )
    for epoch in range(EPOCHS):
        found["epochs"].append([])
        for batch in loader:
            found["epochs"][-1].append(plain(batch))
            now = surroundings(module)
            found["changed"] |= {name for name in before if before[name] != now.get(name)}
        if between is not None:
            between(dataset, epoch)
            before["random"] = random.getstate()
    del loader
    gc.collect()
    found["torch"] = torch.get_rng_state().sum().item()
    return {**found, "changed": sorted(found["changed"])}


def main(folder: str, *ways: str) -> None:
    """Write, for each program and way, what both loaders gave, and the reasons that fastload logged."""
    log, reasons = logging.getLogger("fastload"), list[str]()
    log.addHandler(handler := logging.Handler())
    handler.emit = lambda record: reasons.append(record.getMessage())  # type: ignore[method-assign]
    log.setLevel(logging.INFO)
    multiprocessing.set_start_method("fork")  # torch's workers, unless the way says otherwise
    multiprocessing.set_forkserver_preload(["torch", "fastload.loader"])
    package = Path(folder, "site-packages", "own_package")
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "pairs.py").write_text(INSTALLED)
    sys.path[:0] = [folder, str(package.parent)]
    warnings.simplefilter("ignore", DeprecationWarning)
    loaders, results = (torch.utils.data.DataLoader, fastload.DataLoader), {}
    for number, name in enumerate(PROGRAMS):
        module = module_of(number, name)
        results[name] = [[seen(each, module, way) for each in loaders] for way in ways]
    Path(folder, "results.json").write_text(json.dumps([results, reasons]))


if __name__ == "__main__":
    main(*sys.argv[1:])
