"""The modes in which samples are read: those of the thread that calls `iter()`, as in a worker that torch forks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import NamedTuple

import torch


class Modes(NamedTuple):
    """Torch's modes of a thread. Without arguments, those of a fresh one.

    Inference mode counts as no gradients. Its tensors could take no part in a later training step, and batches lie in
    memory that the loader uses again.
    """

    grad: bool = True
    autocast: tuple[tuple[str, torch.dtype], ...] = ()
    """The devices with autocast, each with its dtype."""

    def entered(self) -> AbstractContextManager[object]:
        """Return a context in these modes."""
        if self == modes_of_thread() and not torch.is_inference_mode_enabled():
            return nullcontext()
        return self._entered()

    @contextmanager
    def _entered(self) -> Iterator[None]:
        with ExitStack() as stack:
            if torch.is_inference_mode_enabled():
                stack.enter_context(torch.inference_mode(mode=False))
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for device, _ in set(modes_of_thread().autocast) - set(self.autocast):
                stack.enter_context(torch.autocast(device, enabled=False))
            for device, dtype in self.autocast:
                stack.enter_context(torch.autocast(device, dtype))
            yield


def modes_of_thread() -> Modes:
    """Return the modes of this thread."""
    accelerator = torch.accelerator.current_accelerator()
    devices = ("cpu",) if accelerator is None else ("cpu", accelerator.type)
    autocast = [d for d in devices if torch.is_autocast_enabled(d)]
    return Modes(torch.is_grad_enabled(), tuple((d, torch.get_autocast_dtype(d)) for d in autocast))
