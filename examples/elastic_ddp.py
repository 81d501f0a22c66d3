"""Synchronous training that survives the death of a rank, and resumes with any number of ranks.

    torchrun --nproc-per-node=2 --max-restarts=3 examples/elastic_ddp.py CHECKPOINTS
    torchrun --nproc-per-node=3 --max-restarts=3 examples/elastic_ddp.py CHECKPOINTS     # later, on another machine

If a rank dies, torchrun starts all ranks again. Each loads the newest checkpoint. The loader's state is part of it, so
the epoch continues with the next batch. With `--die-at STEP` the last rank kills itself after that step, once.
"""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import fastload
import fastload.distributed

SAMPLES, GLOBAL_BATCH, EPOCHS = 480, 24, 2


def main() -> None:
    """Train, from the newest checkpoint if there is one, and save one after each step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoints", type=Path, help="folder")
    parser.add_argument("--die-at", type=int, help="step after which the last rank kills itself")
    args = parser.parse_args()
    args.checkpoints.mkdir(exist_ok=True)

    # After a restart, init_process_group would find the addresses of ranks that have ended.
    here = fastload.distributed.init("gloo")
    rank, world_size = here.rank, here.world_size
    torch.manual_seed(0)  # all ranks begin with the same parameters and the same data
    x = torch.randn(SAMPLES, 8)
    dataset = TensorDataset(x, x.sum(1, keepdim=True).sin(), torch.arange(SAMPLES))
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    sampler = fastload.RankSampler(dataset, seed=0)  # its order is the same for any number of ranks
    batch_size = GLOBAL_BATCH // world_size
    loader = fastload.DataLoader(dataset, batch_size, sampler=sampler, num_workers=2, seed=0)

    step = epoch = 0
    if saved := sorted(args.checkpoints.glob("*.pt")):
        state = torch.load(saved[-1])
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        loader.load_state_dict(state["loader"])
        step, epoch = state["step"], state["loader"]["epoch"]
        print(f"rank {rank} of {world_size} goes on after step {step}")

    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    log = (args.checkpoints / f"log-{world_size}-{attempt}-{rank}").open("a", buffering=1)
    for _ in range(epoch, EPOCHS):
        for inputs, targets, indices in loader:
            if step == args.die_at and attempt == 0 and rank == world_size - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            step += 1
            log.write(f"{step} {' '.join(map(str, indices.tolist()))}\n")
            if rank == 0:
                path = args.checkpoints / f"{step:04}.pt"
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save({**state, "loader": loader.state_dict(), "step": step}, f"{path}.part")
                os.rename(f"{path}.part", path)  # a checkpoint is whole, or not there
    log.close()
    if rank == 0:
        newest = args.checkpoints / f"{step:04}.pt"
        print(f"trained {step} steps, the last on {world_size} ranks; newest checkpoint: {newest}")


if __name__ == "__main__":
    main()
