"""Arrays, tensors and byte arrays, sorted by their memory: views of the same memory stay views of the same copy."""

from __future__ import annotations

import array
import ctypes
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from fastload.isolation.rules import MEMORY_BYTES

Buffer = bytearray | array.array  # type: ignore[type-arg]


@dataclass
class Block:
    """A piece of memory, and the objects that lie in it. `start` is its address, `stop` the first address after it."""

    start: int
    stop: int
    members: list[Any] = field(default_factory=list)

    def why_shared(self, *, copy_data: bool) -> str | None:
        """Return why the memory is shared, or None if each worker gets its own."""
        if self.stop - self.start > MEMORY_BYTES and not copy_data:
            return "data"
        if not copy_data and not any(map(_is_writable, self.members)):
            return "read-only"
        # A tensor does not say that the array whose memory it lies in is a memory map.
        return next(filter(None, map(why_foreign, self.members)), None)


def why_foreign(x: Any) -> str | None:
    """Return why `x` must be shared: its memory is not the process's own. Return None if it is."""
    if isinstance(x, torch.Tensor):
        if not x.is_cpu:
            return f"in the memory of {x.device}"
        if x.is_shared():  # type: ignore[no-untyped-call]
            return "in shared memory"
        return None
    if isinstance(x, np.ndarray):
        owner: Any = _root(x).base
        owner = owner.obj if isinstance(owner, memoryview) else owner
        if isinstance(owner, torch.Tensor):
            return why_foreign(owner)
        if not isinstance(owner, Buffer | None):
            return "read-only" if isinstance(owner, bytes) else "in memory of another owner"
    return None


def is_plain_tensor(x: torch.Tensor) -> bool:
    """Return whether a tensor is a view of memory and nothing else."""
    return (
        x.layout is torch.strided
        and not (x.is_quantized or x.is_nested or x.is_conj() or x.is_neg())
        and (not x.is_leaf or x.grad is None)
        and not vars(x)
    )


def extent(x: Any) -> tuple[int, int]:
    """Return the start and stop address of the memory that `x` is a view of."""
    if isinstance(x, torch.Tensor):
        storage = x.untyped_storage()
        return storage.data_ptr(), storage.data_ptr() + storage.nbytes()
    if isinstance(x, Buffer):
        x = np.frombuffer(x, np.uint8)
    root = _root(x)
    base: Any = root.base
    if isinstance(base, torch.Tensor):
        return extent(base)
    low = high = root.ctypes.data
    for length, step in zip(root.shape, root.strides, strict=True):
        low, high = low + min(0, (length - 1) * step), high + max(0, (length - 1) * step)
    return (low, high + root.itemsize) if root.size else (low, low)


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
    (first, *others) = block.members
    if not others and not (isinstance(first, np.ndarray) and first.base is not None):
        return {id(first): _alone(first)}
    owner = next((m for m in block.members if isinstance(m, Buffer)), None)
    own = None if owner is None else owner[:]
    memory = np.empty(block.stop - block.start, np.uint8) if own is None else _bytes(own)
    ctypes.memmove(memory.ctypes.data, block.start, memory.nbytes)
    copies: dict[int, Any] = {}
    for member in block.members:
        if isinstance(member, Buffer):
            copies[id(member)] = own
        elif isinstance(member, torch.Tensor):
            start, stop = extent(member)
            copies[id(member)] = _tensor(member, memory[start - block.start : stop - block.start])
        else:
            copies[id(member)] = _array(member, memory, member.ctypes.data - block.start)
    return copies


def _alone(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return _tensor(x, None)
    return x[:] if isinstance(x, Buffer) else x.copy(order="K")


def _bytes(buffer: Any) -> np.ndarray:
    return np.frombuffer(buffer, np.uint8)


def _array(x: np.ndarray, memory: np.ndarray, offset: int) -> np.ndarray:
    copy: np.ndarray = np.ndarray(x.shape, x.dtype, memory.data, offset, x.strides)
    copy.flags.writeable = x.flags.writeable
    return copy


def _tensor(x: torch.Tensor, memory: np.ndarray | None) -> torch.Tensor:
    """Return `x` over other memory: that of its storage, or new one."""
    old: Any = x.untyped_storage()
    storage = old.clone() if memory is None else torch.from_numpy(memory).untyped_storage()
    empty: Any = torch.empty(0, dtype=x.dtype, device="cpu")
    copy: torch.Tensor = empty.set_(storage, x.storage_offset(), x.size(), x.stride())
    if type(x) is torch.nn.Parameter:
        return torch.nn.Parameter(copy, x.requires_grad)
    return copy.requires_grad_(x.requires_grad)


def _root(x: np.ndarray) -> np.ndarray:
    while isinstance(x.base, np.ndarray):
        x = x.base
    return x


def _is_writable(x: Any) -> bool:
    return not isinstance(x, np.ndarray) or x.flags.writeable
