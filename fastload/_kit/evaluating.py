"""A model in eval mode, without gradients, on a device, for the time of a block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def evaluating(model: Any, device: torch.device | str | None) -> Iterator[torch.device]:
    """Move the model to `device`, put it into eval mode, and yield its device. Undo both after the block.

    A callable that is not a module is left as it is. Raises ValueError if `device` is given and the model lies on
    several devices.
    """
    if not isinstance(model, nn.Module):
        yield torch.device(device or "cpu")
        return
    modes = [(module, module.training) for module in model.modules()]
    places = {value.device for value in (*model.parameters(), *model.buffers())}
    home = next(iter(places), torch.device("cpu"))
    if device is not None and len(places) > 1:
        raise ValueError(
            f"the model is on several devices, {sorted(map(str, places))}. Do not pass device"
        )
    on = home if device is None else torch.device(device)
    model.eval()
    try:
        if device is not None:
            model.to(on)
        yield on
    finally:
        if device is not None:
            model.to(home)
        for module, mode in modes:
            module.training = mode
