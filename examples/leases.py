"""Features of a dataset by workers that do not wait for each other. A slow one takes fewer shards.

    torchrun --nproc-per-node=3 --max-restarts=3 examples/leases.py features

The workers lease shards over torchrun's own store. If a worker dies, torchrun starts all of them again, and the shards
that the checkpoint has are not read again. With `--die` a worker kills itself after its sixth batch, once.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import fastload
from fastload.elastic import Leases, LeaseSampler


def main() -> None:
    """Write a file for each batch, from the newest checkpoint on if there is one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="folder for features and checkpoint")
    parser.add_argument("--die", action="store_true")
    args = parser.parse_args()
    args.folder.mkdir(exist_ok=True)
    checkpoint = args.folder / "leases.json"
    rank, attempt = int(os.environ["RANK"]), os.environ["TORCHELASTIC_RESTART_COUNT"]

    torch.manual_seed(0)
    dataset = TensorDataset(torch.arange(2_000), torch.randn(2_000, 8))
    net = nn.Linear(8, 4).eval()
    with Leases(len(dataset), shard=64) as leases, torch.no_grad():
        if checkpoint.exists():
            leases.load_state_dict(json.loads(checkpoint.read_text()))
            print(f"worker {rank} goes on, attempt {attempt}")
        sampler = LeaseSampler(leases, batch_size=16, shuffle=False)
        loader = fastload.DataLoader(dataset, batch_sampler=sampler, num_workers=2, seed=0)
        step = 0
        for step, (indices, inputs) in enumerate(loader, 1):
            path = args.folder / f"{int(indices[0]):06}-{attempt}.pt"
            part = path.with_suffix(".part")  # torchrun may end this process while it writes
            torch.save({"indices": indices, "features": net(inputs)}, part)
            part.rename(path)
            part = checkpoint.with_suffix(f".part-{rank}")
            part.write_text(json.dumps(leases.state_dict()))  # what all workers have done
            part.rename(checkpoint)
            if args.die and step == 6 and attempt == "0":
                os.kill(os.getpid(), signal.SIGKILL)
    print(f"worker {rank} wrote {step} batches of features into {args.folder}")


if __name__ == "__main__":
    main()
