"""`prepare`: a function makes a part of each source, on any executor, and the parts become a set."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import reprlib
import secrets
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import BrokenExecutor, Executor, ProcessPoolExecutor, as_completed, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import current_process, get_context
from typing import Any, Literal

import pyarrow as pa
from tqdm import tqdm

from fastload.cores import usable_cores
from fastload.datasets.manifest import REJECTED, Index, Shard, described, read_index, shard_name
from fastload.disk import replace_file
from fastload.errors import PrepareError
from fastload.fingerprint import fingerprint
from fastload.store.columns import record_batch
from fastload.store.root import in_memory, locate, preparing, remove, seal, this_node, unsealed
from fastload.store.work import Work
from fastload.store.write import index_of


@dataclass(frozen=True)
class Prepared:
    """What `prepare` did.

    Attributes:
        path, id, rows: of the set.
        made, reused: the number of parts made by this call, and of those that were there.
        skipped: (source, reason) of each source that failed, with `on_error="skip"`.
    """

    path: str
    id: str
    rows: int
    made: int
    reused: int
    skipped: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        skipped = f", {len(self.skipped)} sources skipped" if self.skipped else ""
        return f"{self.path}: {self.rows:,} rows, {self.made} parts made, {self.reused} there already{skipped}"


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
    on_error: Literal["raise", "skip"] = "raise",
    replace: bool = False,
    progress: bool = False,
) -> Prepared:
    """Make a part of each source, and a set of the parts in the order of their sources.

    Args:
        function: takes a source and returns the columns of its part; see `put` for what can be columns. It must return
            the same rows whenever it gets the same source. It is pickled: a function of a module, or a
            `functools.partial` of one.
        sources: paths of files or folders, or any values that can be pickled.
        out: the name of the set, or its path.
        executor: runs the parts: any `concurrent.futures.Executor`, such as `mpi4py.futures.MPIPoolExecutor()`, Dask's
            `client.get_executor()`, `parsl.concurrent.ParslPoolExecutor(config)`, or a pool of threads. All its workers
            must see `out`. None: processes of this call.
        workers: how many processes; None: one for each core. 0: the calling thread makes the parts.
        version: change it if `function` has changed in what it reaches through other modules; see `fingerprint`.
        on_error: "skip" leaves out each source for which `function` raises, and lists it in `skipped` and in the file
            `rejected.txt` of the set.
        replace: a set of this name that was made of other sources, or by another function, is replaced once the new one
            is complete. Parts that both have are not made again.
        root, checksums, classes, made, progress: see `put`.

    A part is made again only if its source or `function` has changed; a file has if its size or its time of change has.
    So a preparation that was killed goes on with the parts that are missing if it is called again. If several processes
    prepare one name at once, one works, and the others wait for the set.

    Raises PrepareError with the source that failed, FileExistsError if there is another set of this name,
    StoreFullError, ValueError if there are no sources or no rows. Complete parts stay for the next call, unless
    `fastload store gc` deletes them.
    """
    _check(sources, executor, workers, on_error)
    path, name = locate(out, root)
    base = fingerprint(function, version)
    given = [(fingerprint(base, source, paths=True), source) for source in sources]
    if not given:
        raise ValueError(f"{name}: there are no sources to prepare")
    whole = fingerprint(*(key for key, _ in given))

    def waiting() -> None:
        if progress:
            tqdm.write(f"{path}: another process prepares {name}; waiting for it", file=sys.stderr)

    durable = not in_memory(path)
    with preparing(path, name, wait=waiting) as folder:
        old = _old_set(os.path.join(path, name))
        if old is not None and old.is_made_of(whole, strict=on_error == "raise"):
            shutil.rmtree(folder)
            return Prepared(old.path, old.index.id, old.index.rows, 0, len(given), old.skipped)
        if old is not None and not replace:
            raise old.refusal(given)
        work = Work(folder, durable if checksums is None else checksums, durable)
        if old is not None:
            work.take(old.path, old.index.shards)
        there = work.notes()
        missing = {key: source for key, source in given if key not in there}
        with (
            _executor(executor, workers, len(missing)) as runs,
            tqdm(
                desc=f"Preparing {name}",
                total=len(given),
                initial=sum(key in there for key, _ in given),
                unit="part",
                disable=None if progress else True,
            ) as bar,
        ):
            reasons = _make(work, function, missing, runs, bar, skip=on_error == "skip")
        skipped = tuple((_shown(source), reasons[key]) for key, source in given if key in reasons)
        shards, schema = _shards(
            work, [(key, source) for key, source in given if key not in reasons]
        )
        about = {**(made or {}), "fingerprint": whole}
        index = index_of(shards, schema, classes=classes, made=about)
        with unsealed(path, name, free=old is None) as new:
            work.gather(shards, new)
            _write_skipped(new, skipped, durable=durable)
            if old is not None:
                remove(path, name)
            place = seal(new, path, name, index)
        shutil.rmtree(folder)
    count = len(missing) - len(reasons)
    return Prepared(place, index.id, index.rows, count, len(given) - len(missing), skipped)


def _check(sources: Any, executor: Any, workers: int | None, on_error: str) -> None:
    """Raise TypeError, ValueError or RuntimeError if `prepare` cannot be called so."""
    if on_error not in ("raise", "skip"):
        raise ValueError(f'on_error must be "raise" or "skip", got {on_error!r}')
    if isinstance(sources, str | os.PathLike):
        raise TypeError(f"sources must be several, got one: [{os.fspath(sources)!r}], for example")
    if executor is not None and not isinstance(executor, Executor):
        raise TypeError(
            f"executor must be a concurrent.futures.Executor, of Dask client.get_executor(), got {executor!r:.80}"
        )
    if executor is not None and workers is not None:
        raise ValueError("give an executor or a number of workers, not both")
    # Else it would wait for its parent, which waits for it.
    if getattr(current_process(), "_inheriting", False):
        raise RuntimeError(
            "prepare() was called while a worker process of prepare() imports the program. "
            'Call it below `if __name__ == "__main__":`'
        )


def _make(
    work: Work,
    function: Callable[[Any], Any],
    sources: Mapping[str, Any],
    executor: Executor | None,
    bar: Any,
    *,
    skip: bool,
) -> dict[str, str]:
    """Make a part of each source; return why those failed that did, by fingerprint. Raises PrepareError."""
    reasons = {}
    # Dask answers a call that it knows with the result that it has, be it a failure.
    call = partial(_make_part, work, function, secrets.token_hex(4))
    for key, result in _results(call, sources, executor):
        try:
            reason = result()
        except BrokenExecutor as error:
            raise PrepareError(
                f"a worker process ended while parts were made, of {_shown(sources[key])} or another source: killed, "
                f"or out of memory. {bar.n} of {bar.total} parts are complete and stay: call prepare again to go on"
            ) from error
        except OSError:
            raise  # of the part's file
        except Exception as error:  # each engine has its own, such as Dask's KilledWorker
            reason = f"{type(error).__name__}: {str(error).rstrip('.')}"
            raise PrepareError(
                f"the engine gave up the source {_shown(sources[key])}: {reason}. "
                f"{bar.n} of {bar.total} parts are complete and stay: call prepare again to go on"
            ) from error
        if reason is not None and not skip:
            raise PrepareError(f"the source {_shown(sources[key])}: {reason}")
        if reason is not None:
            reasons[key] = reason.splitlines()[0]
        bar.update()
    return reasons


def _results(
    call: Callable[[str, Any], str | None], sources: Mapping[str, Any], executor: Executor | None
) -> Iterator[tuple[str, Callable[[], str | None]]]:
    """Yield each fingerprint, and what returns the result of `call` for it, as they come."""
    if executor is None:
        for key, source in sources.items():
            yield key, partial(call, key, source)
        return
    futures = {executor.submit(call, key, source): key for key, source in sources.items()}
    try:
        for future in as_completed(futures):
            yield futures[future], future.result
    finally:
        for future in futures:
            with suppress(NotImplementedError):  # Parsl's futures cannot be cancelled
                future.cancel()
        wait(futures)  # so that no worker writes after the set is given up


def _make_part(
    work: Work, function: Callable[[Any], Any], attempt: str, key: str, source: Any
) -> str | None:
    """Make one part, in a worker; return why its source failed, or None. Raises StoreFullError, OSError.

    `attempt` makes each preparation's calls different ones.
    """
    if work.note(key) is not None:
        return None  # Dask runs a task again if the worker that had its result died
    try:
        batch = record_batch(function(source))
    except Exception as error:
        # Not the exception itself: if it cannot be pickled, or unpickled, it would end the pool.
        text = "".join(traceback.format_exception(error)).rstrip()
        return f"{type(error).__name__}: {error}\n{text}"
    work.write(batch, key)
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
    # Not fork: the threads of torch, and of a loader, do not live on in the child, and the locks that they hold do.
    pool = ProcessPoolExecutor(
        min(workers, parts),
        mp_context=get_context("spawn"),
        initializer=_begin,
        initargs=(os.getpid(),),
    )
    with pool:
        yield pool


def _begin(parent: int) -> None:
    """Have this worker process end silently on Ctrl-C, and with its parent, also if that is killed."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    with suppress(OSError, AttributeError):  # systems without prctl(2)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


_PR_SET_PDEATHSIG = 1


def _shards(work: Work, given: list[tuple[str, Any]]) -> tuple[list[Shard], pa.Schema]:
    """Return the parts that have rows, in order, and their schema.

    Raises PrepareError, and ValueError if no part has rows.
    """
    shards: list[Shard] = []
    schema, example = None, ""
    for key, source in given:
        note = work.note(key)
        if note is None:
            raise PrepareError(
                f"the part of {_shown(source)} was made, but is not in {work.folder} on {this_node()}: all workers "
                "must see that folder. Name one that all nodes share, and copy the set to each with fastload stage"
            )
        if not note.shard.rows:
            continue
        if schema is None:
            schema, example = note.schema, _shown(source)
        if not note.schema.equals(schema, check_metadata=True):
            raise PrepareError(
                f"the source {_shown(source)} gave the columns {described(note.schema)}, "
                f"{example} gave {described(schema)}"
            )
        shards.append(dataclasses.replace(note.shard, name=shard_name(len(shards))))
    if schema is None:
        raise ValueError("there is nothing to prepare: no part has a row")
    return shards, schema


def _shown(source: Any) -> str:
    return os.fspath(source) if isinstance(source, str | os.PathLike) else reprlib.repr(source)


@dataclass(frozen=True)
class _OldSet:
    """A set that has the name already. `skipped` are the sources that it was made without."""

    path: str
    index: Index
    skipped: tuple[tuple[str, str], ...]

    def is_made_of(self, whole: str, *, strict: bool) -> bool:
        return self.index.made.get("fingerprint") == whole and not (strict and self.skipped)

    def refusal(self, given: list[tuple[str, Any]]) -> FileExistsError:
        known = {shard.fingerprint for shard in self.index.shards}
        new = [_shown(source) for key, source in given if key not in known]
        reason = "made of more sources, or of these in another order"
        if known == {""}:
            reason = "which prepare did not make"
        elif self.skipped:
            reason = f"made without {len(self.skipped)} sources that failed, such as {self.skipped[0][0]}"
        elif new:
            reason = f"and {len(new)} of {len(given)} sources, such as {new[0]}, or the function, are not those it has"
        return FileExistsError(
            17,
            f"there is a set of this name, {reason}: pass replace=True, or choose another name",
            self.path,
        )


def _old_set(path: str) -> _OldSet | None:
    try:
        index = read_index(path)
    except FileNotFoundError:
        return None
    skipped: list[tuple[str, str]] = []
    with suppress(FileNotFoundError), open(os.path.join(path, REJECTED), "rb") as file:
        for line in os.fsdecode(file.read()).splitlines():
            source, _, reason = line.partition("\t")
            skipped.append((source, reason))
    return _OldSet(path, index, tuple(skipped))


def _write_skipped(folder: str, skipped: Iterable[tuple[str, str]], *, durable: bool) -> None:
    lines = [
        " ".join(source.split()) + "\t" + " ".join(reason.split()) + "\n"
        for source, reason in skipped
    ]
    if lines:
        with replace_file(os.path.join(folder, REJECTED), durable=durable) as file:
            file.write(os.fsencode("".join(lines)))
