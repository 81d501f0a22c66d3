"""The memory of batches: a `SlotPool` lends it and takes it back after the last alias is gone."""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any

import numpy as np
from torch.utils.data import default_collate

from fastload.layout import ALIGN, Layout, Slot


class SlotPool:
    """Lends the memory of batches and takes it back after the last alias is gone.

    A tensor of a batch lies in a NumPy array under `torch.from_numpy`, that one in an array that
    stands for the loan. Every view, `.numpy()`, memoryview or DLPack capsule of the batch keeps the
    loan alive, and so does whatever the user makes of them; when it dies, a weak reference gives
    the memory back. A batch that is kept is therefore never written again. Idle blocks are kept for
    reuse as long as there are fewer than `limit` blocks with those on loan: the batches in flight and
    the one that the loop works on, so that a steady loop allocates nothing.
    """

    def __init__(self, *, channels_last: bool = False) -> None:
        self.channels_last = channels_last  # rows [C, H, W] of a slot lie in memory as [H, W, C]
        self.limit = 0
        self.layout: Layout | None = None  # the latest; a hint only, so that its races are harmless
        # No lock: the callback below runs wherever the last alias dies, in any thread and inside a
        # garbage collection; appending to and popping from a deque, and setting and popping a key
        # of a dict, are atomic.
        self._idle: deque[np.ndarray] = deque()
        self._loans: dict[int, _Loan] = {}

    def collate(self, samples: list[Any]) -> Any:
        """`default_collate`, which also looks whether the samples have got rows that a slot would take."""
        self.layout = Layout(samples[0]) if samples else None
        return default_collate(samples)

    def slot(self, layout: Layout, n: int) -> Slot:
        """Return a slot for `n` samples."""
        memory = self.acquire(layout.slot_bytes(n)) if layout.rows else _NO_MEMORY
        return Slot(layout, n, memory, channels_last=self.channels_last)

    def acquire(self, nbytes: int) -> np.ndarray:
        """Borrow at least `nbytes` bytes of 64-byte aligned memory: uint8[>= nbytes], contents undefined."""
        memory = None
        # A block of another size is of no more use.
        while memory is None or not nbytes <= memory.nbytes <= 2 * nbytes:
            try:
                memory = self._idle.pop()
            except IndexError:
                raw = np.empty(nbytes + ALIGN, np.uint8)
                start = -raw.ctypes.data % ALIGN
                memory = raw[start : start + nbytes]
        # A view of a memoryview: NumPy makes views of it refer to it and not to the array behind
        # it.
        lent = np.frombuffer(memory.data, np.uint8)
        loan = _Loan(lent, self._returned)
        loan.memory = memory
        self._loans[id(loan)] = loan
        return lent

    @property
    def lent(self) -> int:
        """Blocks whose batch is alive: in flight, or kept by the user."""
        return len(self._loans)

    def _returned(self, loan: weakref.ref[np.ndarray]) -> None:
        memory = self._loans.pop(id(loan)).memory
        if len(self._idle) + len(self._loans) < self.limit:  # a race may keep a block too many
            self._idle.append(memory)


_NO_MEMORY = np.empty(0, np.uint8)


class _Loan(weakref.ref[np.ndarray]):
    __slots__ = ("memory",)
    memory: np.ndarray
