"""Promises:
- Worker processes that start by fork, fork server or spawn deliver the batches of threads under a seed, bit for bit.
- What a new process cannot be given is named by its path. A script without a main guard ends with what to do.
- Worker processes start from `python -c`, standard input, a thread that ends, and inside other loaders' workers.
- A process forks beside threads that log, draw and read, and no worker hangs.
- A fork server imports torch, fastload and libraries that survive a fork once. Later workers share them.
- A fork server imports the files that the loop's process imported, not those of its working directory.
- If MPI is in use, workers start by the fork server, and do not join MPI.
- A library whose threads a fork loses is a hazard once it has started them, not when it is imported. Then the fork
  server starts the workers. If it cannot, they fork as in torch, with a warning that names library, reason and remedy.
"""

from __future__ import annotations

import importlib.util
import logging
import multiprocessing
import os
import random
import subprocess
import sys
import textwrap
import threading
import types
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import get_worker_info

import fastload
from fastload._kit.torch_private import name_thread
from fastload.errors import DatasetCopyError
from fastload.processes import starting
from fastload.safety.libraries import LIBRARIES
from tests.children import ROOT, run_python
from tests.distributed.launching import command, run
from tests.fakes import Numbers
from tests.processes.holding import contexts, processes
from tests.promises.equal import check_same
from tests.promises.reading import in_batches, wait_until
from tests.sizes_of_runs import in_full

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

SPAWN_IS_SLOW = ["fork", "forkserver", pytest.param("spawn", marks=pytest.mark.slow)]


class Draws(Numbers):
    """Its index, draws of three generators, its own process, and what all processes share."""

    def __init__(self, length: int, shared: Any = None) -> None:
        super().__init__(length)
        self.shared = shared
        self.told = -1
        self.generator = torch.Generator().manual_seed(9)

    def __getitem__(self, index: int) -> Any:
        if self.shared is not None:
            with self.shared.get_lock():
                self.shared.value += 1
        draws = [random.random(), float(np.random.rand()), torch.rand(2)]
        return index, draws, torch.rand(3, generator=self.generator), self.told


def tell(worker: int) -> None:
    """Change the worker's dataset, as a `worker_init_fn` does."""
    info = get_worker_info()
    assert info is not None
    assert info.id == worker
    info.dataset.told = 12


@pytest.mark.parametrize("context", SPAWN_IS_SLOW)
def test_the_batches_are_those_of_threads(context: str) -> None:
    shared = multiprocessing.get_context(context).Value("i", 0)
    options: dict[str, Any] = {"batch_size": 4, "shuffle": True, "seed": 3, "num_workers": 2}
    with fastload.DataLoader(Draws(18), worker_init_fn=tell, **options) as threads:
        expected = [list(threads) for _ in range(2)]
    with fastload.DataLoader(
        Draws(18, shared),
        worker_init_fn=tell,
        worker_method="process",
        multiprocessing_context=multiprocessing.get_context(context),
        persistent_workers=True,
        **options,
    ) as processes:
        for epoch in expected:
            check_same(list(processes), epoch)
    assert shared.value == 2 * 18, "all workers count in one memory"


class Parents(Numbers):
    """The process that started its worker."""

    def __getitem__(self, index: int) -> int:
        return os.getppid()


class Holds(Numbers):
    def __init__(self, transform: Any) -> None:
        super().__init__(8)
        self.transform = transform


@pytest.mark.parametrize("context", ["forkserver", "spawn"])
@pytest.mark.parametrize(
    ("make", "path"),
    [
        (lambda: Holds(lambda x: x), "dataset.transform"),
        (lambda: Holds({"a": [0, threading.Lock()]}), "dataset.transform['a'][1]"),
        (lambda: Holds([Holds(lambda x: x)]), "dataset.transform[0].transform"),
    ],
)
def test_what_cannot_be_pickled_is_named_by_its_path(make: Any, path: str, context: str) -> None:
    loader = processes(make(), 1, context=context)
    with pytest.raises(DatasetCopyError) as caught:
        iter(loader)
    assert path in str(caught.value)
    assert context in str(caught.value)


def test_arguments_that_cannot_be_pickled_are_named() -> None:
    for name in ("collate_fn", "worker_init_fn"):
        options: dict[str, Any] = {name: lambda x: None}
        loader = processes(Numbers(8), 1, workers=1, context="spawn", **options)
        with pytest.raises(DatasetCopyError, match=name):
            iter(loader)


# ---- programs ----

PROGRAM = """
import fastload
from tests.fakes import Numbers
loader = fastload.DataLoader(
    Numbers(10), 4, num_workers=2, worker_method="process", multiprocessing_context=CONTEXT
)
"""
LOOP = "print([batch.tolist() for batch in loader])\n"
SAID = "[[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]\n"


def program(context: str | None, body: str) -> str:
    return PROGRAM.replace("CONTEXT", repr(context)) + body


@contexts
def test_workers_start_from_python_c(context: str) -> None:
    done = run_python("-c", program(context, LOOP))
    assert (done.returncode, done.stdout) == (0, SAID), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("context", ["fork", "forkserver", "spawn"])
def test_workers_start_from_standard_input(context: str) -> None:
    """A Python of its own: a warm one cannot read a program from there."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-"],
        input=program(context, LOOP), capture_output=True, text=True, timeout=100, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    if context == "fork" or done.returncode == 0:
        assert (done.returncode, done.stdout) == (0, SAID), done.stderr
    else:
        assert "must be a file" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("context", ["forkserver", "spawn"])
def test_a_script_without_a_main_guard_ends_and_says_what_to_do(
    context: str, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(program(context, LOOP))
    done = run_python(script)
    assert done.returncode == 1
    assert 'if __name__ == "__main__":' in done.stderr.splitlines()[-1]


def test_iter_in_a_thread_that_ends_leaves_the_workers_alive() -> None:
    """They end with the process, not with the thread that forked them."""
    loader = processes(Numbers(80))
    iterators: list[Any] = []
    starting = threading.Thread(target=lambda: iterators.append(iter(loader)))
    starting.start()
    starting.join()
    wait_until(lambda: not starting.is_alive(), "the thread has ended")
    with loader:
        assert [batch.tolist() for batch in iterators.pop()] == in_batches(range(80), 4)


# ---- loaders in loaders ----


class Nested(Numbers):
    """The sum of an inner loader's batches, which worker processes read."""

    def __init__(self, length: int, method: str) -> None:
        super().__init__(length)
        self.method = method

    def __getitem__(self, index: int) -> int:
        with fastload.DataLoader(
            Numbers(8 + index),
            4,
            num_workers=1,
            worker_method=self.method,  # type: ignore[arg-type]
        ) as loader:
            return sum(int(batch.sum()) for batch in loader)


@pytest.mark.parametrize(
    ("outer", "inner"),
    [
        ("process", "thread"),
        ("process", "process"),
        pytest.param("thread", "process", marks=pytest.mark.slow),
    ],
)
def test_a_loader_inside_a_worker_of_another(outer: Any, inner: str) -> None:
    with fastload.DataLoader(Nested(4, inner), 2, num_workers=2, worker_method=outer) as loader:
        got = [value for batch in loader for value in batch.tolist()]
    assert got == [sum(range(8 + index)) for index in range(4)]


# ---- forks beside threads ----


class Busy(Numbers):
    """Samples that take locks of libraries: of logging, of NumPy's generator, of HDF5 if it is there."""

    def __init__(self, length: int, file: Path | None) -> None:
        super().__init__(length)
        self.file = file
        self._h5: Any = None

    def __getitem__(self, index: int) -> Any:
        logging.getLogger("tests.processes").warning("sample %d", index)
        np.random.standard_normal(100)
        torch.rand(10)
        if self.file is not None:
            if self._h5 is None:
                import h5py

                self._h5 = h5py.File(self.file, "r")
            assert self._h5["x"][index % 10] == index % 10
        return index


class ToNowhere(logging.Handler):
    """Takes its lock for each record, and says nothing."""

    def emit(self, record: logging.LogRecord) -> None:
        record.getMessage()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_forks_beside_threads_that_log_and_draw(tmp_path: Path) -> None:
    try:
        import h5py
    except ModuleNotFoundError:
        file = None
    else:
        file = tmp_path / "x.h5"
        with h5py.File(file, "w") as made:
            made["x"] = np.arange(10)
    logger, handler = logging.getLogger("tests.processes"), ToNowhere()
    logger.addHandler(handler)
    logger.propagate = False
    beside = fastload.DataLoader(
        Busy(10**6, file), 8, num_workers=2, sampler=range(10**6), copy_dataset="state"
    )
    forking = processes(Busy(8, file), 2, workers=1, context="fork")
    try:
        with beside, forking:
            others = iter(beside)
            for number in range(in_full(400, 150)):
                assert next(others).tolist() == [*range(8 * number, 8 * number + 8)]
                assert [b.tolist() for b in forking] == [[0, 1], [2, 3], [4, 5], [6, 7]]
            del others
    finally:
        logger.removeHandler(handler)
        logger.propagate = True


# ---- where a fork is no safe start ----


USES = {
    "daft": "daft.from_pydict({'a': [1, 2]}).where(daft.col('a') > 1).to_pydict()",
    "deltalake": "deltalake.write_deltalake(FOLDER, pyarrow.table({'a': [1]}))",
    "grpc": "kept = grpc.insecure_channel('localhost:1')",
    "jax": "jax.numpy.ones(3).block_until_ready()",
    "lance": "lance.write_dataset(pyarrow.table({'a': [1]}), FOLDER + '/a.lance')",
    "lancedb": "lancedb.connect(FOLDER).create_table('x', [{'a': 1}])",
    "obstore": "obstore.put(obstore.store.LocalStore(FOLDER), 'a', b'a')",
    "polars": "polars.DataFrame({'a': [1, 2]}).filter(polars.col('a') > 1)",
    "tensorflow": "tensorflow.constant([1, 2])",
}
"""What starts the threads of each library of the list. DuckDB is not on it: its forked children were right."""

UNGUARDED = """
import os, sys, warnings, pyarrow, NAME
import fastload
FOLDER = sys.argv[1]

class Parents:
    def __len__(self):
        return 2
    def __getitem__(self, index):
        return os.getppid()

def read():
    options = {"num_workers": 1, "worker_method": "process", "collate_fn": lambda x: x}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert [*fastload.DataLoader(Parents(), 2, **options)] == [[os.getpid()] * 2]
    return [str(one.message) for one in caught if "fastload" in str(one.message)]

assert read() == []
USE
said, = read()
assert "NAME runs threads" in said and "no `if __name__" in said, said
"""


def test_each_library_whose_threads_a_fork_loses_has_a_use() -> None:
    assert USES.keys() == {name for name, entry in LIBRARIES.items() if entry.pool}


# The extras `tensorboard` and `dev` have these two.
QUICK = ("grpc", "obstore")


@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(x, marks=pytest.mark.slow) for x in USES if x not in QUICK)]
)
def test_a_library_is_a_hazard_once_it_is_used(name: str, tmp_path: Path) -> None:
    """A script without a main guard, with a class and a lambda of its own, runs as under torch, and is warned."""
    pytest.importorskip("pyarrow")
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    script = tmp_path / "script.py"
    script.write_text(UNGUARDED.replace("NAME", name).replace("USE", USES[name]))
    done = run_python("-W", "ignore", script, tmp_path)
    assert done.returncode == 0, done.stderr


def test_beside_threads_that_a_fork_loses_the_fork_server_starts_what_it_can(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(starting, "_THREADED", {"polars": ("polars-0",)})
    monkeypatch.setitem(sys.modules, "polars", types.ModuleType("polars"))
    options: dict[str, Any] = {"num_workers": 1, "worker_method": "process"}
    ends, named = threading.Event(), threading.Event()

    def pool() -> None:
        name_thread("polars-0")
        named.set()
        ends.wait()

    def forked() -> set[bool]:
        with fastload.DataLoader(Parents(2), **options) as loader:
            return {parent == os.getpid() for parent in torch.cat(list(loader)).tolist()}

    assert forked() == {True}
    thread = threading.Thread(target=pool)
    thread.start()
    named.wait()
    try:
        assert forked() == {False}
        asked, unpicklable = count(), starting._unpicklable
        monkeypatch.setattr(starting, "_unpicklable", lambda x: (unpicklable(x), next(asked))[0])
        with fastload.DataLoader(Parents(2), **options) as loader:
            list(loader)
        assert next(asked) == 1, "it takes as long as to pickle the dataset"
        loader = fastload.DataLoader(Holds(lambda x: x), **options)
        with pytest.warns(
            RuntimeWarning, match=r"polars runs threads.*is not safe\. .*dataset\.transform"
        ):
            iter(loader)
        loader.close()
    finally:
        ends.set()
        thread.join()


INHERITS = """
import os, sys
HERE = {"torch", "fastload.processes.worker_main", "omegaconf", "polars", "chosen"}
INHERITED = sorted(HERE & sys.modules.keys())  # all of them are imported below, in a worker too
import multiprocessing
import chosen, polars, omegaconf, fastload
from tests.fakes import Numbers


class Inherited(Numbers):
    def __getitem__(self, index):
        return os.getppid(), len(os.listdir(f"/proc/{os.getppid()}/task")), INHERITED


if __name__ == "__main__":
    multiprocessing.set_forkserver_preload(PRELOAD)
    for _ in range(2):
        (server, threads, inherited), = fastload.DataLoader(
            Inherited(1), None, num_workers=1, worker_method="process", multiprocessing_context="forkserver"
        )
        print(threads, *inherited)
    assert server != os.getpid()
    print(multiprocessing.forkserver._forkserver._preload_modules)
"""


POOL = """
import threading
from fastload._kit.torch_private import name_thread
named = threading.Event()

def run():
    name_thread("polars-0")
    named.set()
    threading.Event().wait()

threading.Thread(target=run, daemon=True).start()
named.wait()
"""


@pytest.mark.slow
@pytest.mark.parametrize("preload", [["__main__"], ["chosen"]])
def test_workers_of_a_fork_server_share_what_it_imported_once(
    preload: list[str], tmp_path: Path
) -> None:
    """That is torch, fastload, libraries that survive a fork, and what the program asks for. Its list stays its own."""
    for name in ("chosen", "omegaconf"):
        (tmp_path / f"{name}.py").touch()
    (tmp_path / "polars.py").write_text(POOL)
    script = tmp_path / "script.py"
    script.write_text(INHERITS.replace("PRELOAD", repr(preload)))
    done = run_python("-W", "ignore", script)
    chosen = " chosen" * (preload == ["chosen"])
    seen = f"1{chosen} fastload.processes.worker_main omegaconf torch\n"
    assert (done.returncode, done.stdout) == (0, f"{seen}{seen}{preload}\n"), done.stderr


SHADOWED = """
import os, pathlib, sys
sys.path.append(pathlib.Path("skipped"))
import fastload, torch, omegaconf
from tests.fakes import Numbers


class Inherited(Numbers):
    def __getitem__(self, index):
        import fastload, torch, omegaconf
        files = fastload.__file__, torch.__file__, omegaconf.__file__
        return [*files, os.environ.get("PYTHONPATH"), os.environ.get("PYTHONSAFEPATH"), len(os.environ)]


if __name__ == "__main__":
    options = {"num_workers": 1, "worker_method": "process", "multiprocessing_context": "forkserver"}
    loader = fastload.DataLoader(Inherited(1), None, **options)
    expected = Inherited(1)[0]
    assert expected[2] == os.path.join(sys.path[0], "omegaconf.py"), expected
    found, = loader
    assert found == expected, (found, expected)
    assert Inherited(1)[0] == expected, "this process has other variables than before"
"""


@pytest.mark.parametrize(
    "variables", [pytest.param({"PYTHONSAFEPATH": ""}, marks=pytest.mark.slow), {}]
)
def test_a_fork_server_imports_what_the_loop_s_process_does(
    variables: dict[str, str], tmp_path: Path
) -> None:
    """Not what the working directory has, such as another checkout of a library."""
    folder, scripts = tmp_path / "checkout", tmp_path / "scripts"
    for name in ("fastload", "torch", "omegaconf"):
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").touch()
    scripts.mkdir()
    (scripts / "omegaconf.py").touch()  # beside the script: it is this one that both import
    (scripts / "script.py").write_text(SHADOWED)
    environment = {**os.environ, **variables, "PYTHONPATH": str(ROOT)}
    done = run_python(scripts / "script.py", cwd=folder, env=environment)
    assert done.returncode == 0, done.stderr


MPI = """
import os
RANK = ("PMI_RANK", "PMI_FD", "PMIX_RANK", "PMIX_NAMESPACE", "OMPI_COMM_WORLD_RANK")
LAUNCHER = [name for name in RANK if name in os.environ]
from mpi4py import MPI
import fastload
from tests.fakes import Numbers


class Variables(Numbers):
    def __getitem__(self, index):
        return [MPI.COMM_WORLD.Get_size(), os.getppid() == PARENT, LAUNCHER]


PARENT = int(os.environ.setdefault("PARENT", str(os.getpid())))

if __name__ == "__main__":
    loader = fastload.DataLoader(Variables(6), 3, num_workers=1, worker_method="process", collate_fn=list)
    seen = [sample for batch in loader for sample in batch]
    print(f"rank {MPI.COMM_WORLD.Get_rank()} of {MPI.COMM_WORLD.Get_size()}: {seen}", flush=True)
    total = MPI.COMM_WORLD.allreduce(1)
    print(f"total {total}", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["mpich", "openmpi"])
def test_under_mpi_no_worker_joins_the_job(launcher: str, tmp_path: Path) -> None:
    """The script imports mpi4py at its top, and so do its workers. Each is then a world of its own."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(MPI))
    options = ("--oversubscribe",) if launcher == "openmpi" else ()
    ended = run(command(launcher, 2, str(script), options=options), tmp_path)
    assert ended.code == 0, ended.text
    alone = [[1, False, []]] * 6
    for rank in range(2):
        assert f"rank {rank} of 2: {alone}" in ended.text, ended.text
    assert ended.text.count("total 2") == 2
