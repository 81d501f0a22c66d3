"""What a rank does: ten DDP steps on its part of each global batch, a report as JSON, and then the end asked for.

    ten_steps.py DIRECTORY [end|kill|raise|stick] [TIMEOUT_S]

The last rank is the one that is killed, raises, or gets stuck, while the others wait for it in a collective. The
variables that FORGET names are dropped first, and mpi4py if it is named there.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import fastload
from fastload import distributed
from tests.distributed.programs.model import global_batch, model, train


def main(directory: Path, ending: str = "end", timeout_s: str = "60") -> None:
    for name in os.environ.get("FORGET", "").split():
        os.environ.pop(name, None)
        if name == "mpi4py":
            sys.modules[name] = None  # type: ignore[assignment]
    rank = distributed.init(timeout_s=float(timeout_s))
    net = model()
    train(DistributedDataParallel(net), lambda step: part(global_batch(step), rank))
    parameters = torch.cat([parameter.detach().flatten() for parameter in net.parameters()])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cores = distributed.cores()
    report = {
        "rank": rank.rank,
        "world_size": rank.world_size,
        "local": [rank.local_rank, rank.local_size],
        "launcher": rank.launcher,
        "again": distributed.init() == rank,
        "torch": [dist.get_rank(), dist.get_world_size(), dist.get_backend()],
        "sampler": [fastload.RankSampler(8).rank, fastload.RankSampler(8).world_size],
        "met_by": distributed.met_by(),
        "hash": hashlib.sha256(parameters.numpy().tobytes()).hexdigest(),
        "parameters": parameters.tolist(),
        "cores": cores,
        "affinity": sorted(os.sched_getaffinity(0)),
        "warnings": [str(warning.message) for warning in caught],
        "pid": os.getpid(),
    }
    (directory / f"{rank.rank}.json").write_text(json.dumps(report))
    dist.barrier()
    if ending == "end":
        distributed.shutdown()
        distributed.shutdown()
        assert not dist.is_initialized()
        assert (
            distributed.init(timeout_s=float(timeout_s)) == rank
        )  # and again, to be ended at exit
        dist.barrier()
        return
    (directory / "moment").write_text(repr(time.monotonic()))
    if rank.rank == rank.world_size - 1:
        if ending == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if ending == "raise":
            raise RuntimeError("this rank has had enough")
        signal.pause()
    dist.all_reduce(torch.zeros(1))


def part(batch: tuple[torch.Tensor, ...], rank: distributed.Rank) -> tuple[torch.Tensor, ...]:
    """Return the rank's part of a global batch: every world_size-th sample."""
    return tuple(tensor[rank.rank :: rank.world_size] for tensor in batch)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
