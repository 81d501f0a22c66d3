"""Make two sets of MNIST's images and labels, on the ranks of an MPI job, or on this machine's cores.

mpiexec -n 4 python prepare.py RAW SETS
python prepare.py RAW SETS
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

from fastload import distributed, store
from fastload.datasets import MNIST

PARTS = 20


def rows_of(raw: str, split: str, part: int) -> dict[str, torch.Tensor]:
    """Return a part of a split: x is uint8[n, 28, 28], y is int64[n]."""
    mnist = MNIST(raw, train=split == "train")
    return {
        "x": mnist.data.tensor_split(PARTS)[part],
        "y": mnist.targets.tensor_split(PARTS)[part],
    }


@contextmanager
def engine() -> Iterator[tuple[bool, Executor | None]]:
    """Yield whether this process submits the parts, and what runs them; None: processes of this machine."""
    if distributed.detect_rank().rank.world_size == 1:
        yield True, None
        return
    try:
        from mpi4py.futures import MPICommExecutor
    except ImportError as error:
        raise SystemExit(
            f"prepare.py needs mpi4py on several ranks ({error}): pip install mpi4py"
        ) from None

    with MPICommExecutor() as executor:  # None on all ranks but one, which work until it ends
        yield executor is not None, executor


def main() -> None:
    """Prepare both splits. Parts that are there already are not made again."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("raw", help="folder with MNIST's files")
    parser.add_argument("sets", type=Path, help="folder of the sets")
    args = parser.parse_args()
    with engine() as (submits, executor):
        for split in ("train", "test") if submits else ():
            made = store.prepare(
                partial(rows_of, args.raw, split),
                range(PARTS),
                args.sets.absolute() / split,
                executor=executor,
                version=str(MNIST(args.raw)),
                replace=True,
            )
            print(f"Data SAVED to DISK {made}")


if __name__ == "__main__":
    main()
