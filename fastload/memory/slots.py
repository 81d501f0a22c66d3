"""The memory of batches. A `SlotPool` lends it and takes it back once the last alias is gone."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from typing import Any

import numpy as np
from torch.utils.data import default_collate

from fastload.memory.layout import ALIGN, Layout, Slot


class SlotPool:
    """Lends the memory of batches and takes it back once the last alias is gone.

    A tensor of a batch shares its memory with a NumPy array, which is a view of an array that stands for the loan.
    Every view, `.numpy()`, memoryview or DLPack capsule of the batch keeps the loan alive, and so does what the user
    makes of them. When the loan dies, a weak reference returns the memory. So a batch that the user keeps is never
    overwritten.

    The pool keeps an idle block if there are fewer than `limit` blocks, idle and on loan. The limit covers the
    batches in flight and the one in the loop, so that a steady loop allocates nothing.
    """

    def __init__(self, *, channels_last: bool = False) -> None:
        self.channels_last = channels_last  # rows [C, H, W] of a slot lie in memory as [H, W, C]
        self.limit = 0
        self.layout: Layout | None = None  # the latest; only a hint, so races are harmless
        # Owns the decision which worker makes the slot of a batch. Re-entrant: a collection in it may run user code.
        self.lock = threading.RLock()
        # The rest has none: `_returned` runs where the last alias dies, in any thread and in a garbage collection.
        # Appending to and popping from a deque, and setting and popping a key of a dict, are atomic.
        self._idle: deque[np.ndarray] = deque()
        self._loans: dict[int, _Loan] = {}

    def collate(self, samples: list[Any]) -> Any:
        """Return `default_collate(samples)`, and notice if samples now have rows that a slot would take."""
        layout = self.layout
        if layout and (columns := layout.columns(samples)):
            return layout.batch(columns)  # what a user's collate function raises passes
        self.layout = Layout(samples[0]) if samples else None
        return default_collate(samples)

    def slot(self, layout: Layout, n: int) -> Slot:
        """Return a slot for `n` samples."""
        memory = self.acquire(layout.slot_bytes(n)) if layout.nbytes else _NO_MEMORY
        return layout.slot(n, memory, channels_last=self.channels_last)

    def acquire(self, nbytes: int) -> np.ndarray:
        """Lend 64-byte aligned memory: uint8[>= nbytes], contents undefined."""
        memory = None
        # Drop blocks of other sizes.
        while memory is None or not nbytes <= memory.nbytes <= 2 * nbytes:
            try:
                memory = self._idle.pop()
            except IndexError:
                raw = np.empty(nbytes + ALIGN, np.uint8)
                start = -raw.ctypes.data % ALIGN
                memory = raw[start : start + nbytes]
        # An array over a memoryview: further views refer to this array, not to `memory`.
        lent = np.frombuffer(memory.data, np.uint8)
        loan = _Loan(lent, self._returned)
        loan.memory = memory
        self._loans[id(loan)] = loan
        return lent

    @property
    def lent(self) -> int:
        """Number of blocks whose batch is alive: in flight, or kept by the user."""
        return len(self._loans)

    def _returned(self, loan: weakref.ref[np.ndarray]) -> None:
        memory = self._loans.pop(id(loan)).memory
        if len(self._idle) + len(self._loans) < self.limit:  # a race may keep a block too many
            self._idle.append(memory)


_NO_MEMORY = np.empty(0, np.uint8)


class _Loan(weakref.ref[np.ndarray]):
    __slots__ = ("memory",)
    memory: np.ndarray
