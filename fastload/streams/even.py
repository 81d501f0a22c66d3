"""Ranks that take equally many steps, although their streams end at different times."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import cycle, islice
from typing import Any, Literal

import torch
import torch.distributed as dist

from fastload._kit.integers import positive


class EvenSteps:
    """The batches of a loader, equally many on all ranks.

    The ranks agree by one number for each `every` steps. So they read as many batches ahead, which memory holds. At
    first they agree after 1, 2, 4, ... steps, so that training starts at once. All ranks iterate at the same time.

    Args:
        loader: this rank's.
        ends: "drop" ends when the first rank has no batch left. "pad" ends when the last has none: the others then give
            the latest batches again.
        group: a process group of torch. None: the default one. The loop's thread calls `all_reduce` on it between
            steps, so all ranks must make their own collective calls in one order.
        every: number of steps.

    """

    def __init__(
        self,
        loader: Any,
        ends: Literal["drop", "pad"] = "drop",
        group: Any = None,
        every: int = 64,
    ) -> None:
        if ends not in ("drop", "pad"):
            raise ValueError(f'ends must be "drop" or "pad", got {ends!r}')
        self.loader, self.ends, self.group = loader, ends, group
        self.every = positive("every", every) or 1
        self._state: Any = None

    def __iter__(self) -> Iterator[Any]:
        self._state = self.loader.state_dict()
        batches = ((batch, self.loader.state_dict()) for batch in self.loader)
        size, latest = 1, deque[Any](maxlen=self.every)
        ahead = list(islice(batches, size))
        while steps := self._agreed(len(ahead) if ahead or latest else _NOTHING):
            size = min(2 * size, self.every)
            present, ahead = ahead, []
            latest += present
            again = cycle([*latest])
            for k in range(steps):
                batch, self._state = (
                    present[k] if k < len(present) else (next(again)[0], self._state)
                )
                yield batch
                ahead += islice(batches, min(-(-size // steps), size - len(ahead)))
            ahead += islice(batches, size - len(ahead))
        self._state = {**self.loader.state_dict(), "ended": True}

    def _agreed(self, ready: int) -> int:
        """Return the number of steps that all ranks take next."""
        drops = self.ends == "drop"
        word = torch.tensor(ready % _NOTHING if drops else ready, device=_device(self.group))
        dist.all_reduce(word, dist.ReduceOp.MIN if drops else dist.ReduceOp.MAX, group=self.group)
        if int(word) == _NOTHING:
            raise ValueError(
                "a rank has no batch at all, so it has none to repeat: use fewer ranks, or more shards"
            )
        return int(word)

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's state after the batch that the loop got last. What was read ahead does not count."""
        state: dict[str, Any] = self._state or self.loader.state_dict()
        return state


_NOTHING = 1 << 40
"""What a rank says that has had no batch."""


def _device(group: Any) -> str:
    return "cuda" if dist.get_backend(group) == "nccl" else "cpu"
