"""Two ranks that leave their group and form another one, with loaders of two purposes. Rank 0 prints what it saw.

groups.py FOLDER
"""

from __future__ import annotations

import json
import os
import sys
import threading
from typing import Any

import torch.distributed as dist

from fastload import DataLoader
from tests.fakes import Numbers, fastload_threads


def report(loader: DataLoader[Any]) -> dict[str, Any]:
    """Wait until each rank has said what it will, and return what is heard."""
    own = loader.stats(ranks=True)
    for _ in range(3):  # what a rank said before this one spoke does not count
        dist.barrier()
        found = loader.stats(ranks=True)
    dist.barrier()
    return {
        "own": own.loader,
        "loader": found.loader,
        "batches": {one.rank: one.batches for one in found.ranks},
        "epochs": {one.rank: one.epoch for one in found.ranks},
        "ended": [one.ended for one in found.ranks],
        "unheard": found.unheard,
        "threads": [t.name for t in threading.enumerate()].count("fastload-ranks"),
    }


def in_a_fork(loader: DataLoader[Any]) -> str:
    """Return what a fork of this rank says of all ranks, and whether it speaks."""
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        said = f"{len(list(loader))} batches. {loader.stats(ranks=True).note} {fastload_threads()}"
        os.write(write, said.encode())
        os._exit(0)
    os.close(write)
    with open(read) as file:
        text = file.read()
    os.waitpid(pid, 0)
    return text


def main(folder: str) -> None:
    rank = int(os.environ["RANK"])
    seen: dict[str, Any] = {}
    for group in ("first", "second"):
        # A group in a file: at one port, a fast rank may still find the store of the group before.
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/{group}", rank=rank, world_size=2
        )
        train, valid = DataLoader(Numbers(40), 8), DataLoader(Numbers(9), 3)
        for _ in range(2):
            list(train)
        for _ in range(3):
            next(iter(train))
        if rank == 0:
            list(valid)
        seen[group] = {"train": report(train), "valid": report(valid)}
        seen[group]["fork"] = in_a_fork(valid)
        dist.destroy_process_group()
        seen[group]["alone"] = train.stats(ranks=True).note
    if rank == 0:
        print(json.dumps(seen))


if __name__ == "__main__":
    main(sys.argv[1])
