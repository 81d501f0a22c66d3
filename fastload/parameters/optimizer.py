"""How gradients change parameters: the rules of torch's optimizers, for a dense tensor or row by row."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

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

    Examples:
        >>> adam = fastload.parameters.Optimizer(name="adam", lr=1e-3)
        >>> server = fastload.parameters.Server(optimizer=adam)
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

    def row_widths(self, dim: int) -> dict[str, int]:
        """Return the sizes of the optimizer's states for a row of `dim` numbers, by name. New rows have zeros."""
        if self.name == "adagrad":
            return {"sum": dim}
        if self.name == "adam":
            return {"exp_avg": dim, "exp_avg_sq": dim, "step": 1}
        return {"momentum_buffer": dim} if self.momentum else {}

    def state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return the states of a dense parameter, by name: zeros."""
        return {
            name: torch.zeros(()) if name == "step" else torch.zeros_like(parameter)
            for name in self.row_widths(1)
        }

    def step(self, values: Tensor, gradient: Tensor, state: dict[str, Tensor], lr: float) -> None:
        """Apply a gradient to a dense parameter in place, or to rows: then all tensors have one row for each."""
        if self.name == "adagrad":
            total = state["sum"].addcmul_(gradient, gradient)
            values.addcdiv_(gradient, total.sqrt().add_(self._eps), value=-lr)
        elif self.name == "adam":
            first, second = self.betas
            step = state["step"].add_(1)
            count: Any = step.double() if step.ndim else step.item()
            correction, rate = (1 - second**count) ** 0.5, lr / (1 - first**count)
            if step.ndim:
                correction, rate = correction.float(), rate.float()
            average = state["exp_avg"].lerp_(gradient, 1 - first)
            square = state["exp_avg_sq"].mul_(second)
            square.addcmul_(gradient, gradient, value=1 - second)
            values.sub_(average.div(square.sqrt().div_(correction).add_(self._eps)).mul_(rate))
        elif self.momentum:
            values.sub_(state["momentum_buffer"].mul_(self.momentum).add_(gradient), alpha=lr)
        else:
            values.sub_(gradient, alpha=lr)


def checked_rate(lr: float | None) -> float | None:
    """Return a push's learning rate. Raise ValueError if it is not a finite number of 0 or more."""
    if lr is not None and not (lr >= 0 and math.isfinite(lr)):
        raise ValueError(f"learning_rate must be a finite number of 0 or more, got {lr}")
    return lr
