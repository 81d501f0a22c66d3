"""Arrays and tensors, sorted by their memory: views of the same memory stay views of the same copy.

Memory that worker processes would share, the workers share too: a file that is mapped, `SharedMemory`, an `mp.Array`.
No array or tensor says what it lies in, but the system knows.
"""

from __future__ import annotations

import bisect
import ctypes
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fastload._kit.torch_private import no_torch_function
from fastload.safety.objects import ELEMENTS, MEMORY_BYTES, own_dict

MEMORY = (np.ndarray, torch.Tensor)
"""The classes of memory. A subclass of the user's may copy itself."""


def shared_maps() -> list[tuple[int, int]]:
    """Return the memory that a forked process would write to, too: where each piece begins and ends, in order."""
    found = _SHARED.findall(Path("/proc/self/maps").read_bytes())
    return [(int(start, 16), int(stop, 16)) for start, stop in found]


IN_SHARED_MEMORY = "in shared memory"
_SHARED = re.compile(rb"^([0-9a-f]+)-([0-9a-f]+) ...s", re.MULTILINE)
"""A line of `/proc/self/maps` about memory that is mapped with MAP_SHARED."""


@dataclass
class Block:
    """A piece of memory, and the objects that lie in it. `start` is its address, `stop` the first address after it."""

    start: int
    stop: int
    members: list[Any] = field(default_factory=list)

    def why_shared(self, maps: list[tuple[int, int]]) -> str | None:
        """Return why the memory is shared, or None if each worker gets its own."""
        if self.stop - self.start > MEMORY_BYTES:
            return "data"
        # CUDA's pinned memory is mapped as shared, and no other process can use it.
        k = bisect.bisect(maps, self.start, key=itemgetter(0))
        if k and self.start < maps[k - 1][1] and not any(map(_is_pinned, self.members)):
            return IN_SHARED_MEMORY
        return None


def why_apart(x: Any) -> str | None:
    """Return why `x` is shared, whatever else lies in its memory. Return None if its block decides."""
    if isinstance(x, np.ndarray):
        x = np.asarray(x)  # no code of a subclass runs
        few = not x.dtype.hasobject or x.size <= ELEMENTS
        return None if few else f"{x.size:,} elements"
    with no_torch_function():
        if isinstance(x, torch.Tensor) and x.device.type != "cpu":
            return f"in the memory of {x.device}"
    return None


def is_view(x: Any) -> bool:
    """Return whether `x` is a view of memory and nothing else. If it is not, it is copied by its own protocol."""
    if not isinstance(x, torch.Tensor):
        return type(x) is np.ndarray
    return (
        type(x) in (torch.Tensor, torch.nn.Parameter)
        and x.layout is torch.strided
        and not (x.is_quantized or x.is_nested or x.is_conj() or x.is_neg())
        and (not x.is_leaf or x.grad is None)
        and not vars(x)
    )


def extent(x: Any) -> tuple[int, int]:
    """Return the start and stop address of the bytes that `x` is a view of: equal if they are not in one piece."""
    if isinstance(x, torch.Tensor):
        try:
            with no_torch_function():
                storage = x.untyped_storage()
                start = storage.data_ptr()
        except RuntimeError:  # a sparse one, or one that consists of others
            return 0, 0
        return start, start + storage.nbytes() if start else 0
    root = _root(x)
    base: Any = root.base
    if isinstance(base, torch.Tensor):
        return extent(base)
    low = high = root.ctypes.data
    for length, step in zip(root.shape, root.strides, strict=True):
        low, high = low + min(0, (length - 1) * step), high + max(0, (length - 1) * step)
    return (low, high + root.itemsize) if root.size and not root.dtype.hasobject else (low, low)


def nbytes_of(x: Any) -> int:
    """Return the bytes of an array or tensor: 0 of a sparse tensor, whose parts have no names."""
    if isinstance(x, np.ndarray):
        return int(x.nbytes)
    start, stop = extent(x)
    if start != stop:
        with no_torch_function():
            return min(int(x.nbytes), stop - start)
    return sum(nbytes_of(part) for part in own_dict(x).values() if isinstance(part, torch.Tensor))


def blocks_of(members: Iterable[Any]) -> list[Block]:
    """Sort objects by memory into blocks that do not overlap. Leave out objects without bytes."""
    blocks: list[Block] = []
    placed = sorted(((*extent(x), k, x) for k, x in enumerate(members)), key=lambda p: p[:3])
    for start, stop, _, x in placed:
        if start == stop:
            continue
        if not blocks or start >= blocks[-1].stop:
            blocks.append(Block(start, stop))
        block = blocks[-1]
        block.stop = max(block.stop, stop)
        block.members.append(x)
    return blocks


def copy_block(block: Block) -> dict[int, Any]:
    """Copy the memory once. Return the members as views of the copy, by the id of the original."""
    first = block.members[0]
    if len(block.members) == 1 and isinstance(first, torch.Tensor):
        return {id(first): _over(first.untyped_storage().clone(), first)}  # type: ignore[no-untyped-call]
    memory = np.empty(block.stop - block.start, np.uint8)
    ctypes.memmove(memory.ctypes.data, block.start, memory.nbytes)
    copies: dict[int, Any] = {}
    for member in block.members:
        start, stop = (address - block.start for address in extent(member))
        if isinstance(member, np.ndarray):
            place = memory.data, member.ctypes.data - block.start, member.strides
            view = copies[id(member)] = np.ndarray(member.shape, member.dtype, *place)
            view.flags.writeable = member.flags.writeable
        else:
            storage = torch.from_numpy(memory[start:stop]).untyped_storage()
            copies[id(member)] = _over(storage, member)
    return copies


def _over(storage: Any, x: Any) -> Any:
    """Return a tensor as `x` over another storage."""
    empty: Any = torch.empty(0, dtype=x.dtype, device="cpu")
    copy: torch.Tensor = empty.set_(storage, x.storage_offset(), x.size(), x.stride())
    if type(x) is torch.nn.Parameter:
        return torch.nn.Parameter(copy, x.requires_grad)
    return copy.requires_grad_(x.requires_grad)


def _root(x: np.ndarray) -> np.ndarray:
    x = np.asarray(x)
    while isinstance(x.base, np.ndarray):
        x = x.base
    return x


def _is_pinned(x: Any) -> bool:
    x = _root(x).base if isinstance(x, np.ndarray) else x
    return isinstance(x, torch.Tensor) and x.is_pinned()
