"""Promise: A small GPT on packed rows from a mixture with a schedule ends in the same weights, bit for bit, after three
stops.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor, nn

import fastload
from fastload.sequences import Mixture, Packed

ROW, WORDS, STEPS = 64, 50, 14


class Texts(torch.utils.data.Dataset[Tensor]):
    """Texts of tokens, of varying length."""

    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        sizes = torch.randint(3, 40, (count,), generator=generator).tolist()
        self.texts = [torch.randint(1, WORDS, (size,), generator=generator) for size in sizes]

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> Tensor:
        return self.texts[index]


class Gpt(nn.Module):
    """Two layers of attention within the segments of a row."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, 16), nn.Embedding(ROW, 16)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(16, WORDS)

    def forward(self, rows: dict[str, Tensor]) -> Tensor:
        segments = rows["segments"]
        other = segments[:, :, None] != segments[:, None, :]
        later = torch.ones(ROW, ROW, dtype=torch.bool).triu(1)
        masked = (other | later).repeat_interleave(2, 0)
        hidden = self.words(rows["tokens"]) + self.places(rows["positions"])
        for layer in self.layers:
            hidden = layer(hidden, src_mask=masked)
        logits, follows = self.head(hidden)[:, :-1], segments[:, 1:] == segments[:, :-1]
        targets = torch.where(follows & (segments[:, 1:] > 0), rows["tokens"][:, 1:], -100)
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def weights(step: int) -> dict[str, float]:
    return {"code": 1 + step / 4, "web": 3}


def train(stop: int, saved: Any = None, workers: int = 2) -> tuple[Any, list[float]]:
    torch.manual_seed(0)
    model = Gpt()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    sources = {
        name: Packed(Texts(count, seed), ROW)
        for seed, (name, count) in enumerate([("code", 60), ("web", 90)])
    }
    mixture = Mixture(sources, weights=weights, seed=2)
    loader = fastload.DataLoader(
        mixture.dataset, batch_size=8, sampler=mixture, num_workers=workers, seed=2
    )
    step, losses = 0, []
    if saved:
        step = saved["step"]
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(json.loads(saved["loader"]))
        torch.set_rng_state(saved["random"])
    while step < stop:
        for rows in loader:
            optimizer.zero_grad()
            loss = model(rows)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            step += 1
            if step == stop:
                break
    saved = {
        "step": step,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "loader": json.dumps(loader.state_dict()),
        "random": torch.get_rng_state(),
    }
    loader.close()
    return saved, losses


def test_a_gpt_ends_in_the_same_weights_after_three_stops() -> None:
    whole, losses = train(STEPS)
    saved, parts = None, []
    for stop, workers in ((3, 2), (6, 0), (11, 3), (STEPS, 1)):
        saved, more = train(stop, saved, workers)
        parts += more
    assert parts == losses
    assert losses[-1] < losses[0] - 0.1, "it learns"
    for name, parameter in whole["model"].items():
        assert torch.equal(parameter, saved["model"][name]), name
    assert json.loads(whole["loader"]) == json.loads(saved["loader"])
