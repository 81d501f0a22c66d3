"""Ranks that take equally many steps, although their streams end at different times."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import cycle, islice
from typing import Any, Literal

import torch
import torch.distributed as dist

from fastload._kit.integers import positive
from fastload.streams.chain import Stream
from fastload.streams.passes import Place


class EvenSteps:
    """The batches of a loader, equally many on all ranks.

    If `Shards` has `counts`, and no step of the stream changes the number of samples, each rank computes how many steps
    all take. Otherwise, and after a resume, the ranks agree by one number for each `every` steps. So they read as many
    batches ahead, which memory holds. At first they agree after 1, 2, 4, ... steps, so that training starts at once.
    All ranks iterate at the same time.

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
        self._before: Any = None  # the state before the loader's latest batch, if there is one

    def __iter__(self) -> Iterator[Any]:
        epoch = iter(self.loader)
        self._state = self.loader.state_dict()
        counts = _batches_of_ranks(self.loader, self._state)
        batches = ((batch, self.loader.state_dict()) for batch in epoch)
        yield from self._as_agreed(batches) if counts is None else self._as_counted(batches, counts)
        self._state, self._before = {**self.loader.state_dict(), "ended": True}, None

    def _as_counted(self, batches: Iterator[Any], counts: list[int]) -> Iterator[Any]:
        own = counts[self.loader.dataset.rank]
        steps = min(counts) if self.ends == "drop" else max(counts)
        if steps and not min(counts):
            raise ValueError(_NONE)
        given, repeated = min(own, steps), max(0, steps - own)
        latest = deque[Any](maxlen=min(repeated, self.every))  # what this rank repeats
        taken = 0
        for batch, state in islice(batches, given):
            self._before, self._state, taken = self._state, state, taken + 1
            latest.append(batch)
            yield batch
        if taken < given or (given == own and next(batches, None)):
            raise ValueError(_miscounted(own))
        yield from islice(cycle(latest), repeated)

    def _as_agreed(self, batches: Iterator[Any]) -> Iterator[Any]:
        size, latest = 1, deque[Any](maxlen=self.every)
        ahead = list(islice(batches, size))
        while steps := self._agreed(len(ahead), can_repeat=bool(latest or self._before)):
            size = min(2 * size, self.every)
            present, ahead = ahead, []
            latest += [batch for batch, _ in present] or ([] if latest else self._read_again())
            again = cycle([*latest])
            for k in range(steps):
                if k < len(present):
                    batch, state = present[k]
                    self._before, self._state = self._state, state
                else:
                    batch = next(again)
                yield batch
                ahead += islice(batches, min(-(-size // steps), size - len(ahead)))
            ahead += islice(batches, size - len(ahead))

    def _read_again(self) -> list[Any]:
        """Return the batch before the loaded state, for a rank that had ended there and must repeat one."""
        self.loader.load_state_dict(self._before)
        return [*islice(self.loader, 1)]

    def _agreed(self, ready: int, *, can_repeat: bool) -> int:
        """Return the number of steps that all ranks take next."""
        drops = self.ends == "drop"
        word = torch.tensor([ready, not (ready or can_repeat)], device=_device(self.group))
        dist.all_reduce(word, dist.ReduceOp.MIN if drops else dist.ReduceOp.MAX, group=self.group)
        steps, one_has_none = word.tolist()
        if steps and one_has_none and not drops:
            raise ValueError(_NONE)
        return int(steps)

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's state after the batch that the loop got last, and before it.

        What was read ahead does not count.
        """
        return {**(self._state or self.loader.state_dict()), "before": self._before}

    def load_state_dict(self, state: dict[str, Any] | list[dict[str, Any]]) -> None:
        """Let the next `iter()` resume after `state`. See the loader's own.

        If ranks or workers are others, pass the states of all ranks as a list.
        """
        self.loader.load_state_dict(state)
        # Other readers cannot read what was before.
        ours = _place_of(self.loader.state_dict())
        states = state if isinstance(state, list) else [state]
        self._before = next((one.get("before") for one in states if _place_of(one) == ours), None)
        self._state = None


_NONE = "a rank has no batch at all, so it has none to repeat: use fewer ranks, or more shards"


def _miscounted(expected: int) -> str:
    return (
        f"the counts of Shards say {expected} batches for this rank, but it has more or fewer. Count each "
        "file anew"
    )


def _place_of(state: dict[str, Any]) -> tuple[int, int, int]:
    return state["rank"], state["world_size"], len(state["lanes"])


def _batches_of_ranks(loader: Any, state: Any) -> list[int] | None:
    """Return how many batches each rank has in a whole epoch that begins, or None if that is not known."""
    stream = getattr(loader, "dataset", None)
    if not isinstance(stream, Stream) or any(lane["state"] for lane in state["lanes"]):
        return None
    lanes, ranks = len(state["lanes"]), stream.world_size
    size = loader.batch_size or 1
    rest = 0 if loader.drop_last else size - 1
    found = [0] * ranks
    for reader in range(lanes * ranks):
        count = stream.count(Place(state["epoch"], reader, lanes * ranks))
        if count is None:
            return None
        found[reader % ranks] += (count + rest) // size
    return found


def _device(group: Any) -> str:
    return "cuda" if dist.get_backend(group) == "nccl" else "cpu"
