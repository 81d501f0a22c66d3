"""`prepare`: a function makes a part of each source, on any executor, and the parts become a set."""

from __future__ import annotations

import os
import secrets
import signal
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import (
    BrokenExecutor,
    Executor,
    Future,
    ProcessPoolExecutor,
    as_completed,
    wait,
)
from contextlib import contextmanager
from functools import partial
from multiprocessing import current_process, get_context
from typing import Any

from tqdm import tqdm

from fastload._kit.cores import usable_cores
from fastload._kit.fingerprint import fingerprint
from fastload._kit.guard import end_with_parent
from fastload.distributed.detect import check_world, mpi4py
from fastload.errors import PrepareError
from fastload.store.columns import record_batch
from fastload.store.preparation import Prepared, preparation, shown
from fastload.store.work import Work


def prepare(
    function: Callable[[Any], Any],
    sources: Iterable[Any],
    out: str | os.PathLike[str],
    *,
    executor: Executor | None = None,
    workers: int | None = None,
    root: str | os.PathLike[str] | None = None,
    checksums: bool | None = None,
    classes: Iterable[str] = (),
    made: Mapping[str, Any] | None = None,
    version: str = "",
    replace: bool = False,
    progress: bool = False,
) -> Prepared:
    """Make a part from each source, and a set of the parts in the order of their sources.

    Args:
        function: takes a source and returns the columns of its part; see `put` for what can be columns. It must return
            the same rows whenever it gets the same source. Columns without rows leave the source out. The function is
            pickled: a function of a module, or a `functools.partial` of one.
        sources: paths of files or folders, or any values that can be pickled.
        out: the name of the set, or its path.
        executor: runs the parts: any `concurrent.futures.Executor`, such as `mpi4py.futures.MPIPoolExecutor()`, Dask's
            `client.get_executor()`, `parsl.concurrent.ParslPoolExecutor(config)`, or a pool of threads. All its workers
            must see `out`. None: processes of this call.
        workers: number of processes. None: one per core. 0: the calling thread makes the parts.
        version: your name for the code that `function` calls. Change it when that code changes.
        replace: replace a set of this name that was made from other sources, or by another function, as soon as the new
            one is complete. Parts that both have are not made again.
        root, checksums, classes, made: see `put`.
        progress: show a bar on standard error, if that is a terminal.

    A part is made again only if its source, `version`, or the own code of `function` has changed. What `function` calls
    is not looked at. A file counts as changed if its size or its modification time has changed. So, after a killed
    preparation, the next call makes only the missing parts. If several processes prepare the same name at the same
    time, one works, and the others wait for the set.

    Complete parts are kept for the next call, unless `fastload set gc` deletes them.

    Returns:
        The counts of the set, see `Prepared`.

    Raises:
        PrepareError: the function raised. The message names the source.
        FileExistsError: another set has this name.
        StoreFullError: there is no room.
        ValueError: there are no sources or no rows.
        RankError: MPI, which runs the executor, does not know the ranks of the launcher.

    Examples:
        >>> np.savez("a.npz", x=np.arange(3))
        >>> fastload.store.prepare(np.load, ["a.npz"], "numbers", workers=0).rows
        3
    """
    _check(sources, executor, workers)
    with preparation(
        fingerprint(function, version),
        sources,
        out,
        root=root,
        checksums=checksums,
        classes=classes,
        made=made,
        replace=replace,
        progress=progress,
    ) as found:
        total = len(found.given)
        with (
            _executor(executor, workers, len(found.missing)) as runs,
            tqdm(
                desc=f"Preparing {found.name}",
                total=total,
                initial=total - len(found.missing),
                unit="part",
                disable=None if progress else True,
            ) as bar,
        ):
            _make(found.work, function, found.missing, runs, bar)
        return found.seal()


def _check(sources: Any, executor: Any, workers: int | None) -> None:
    """Raise TypeError, ValueError or RuntimeError if `prepare` cannot run with these arguments, or here."""
    if isinstance(sources, str | os.PathLike):
        raise TypeError(f"sources must be a list, such as [{os.fspath(sources)!r}], got one path")
    if executor is not None and not isinstance(executor, Executor):
        raise TypeError(
            "executor must be a concurrent.futures.Executor (for Dask, client.get_executor()), got "
            f"{executor!r:.80}"
        )
    if executor is not None and workers is not None:
        raise ValueError("executor= and workers= are both given. Give only one of them")
    if type(executor).__module__.startswith("mpi4py."):
        check_world(mpi4py())  # or each rank would make all parts
    # A worker would wait for its parent, which waits for it.
    if getattr(current_process(), "_inheriting", False):
        raise RuntimeError(
            "prepare() was called while one of its worker processes imports the program. "
            'Call it under `if __name__ == "__main__":`'
        )


def _make(
    work: Work,
    function: Callable[[Any], Any],
    sources: Mapping[str, Any],
    executor: Executor | None,
    bar: Any,
) -> None:
    """Make a part of each source. Raises PrepareError."""
    # The token makes the calls new to Dask, which would return the old result, even a failure, of a call it knows.
    call = partial(_make_part, work, function, secrets.token_hex(4))
    for found, result in _results(call, sources, executor):
        try:
            reason = result()
        except OSError:
            raise  # the part's file could not be written
        except Exception as error:  # each engine has its own, such as Dask's KilledWorker
            source = shown(sources[found])
            said = f"the engine gave up the source {source}: {type(error).__name__}: {error}"
            if isinstance(error, BrokenExecutor):
                said = f"a worker process was killed, or ran out of memory, at {source} or another source"
            raise PrepareError(
                f"{said.rstrip('.')}. {bar.n} of {bar.total} parts are complete and kept. Call prepare again to "
                "continue"
            ) from error
        if reason is not None:
            raise PrepareError(f"the source {shown(sources[found])}: {reason}")
        bar.update()


def _results(
    call: Callable[[str, Any], str | None], sources: Mapping[str, Any], executor: Executor | None
) -> Iterator[tuple[str, Callable[[], str | None]]]:
    """Yield each fingerprint with a function that returns the result of `call` for it, in order of completion."""
    if executor is None:
        for found, source in sources.items():
            yield found, partial(call, found, source)
        return
    futures = {executor.submit(call, found, source): found for found, source in sources.items()}
    try:
        for future in as_completed(futures):
            yield futures[future], future.result
    finally:
        # Wait for running calls, so that no worker writes after the set is given up. Do not wait for cancelled ones: if
        # a call returns while it is cancelled, Dask's executor never wakes a thread that waits for it.
        wait([future for future in futures if not _cancel(future)])


def _cancel(future: Future[Any]) -> bool:
    try:
        return future.cancel()
    except NotImplementedError:  # Parsl's futures cannot be cancelled
        return False


def _make_part(
    work: Work, function: Callable[[Any], Any], attempt: str, found: str, source: Any
) -> str | None:
    """Make one part, in a worker; return why its source failed, or None. Raises StoreFullError, OSError.

    `attempt` is a token that makes the calls of each preparation unique.
    """
    if work.note(found) is not None:
        return None  # Dask runs a task again if the worker that had its result died
    try:
        batch = record_batch(function(source))
    except Exception as error:
        # Not the exception itself: if it cannot be pickled, or unpickled, it would end the pool.
        text = "".join(traceback.format_exception(error)).rstrip()
        return f"{type(error).__name__}: {error}\n{text}"
    work.write(batch, found)
    return None


@contextmanager
def _executor(
    executor: Executor | None, workers: int | None, parts: int
) -> Iterator[Executor | None]:
    """Yield what runs the parts: `executor`, or processes for the time of the block, or None, the calling thread."""
    workers = usable_cores() if workers is None else workers
    if executor is not None or not workers or not parts:
        yield executor
        return
    # Not fork: the child would inherit locks that threads of torch or a loader hold, without those threads.
    pool = ProcessPoolExecutor(
        min(workers, parts),
        mp_context=get_context("spawn"),
        initializer=_begin,
        initargs=(os.getpid(),),
    )
    with pool:
        yield pool


def _begin(parent: int) -> None:
    """Make this worker process end silently on Ctrl-C, and when its parent ends, even if the parent is killed."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    end_with_parent(parent, signal.SIGKILL)
