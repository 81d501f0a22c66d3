"""A rank that trains a small recurrent model on frames, in batches by a budget. It stops at a step, or continues.

    torchrun --nproc-per-node=2 speech.py CHECKPOINT STOP

It prints the hash of its weights and the frames of each of its batches.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pad_sequence

import fastload
from fastload import distributed
from fastload.sequences import TokenBatchSampler

LENGTHS = [5 + index * 53 % 96 for index in range(150)]


class Speech(torch.utils.data.Dataset[Any]):
    """Frames float32[length, 8] with noise of the sample's own stream, and a class."""

    def __len__(self) -> int:
        return len(LENGTHS)

    def __getitem__(self, index: int) -> Any:
        tone = torch.sin(torch.arange(LENGTHS[index])[:, None] * (index % 4 + 1) * 0.3)
        return tone + 0.1 * torch.randn(LENGTHS[index], 8), index % 4


def padded(samples: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    frames, classes = zip(*samples, strict=True)
    return pad_sequence([*frames], batch_first=True), torch.tensor(classes)


class Classifier(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.recurrent = torch.nn.GRU(8, 16, batch_first=True)
        self.head = torch.nn.Linear(16, 4)

    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        return self.head(self.recurrent(frames)[0].mean(1))


def main(checkpoint: Path, stop: int) -> None:
    here = distributed.init()
    torch.manual_seed(0)
    model = DistributedDataParallel(Classifier())
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    loader = fastload.DataLoader(
        Speech(),
        batch_sampler=TokenBatchSampler(LENGTHS, budget=600, pool=64, seed=1),
        collate_fn=padded,
        num_workers=2,
        seed=1,
    )
    step = 0
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        step = saved["step"]
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(json.loads(saved["loader"]))
    frames_seen = []
    while step < stop:
        for frames, classes in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(frames), classes).backward()
            optimizer.step()
            frames_seen.append(frames.shape[0] * frames.shape[1])
            step += 1
            if step == stop:
                break
    useful = loader.stats().useful_share or 0.0
    if here.rank == 0:
        state = json.dumps(loader.state_dict())
        torch.save(
            {
                "step": step,
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "loader": state,
            },
            checkpoint,
        )
    weights = b"".join(one.detach().numpy().tobytes() for one in model.parameters())
    said = {"weights": hashlib.sha256(weights).hexdigest(), "frames": frames_seen, "useful": useful}
    Path(f"{checkpoint}.{here.rank}.json").write_text(json.dumps(said))
    loader.close()
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
