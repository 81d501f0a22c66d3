"""`fastload env`: show what a rank detects about itself, and test if it reaches the others."""

from __future__ import annotations

import os
import warnings
from collections.abc import Collection, Iterator
from itertools import groupby
from typing import TYPE_CHECKING, Annotated

import click

from fastload._kit.options import Option, options
from fastload.cli._command import Command

if TYPE_CHECKING:
    from fastload.distributed import Detected


@options
class Env:
    """What to test."""

    meet: bool = False
    """Also import torch, count its devices, connect to the other ranks and add up the rank numbers."""
    timeout: Annotated[float, Option(min=0, min_open=True)] = 60.0
    """Time to wait for the other ranks, in seconds."""


@Command
def env(options: Env) -> None:
    """Show which rank this process is, and which variables say so.

    Under a launcher, each rank prints its own lines. With --meet, the ranks also form the process group that training
    would form. They print its backend and their devices, so errors show up before a job starts.

    \b
    Examples:
        fastload env
        mpiexec -n 4 fastload env --meet
        torchrun --nproc-per-node 4 --no-python fastload env --meet
    """
    from fastload.distributed import detect_rank

    detected = detect_rank()
    lines = _described(detected)
    if options.meet:
        lines += _meet(options.timeout)
    lines += _kernels()
    lines += _cores(detected, met=options.meet)
    # One write, so that the lines of other ranks do not come between them.
    click.echo("".join(f"{detected.rank}: {line}\n" for line in lines), nl=False)


def _described(detected: Detected) -> list[str]:
    """Return the lines on the rank, the variables that define it, and the software."""
    import platform
    from importlib.util import find_spec
    from runpy import run_path

    import fastload

    rank = detected.rank
    spec = find_spec("torch")
    # Not `torch.__version__`: to import torch takes seconds.
    torch = run_path(os.path.join(os.path.dirname(str(spec and spec.origin)), "version.py"))
    said = dict.fromkeys(source for sources in detected.origins.values() for source in sources)
    return [
        f"local rank {rank.local_rank} of {rank.local_size} on {os.uname().nodename}, launcher {rank.launcher}",
        f"found in {', '.join(said)}" if said else "no variable of a launcher is set",
        f"Python {platform.python_version()}, torch {torch['__version__']}, fastload {fastload.__version__}",
    ]


def _meet(timeout_s: float) -> Iterator[str]:
    """Yield the line on the devices. Connect to the other ranks until the command ends, and yield the line on them.

    Raise ClickException if the rank numbers add up to a wrong sum.
    """
    from time import perf_counter

    import torch
    import torch.distributed as dist

    from fastload.distributed import backend_for, init, met_by, shutdown

    count = torch.cuda.device_count()
    yield f"{count or 'no'} CUDA devices, backend {backend_for('auto')}"
    click.get_current_context().call_on_close(shutdown)
    began = perf_counter()
    rank = init(timeout_s=timeout_s)
    if not dist.is_initialized():
        yield f"no other ranks to meet ({met_by()})"
        return
    total = torch.tensor([rank.rank])
    dist.all_reduce(total)
    elapsed_s, expected = perf_counter() - began, rank.world_size * (rank.world_size - 1) // 2
    if total.item() != expected:
        raise click.ClickException(
            f"{rank}: the rank numbers add up to {total.item()}, but should add up to {expected}. "
            "Give each process of the job a different rank"
        )
    yield f"met the other ranks in {elapsed_s:.2f} s ({met_by()}); the ranks add up to {expected}"


def _cores(detected: Detected, *, met: bool) -> Iterator[str]:
    """Yield the line on the cores of this rank, and the warning if they are too few."""
    from fastload import distributed
    from fastload.distributed.affinity import cores_of

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        count = distributed.cores() if met else cores_of(detected.rank, (), stacklevel=1)
    own = os.sched_getaffinity(0)
    yield f"cores for this rank: {count}; this rank may run on cores {_ranges(own)} of {os.cpu_count()}"
    yield from (f"warning: {warning.message}" for warning in caught)


def _kernels() -> list[str]:
    """Return the lines on the image kernels."""
    try:
        from fastload.image import kernels
    except ImportError as error:  # Pillow
        return [f"image kernels: off: {error}"]
    return [f"image kernels: {kernels.state()}", f"region decoder: {kernels.decoder_state()}"]


def _ranges(numbers: Collection[int]) -> str:
    """Return the numbers 0, 1, 2, 3, 8 as "0-3,8"."""
    runs = groupby(enumerate(sorted(numbers)), key=lambda pair: pair[1] - pair[0])
    ends = [[number for _, number in run] for _, run in runs]
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in ends)
