"""Batches and samples as bytes. The memory of tensors and arrays goes into segments and is not pickled.

Pickle protocol 5 hands out the buffers of a message. Those that lie in a segment of the batch already, as the rows of a
slot do, are named by their position. All others are copied into one segment.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from fastload.memory.layout import aligned
from fastload.processes.segments import TicketMemory

IN_MESSAGE = 32 * 1024
"""Smaller buffers go through the socket. So a loop that keeps the labels of all batches keeps no segment alive."""


class Packed(NamedTuple):
    """A pickled object. Each part is the bytes themselves, or (number of the segment, first byte, end)."""

    pickle: Any
    buffers: list[Any]


def pack(x: Any, memory: TicketMemory | None = None) -> Packed:
    """Return `x`, with its buffers in the segments of `memory`. Without `memory` they are part of the result.

    Tensors that share a storage still do so afterwards. A view of less than half of a storage becomes a tensor of its
    own: a sample may be a view of the whole dataset.

    Raises what pickling raises, and TypeError for a tensor that is not on the CPU or has a graph of gradients.
    """
    file = io.BytesIO()
    packer = _Packer(file)
    packer.dump(x)
    parts = [np.frombuffer(buffer.raw(), np.uint8) for buffer in packer.buffers]
    parts.append(np.frombuffer(file.getbuffer(), np.uint8))
    *buffers, stream = _places(parts, memory)
    return Packed(stream, buffers)


def _places(parts: list[np.ndarray], memory: TicketMemory | None) -> list[Any]:
    """Return where buffers are. Those that lie in no segment yet are copied into one, or into the message if small."""
    places: list[Any] = [
        memory.find(part) if memory is not None and part.nbytes >= IN_MESSAGE else bytearray(part)
        for part in parts
    ]
    total = sum(aligned(p.nbytes) for p, place in zip(parts, places, strict=True) if place is None)
    if not total:
        return places
    assert memory is not None
    room, start = memory.acquire(total), 0
    for k, part in enumerate(parts):
        if places[k] is None:
            copy = room[start : start + part.nbytes]
            copy[:] = part
            places[k] = memory.find(copy)
            start += aligned(part.nbytes)
    return places


def unpack(packed: Packed, memories: Sequence[np.ndarray] = ()) -> Any:
    """Return the object. Its tensors and arrays lie in `memories`, those of the segments that the batch takes."""

    def taken(place: Any) -> Any:
        if not isinstance(place, tuple):
            return place
        k, start, stop = place
        return memories[k][start:stop]

    return pickle.loads(taken(packed.pickle), buffers=map(taken, packed.buffers))


def packed_indices(given: Any) -> Any:
    """Return what a sampler gave, packed if it is tensors: each may be a view of all indices of the epoch."""
    tensors = isinstance(given, list | tuple) and given and isinstance(given[0], torch.Tensor)
    return pack(given) if tensors else given


class _Packer(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        self.buffers: list[pickle.PickleBuffer] = []
        super().__init__(file, 5, buffer_callback=self.buffers.append)
        self._storages: dict[tuple[int, int], _Storage] = {}

    def reducer_override(self, x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            if isinstance(x, torch.UntypedStorage):
                return _storage_over, (self._storage(x),)
            if isinstance(x, torch.TypedStorage):
                return _typed, (x._untyped_storage, x.dtype)
            return NotImplemented
        if not x.is_cpu and x.device.type != "meta":
            raise TypeError(
                f"a worker process cannot hand over a tensor on {x.device}. Return CPU tensors, and move the batch to "
                "the device in the loop"
            )
        if x.requires_grad and not x.is_leaf:
            raise TypeError(
                "a worker process cannot hand over a tensor with a graph of gradients. Return tensor.detach()"
            )
        if x.layout is not torch.strided and type(x) is torch.Tensor:
            return _sparse_parts(x)
        dense = x.layout is torch.strided and not x.is_nested and not x.is_quantized
        if not dense or x.device.type == "meta":
            return NotImplemented
        storage = x.untyped_storage()
        if storage.nbytes() > 2 * x.numel() * x.element_size() + IN_MESSAGE:
            if type(x) is not torch.Tensor:
                return x.clone().__reduce_ex__(5)  # type: ignore[no-untyped-call]
            x = x.detach().clone().requires_grad_(x.requires_grad)
            storage = x.untyped_storage()
        elif type(x) is not torch.Tensor:
            return NotImplemented
        if x.is_conj() or x.is_neg():
            return NotImplemented
        place = x.storage_offset(), tuple(x.size()), x.stride()
        return _tensor, (self._storage(storage), x.dtype, *place, x.requires_grad)

    def _storage(self, storage: torch.UntypedStorage) -> _Storage:
        """Return the one stand-in of a storage. The pickler remembers it, so that tensors which share it still do."""
        key = storage.data_ptr(), storage.nbytes()
        if key not in self._storages:
            flat = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)
            self._storages[key] = _Storage(flat)
        return self._storages[key]


class _Storage:
    """Stands for a storage. It pickles as the storage that is made of the buffer at the other end."""

    def __init__(self, flat: torch.Tensor) -> None:
        self._flat = flat

    def __reduce__(self) -> Any:
        return _storage_of, (pickle.PickleBuffer(self._flat.numpy().data),)


def _storage_of(buffer: Any) -> torch.UntypedStorage:
    if not len(buffer):
        return torch.empty(0).untyped_storage()
    storage = torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()
    storage.loan = buffer  # type: ignore[attr-defined]  # as in `Slot`
    return storage


def _storage_over(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    return storage


def _typed(storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.TypedStorage:
    kind: Any = torch.TypedStorage  # Any: it has no types
    typed: torch.TypedStorage = kind(wrap_storage=storage, dtype=dtype, _internal=True)
    return typed


def _tensor(
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    offset: int,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: bool,
) -> torch.Tensor:
    tensor = torch.empty(0, dtype=dtype, device="cpu").set_(storage, offset, size, stride)
    return tensor.requires_grad_() if requires_grad else tensor


def _sparse_parts(x: torch.Tensor) -> Any:
    """Return how a sparse tensor is made again. Torch's own way keeps all that it has made, for `torch.load`."""
    if x.layout is torch.sparse_coo:
        parts: tuple[torch.Tensor, ...] = (x._indices(), x._values().detach())
    elif x.layout in (torch.sparse_csr, torch.sparse_bsr):
        parts = (x.crow_indices(), x.col_indices(), x.values().detach())
    elif x.layout in (torch.sparse_csc, torch.sparse_bsc):
        parts = (x.ccol_indices(), x.row_indices(), x.values().detach())
    else:
        return NotImplemented
    coalesced = x.layout is torch.sparse_coo and x.is_coalesced()
    return _sparse, (str(x.layout), parts, tuple(x.size()), coalesced, x.requires_grad)


def _sparse(
    layout: str,
    parts: tuple[torch.Tensor, ...],
    size: tuple[int, ...],
    coalesced: bool,
    requires_grad: bool,
) -> torch.Tensor:
    *indices, values = parts
    if len(indices) == 1:
        x = torch.sparse_coo_tensor(
            indices[0], values, size, check_invariants=False, is_coalesced=coalesced
        )
    else:
        kind: torch.layout = getattr(torch, layout.removeprefix("torch."))
        outer, inner = indices
        x = torch.sparse_compressed_tensor(
            outer, inner, values, size, layout=kind, check_invariants=False
        )
    return x.requires_grad_() if requires_grad else x
