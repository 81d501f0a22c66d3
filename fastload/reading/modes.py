"""The modes in which samples are read: those of the thread that calls `iter()`, as in a worker that torch forks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import NamedTuple

import torch


class Modes(NamedTuple):
    """Torch's modes of a thread. Without arguments, those of a fresh one."""

    grad: bool = True
    autocast: tuple[tuple[str, torch.dtype], ...] = ()
    """The devices with autocast, each with its dtype."""
    inference: bool = False

    def shared(self) -> Modes:
        """Return these modes for threads of one process, or for several epochs: inference mode is no gradients.

        Batches lie in memory that the loader uses again, and tensors of inference mode are of no use in training.
        """
        return self._replace(inference=False)

    def entered(self) -> AbstractContextManager[object]:
        """Return a context in these modes."""
        return nullcontext() if self == modes_of_thread() else self._entered()

    @contextmanager
    def _entered(self) -> Iterator[None]:
        with ExitStack() as stack:
            if torch.is_inference_mode_enabled() is not self.inference:
                stack.enter_context(torch.inference_mode(mode=self.inference))
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
    autocast = [(d, torch.get_autocast_dtype(d)) for d in devices if torch.is_autocast_enabled(d)]
    return Modes(torch.is_grad_enabled(), tuple(autocast), torch.is_inference_mode_enabled())
