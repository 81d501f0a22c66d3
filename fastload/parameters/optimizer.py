"""How gradients change parameters: torch's optimizers for dense tensors, and the same rules row by row for tables."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """How servers apply gradients.

    Args:
        name: "sgd", "adagrad" or "adam": the rules of `torch.optim`.
        lr: learning rate for pushes without one.
        momentum: momentum of "sgd".
        betas: betas of "adam".
        eps: eps of "adagrad" and "adam". None: torch's defaults, 1e-10 and 1e-8.

    Each row of a table has its own state and its own count of steps. So a row without a gradient does not change, like
    a parameter without a gradient in `torch.optim`.
    """

    name: Literal["sgd", "adagrad", "adam"] = "sgd"
    lr: float = 0.01
    momentum: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float | None = None

    def __post_init__(self) -> None:
        if self.name not in ("sgd", "adagrad", "adam"):
            raise ValueError(f'optimizer must be "sgd", "adagrad" or "adam", got {self.name!r}')
        if not self.lr >= 0 or not self.momentum >= 0:
            raise ValueError(
                f"lr and momentum must be 0 or more, got lr={self.lr} and momentum={self.momentum}"
            )

    @property
    def _eps(self) -> float:
        default = 1e-10 if self.name == "adagrad" else 1e-8
        return default if self.eps is None else self.eps

    def of(self, parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
        """Return torch's optimizer of some tensors."""
        if self.name == "adagrad":
            return torch.optim.Adagrad(parameters, lr=self.lr, eps=self._eps)
        if self.name == "adam":
            return torch.optim.Adam(parameters, lr=self.lr, betas=self.betas, eps=self._eps)
        return torch.optim.SGD(parameters, lr=self.lr, momentum=self.momentum)

    def row_widths(self, dim: int) -> dict[str, int]:
        """Return the sizes of the optimizer's states for a row of `dim` numbers, by name. New rows have zeros."""
        if self.name == "adagrad":
            return {"sum": dim}
        if self.name == "adam":
            return {"exp_avg": dim, "exp_avg_sq": dim, "step": 1}
        return {"momentum_buffer": dim} if self.momentum else {}

    def step_rows(
        self, rows: Tensor, gradients: Tensor, state: dict[str, Tensor], lr: float
    ) -> None:
        """Apply gradients to rows in place. `gradients` and each tensor of `state` have one row for each of `rows`."""
        if self.name == "adagrad":
            total = state["sum"].addcmul_(gradients, gradients)
            rows.addcdiv_(gradients, total.sqrt().add_(self._eps), value=-lr)
        elif self.name == "adam":
            first, second = self.betas
            step = state["step"].add_(1).double()
            average = state["exp_avg"].lerp_(gradients, 1 - first)
            square = state["exp_avg_sq"].mul_(second)
            square.addcmul_(gradients, gradients, value=1 - second)
            correction = (1 - second**step).sqrt().float()
            divisor = square.sqrt().div_(correction).add_(self._eps)
            rows.sub_(average.div(divisor).mul_((lr / (1 - first**step)).float()))
        elif self.momentum:
            rows.sub_(state["momentum_buffer"].mul_(self.momentum).add_(gradients), alpha=lr)
        else:
            rows.sub_(gradients, alpha=lr)


def checked_rate(lr: float | None) -> float | None:
    """Return a push's learning rate. Raise ValueError if it is not a finite number of 0 or more."""
    if lr is not None and not (lr >= 0 and math.isfinite(lr)):
        raise ValueError(f"learning_rate must be a finite number of 0 or more, got {lr}")
    return lr
