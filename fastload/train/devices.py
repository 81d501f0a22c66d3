"""The device of a rank, by the name that the option `--device` gives."""

from __future__ import annotations

import torch

from fastload._kit.texts import counted
from fastload.distributed import Rank, device_of
from fastload.errors import UsageError


def choose_device(name: str, rank: Rank) -> torch.device:
    """Return the device of a rank. For "auto", return an accelerator of its own if there is one, else the CPU.

    Raise `UsageError` if the device does not exist, and `RankError` if a node has fewer accelerators than ranks.
    """
    found = torch.accelerator.current_accelerator(check_available=True)
    if name == "auto":
        if found is None:
            return torch.device("cpu")
        name = found.type
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UsageError(
            f"--device {name} is not a device of torch. Use auto, cpu or cuda"
        ) from error
    if device.type == "cpu":
        if ":" in name:
            raise UsageError(f"--device {name}: the CPU has no index. Use --device cpu")
        return device
    if found is None or found.type != device.type:
        here = f"only {found.type}" if found else "no accelerator"
        raise UsageError(
            f"--device {name} is not available: torch finds {here}. Use --device auto or cpu"
        )
    count = torch.accelerator.device_count()
    if ":" not in name:
        device = torch.device(device.type, device_of(rank, count))
    elif device.index >= count:
        raise UsageError(
            f"--device {name} does not exist: torch finds "
            f"{counted(count, f'{device.type} device')} here, numbered from 0. Give one of these"
        )
    torch.accelerator.set_device_index(device.index)
    return device
