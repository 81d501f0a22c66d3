"""Random numbers of plans: those of torchvision's calls, drawn by torch. The kernels compute the same ones."""

from __future__ import annotations

import torch


def uniform(low: float, high: float, generator: torch.Generator | None) -> float:
    """Return a float32 of [low, high). Draw it from `generator`; None is torch's default generator."""
    drawn = torch.empty(1, dtype=torch.float32, device="cpu")
    return float(drawn.uniform_(low, high, generator=generator).item())


def below(n: int, generator: torch.Generator | None) -> int:
    """Return a number of [0, n), drawn as `uniform` draws."""
    drawn = torch.empty(1, dtype=torch.int64, device="cpu")
    return int(drawn.random_(0, n, generator=generator).item())
