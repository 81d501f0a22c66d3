"""A first language model: sources mixed by weight, a tokenizer, packed rows, a small GPT, exact resume, several ranks.

    pip install tokenizers
    python examples/first_language_model.py
    torchrun --nproc-per-node 2 examples/first_language_model.py --folder two-ranks

It learns from texts that come with Python: code of its library, and its manual. If it is stopped, at any moment, the
same command resumes from the last checkpoint.
"""

from __future__ import annotations

import argparse
import os
import sysconfig
from itertools import chain
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import torch
import torch.distributed as dist
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from fastload import DataLoader, distributed
from fastload.sequences import Mixture, Packed

VOCABULARY, LENGTH = 2048, 128  # tokens, and tokens of a row
GLOBAL_BATCH = 8  # rows of all ranks in a step
END = 0  # the token after each text
WEIGHTS = {"code": 0.6, "manual": 0.4}  # shares of rows


def texts() -> dict[str, list[str]]:
    """Return the texts of each source. Put yours in their place."""
    code = sorted(Path(sysconfig.get_path("stdlib"), "asyncio").glob("*.py"))
    return {"code": [path.read_text() for path in code], "manual": list(topics.values())}


def tokenizer_for(sources: dict[str, list[str]]) -> Tokenizer:
    """Return a tokenizer by byte pairs that has learnt from the texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    options = {"vocab_size": VOCABULARY, "special_tokens": ["<end>"], "show_progress": False}
    trainer = trainers.BpeTrainer(**options, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(chain(*sources.values()), trainer)
    return tokenizer


class GPT(nn.Module):
    """Rows of packed texts, int64[B, T], become logits of their next tokens, float32[B, T, VOCABULARY]."""

    def __init__(self, width: int = 128, heads: int = 4, blocks: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(LENGTH, width)
        kind = {"activation": "gelu", "batch_first": True, "norm_first": True}
        block = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, **kind)
        self.blocks = nn.TransformerEncoder(block, blocks, enable_nested_tensor=False)
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, VOCABULARY))

    def forward(self, tokens: Tensor, positions: Tensor, segments: Tensor) -> Tensor:
        """Return the logits. A token sees those before it in its text."""
        seen = (segments[:, :, None] == segments[:, None, :]).tril()
        hidden = seen.logical_not().repeat_interleave(self.heads, dim=0)
        return self.head(self.blocks(self.tokens(tokens) + self.positions(positions), hidden))


def sum_over_ranks(value: Tensor) -> Tensor:
    """Return the sum of a tensor over all ranks."""
    if dist.is_initialized():
        dist.all_reduce(value)
    return value


def main() -> None:
    """Train from the last checkpoint on, if there is one."""
    parser = argparse.ArgumentParser(description="A first language model.")
    parser.add_argument("--folder", type=Path, default=Path("gpt"), help="its folder; default gpt")
    parser.add_argument("--steps", type=int, default=100, help="default 100")
    parser.add_argument("--save-every", type=int, default=10, help="steps; default 10")
    args = parser.parse_args()

    here = distributed.init()  # under torchrun, mpiexec or srun; alone it is rank 0 of 1
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sources, vocabulary = texts(), args.folder / "tokenizer.json"
    args.folder.mkdir(parents=True, exist_ok=True)
    if here.rank == 0 and not vocabulary.exists():
        tokenizer_for(sources).save(f"{vocabulary}.partial")
        os.replace(f"{vocabulary}.partial", vocabulary)
    sum_over_ranks(torch.zeros(1))  # so the others wait for the tokenizer

    encode = Tokenizer.from_file(str(vocabulary)).encode
    rows = {
        name: Packed([np.array([*encode(text).ids, END]) for text in source], LENGTH)
        for name, source in sources.items()
    }
    mixture = Mixture(rows, weights=WEIGHTS, seed=0, epoch_samples=args.steps * GLOBAL_BATCH)
    loader = DataLoader(
        mixture.dataset,
        batch_size=GLOBAL_BATCH // here.world_size,
        sampler=mixture,  # draws the sources, shuffles them, and gives this rank its part
        num_workers=distributed.cores(),
        seed=0,
        pin_memory=device.type == "cuda",
    )
    torch.manual_seed(0)  # the same weights on every rank
    model = GPT().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    parallel = DistributedDataParallel(model) if here.world_size > 1 else model

    checkpoint, losses = args.folder / "checkpoint.pt", []
    if checkpoint.exists():
        saved = torch.load(checkpoint, map_location=device)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(saved["loader"])
        losses = saved["losses"]
        print(f"{here} resumes after step {len(losses)}")

    for batch in loader:
        batch = {key: value.to(device, non_blocking=True) for key, value in batch.items()}
        tokens, segments = batch["tokens"], batch["segments"]
        follows = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)  # in the same text
        targets = torch.where(follows, tokens[:, 1:], -100)
        count = sum_over_ranks(follows.sum())  # ranks may have different numbers of targets
        logits = parallel(tokens, batch["positions"], segments)[:, :-1]
        loss = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / count
        optimizer.zero_grad()
        (loss * here.world_size).backward()  # DistributedDataParallel takes the mean over ranks
        optimizer.step()
        losses.append(sum_over_ranks(loss.detach()).item())
        step = len(losses)
        if here.rank == 0 and (step % args.save_every == 0 or step == args.steps):
            print(f"step {step}: loss {losses[-1]:.4f}")
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            state |= {"loader": loader.state_dict(), "losses": losses}
            torch.save(state, f"{checkpoint}.partial")
            os.replace(f"{checkpoint}.partial", checkpoint)  # it is whole, or not there
    if here.rank == 0:
        print("epochs of each source:", mixture.epochs(len(losses)))
        print(loader.stats())  # what bounds this training


if __name__ == "__main__":
    main()
