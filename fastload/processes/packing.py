"""Batches, samples and errors as bytes. The memory of tensors and arrays goes into segments and is not pickled.

Pickle protocol 5 hands out the buffers of a message. Those that lie in a segment of the batch already, as the rows of a
slot do, are named by their position. All others are copied into one segment.
"""

from __future__ import annotations

import io
import pickle
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from fastload._kit.user_errors import shown
from fastload.memory.layout import aligned
from fastload.processes.segments import TicketMemory

IN_MESSAGE = 32 * 1024
"""Smaller buffers go through the socket. So a loop that keeps the labels of all batches keeps no segment alive."""

_MOST_LINKED = 64
"""Causes, contexts and members of groups that an error brings along."""


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
    stream, buffers = _taken(packed, memories)
    return pickle.loads(stream, buffers=buffers)


def _taken(packed: Packed, memories: Sequence[np.ndarray]) -> tuple[Any, list[Any]]:
    stream, *buffers = [
        memories[place[0]][place[1] : place[2]] if isinstance(place, tuple) else place
        for place in (packed[0], *packed[1])
    ]
    return stream, buffers


class UnknownClass(Exception):
    """A pickle names something beyond Python's, torch's and NumPy's plain data."""


_KNOWN = {"torch", "numpy", "builtins", "collections", "fastload", "copyreg", "_codecs", "datetime"}


class _Unpickler(pickle.Unpickler):
    """Raises `UnknownClass` before anything is made that may run code of the user's."""

    def find_class(self, module: str, name: str) -> Any:
        if module.partition(".")[0] not in _KNOWN:
            raise UnknownClass(module, name)
        return super().find_class(module, name)


class Forms:
    """Unpacks batches of plain data without code of the user's. One thread at a time uses it.

    Batches of plain tensors in lists, tuples and dicts have few forms, which differ in their buffers alone. A form that
    came twice is kept: to fill it costs a third of unpickling.
    """

    def __init__(self) -> None:
        self._latest = b""
        self._kept: dict[bytes, Any] = {}

    def unpack(self, packed: Packed, memories: Sequence[np.ndarray]) -> Any:
        """Return what `unpack` returns, or raise `UnknownClass`."""
        stream, buffers = _taken(packed, memories)
        key = bytes(stream) if len(stream) < _LARGEST_FORM else b""
        if key and (form := self._kept.get(key)) is not None:
            return _filled(form, [_storage_of(buffer) for buffer in buffers])
        if key and key == self._latest and len(self._kept) < _MOST_FORMS:
            with suppress(UnknownClass):
                form = _FormUnpickler(io.BytesIO(key), buffers=range(len(buffers))).load()
                if _is_plain(form, set()):
                    self._kept[key] = form
        self._latest = key
        return _Unpickler(io.BytesIO(stream), buffers=buffers).load()


_LARGEST_FORM, _MOST_FORMS = 4096, 16


class _Place(tuple[Any, ...]):
    """Stands for a tensor in a form: the number of its storage, and the other arguments of `_tensor`."""


class _FormUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == (__name__, _tensor.__name__):
            return lambda *place: _Place(place)
        if (module, name) == (__name__, _storage_of.__name__):
            return int
        found = getattr(torch, name, None) if module == "torch" else None
        if not isinstance(found, torch.dtype):
            raise UnknownClass(module, name)
        return found


def _is_plain(form: Any, seen: set[int]) -> bool:
    """Return whether a form has no other objects, and none twice: the batch would not have one object twice."""
    kind = type(form)
    if kind in _LEAVES:
        return True
    if id(form) in seen:
        return False
    seen.add(id(form))
    if kind is dict:
        return all(_is_plain(part, seen) for pair in form.items() for part in pair)
    return kind is _Place or (kind in (list, tuple) and all(_is_plain(part, seen) for part in form))


_LEAVES = {str, int, float, bool, bytes, type(None), torch.dtype}


def _filled(form: Any, storages: list[torch.UntypedStorage]) -> Any:
    kind = type(form)
    if kind is _Place:
        return _tensor(storages[form[0]], *form[1:])
    if kind is list:
        return [_filled(part, storages) for part in form]
    if kind is tuple:
        return tuple([_filled(part, storages) for part in form])
    if kind is dict:
        return {key: _filled(part, storages) for key, part in form.items()}
    return form


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


# ---- errors ----


class PackedLink(NamedTuple):
    """An error on its way between processes, and the places of those that it refers to."""

    pickle: bytes
    cause: int | None
    context: int | None
    suppressed: bool
    members: list[int]
    """Of an ExceptionGroup. -1 is one that was left out."""


class PackedError(NamedTuple):
    """An error, and after it all that it came of."""

    links: list[PackedLink]


def pack_error(error: BaseException, who: str) -> PackedError:
    """Return an error as bytes. At the other end it has its type, arguments and attributes, and a note: its traceback.

    So have its cause, its context and the members of a group. An argument that cannot be pickled becomes a string. Such
    an attribute is left out, and a note names it. If a class cannot be rebuilt there, its nearest base that can be
    takes its place, else RuntimeError. `who` names this worker.
    """
    links, chain, places = [], [error], {id(error): 0}
    for one in chain:  # it grows
        inner = one.exceptions if isinstance(one, BaseExceptionGroup) else ()
        for other in (one.__cause__, one.__context__, *inner):
            if other is not None and id(other) not in places and len(chain) < _MOST_LINKED:
                places[id(other)] = len(chain)
                chain.append(other)
        lines = "".join(traceback.format_tb(one.__traceback__))
        notes = [f"raised in {who}:\n{lines.rstrip()}"] if lines else []
        cause, context = (places.get(id(other)) for other in (one.__cause__, one.__context__))
        members = [places.get(id(member), -1) for member in inner]
        links.append(
            PackedLink(_pickled(one, notes), cause, context, one.__suppress_context__, members)
        )
    return PackedError(links)


def _pickled(error: BaseException, notes: list[str]) -> bytes:
    kind, said = type(error), shown(error, str)
    other = (
        f"{kind.__module__}.{kind.__qualname__}: {said} (the class of this error cannot be pickled, so the worker "
        "process could not hand it over)"
    )
    with suppress(BaseException):  # whatever a user's class raises
        for form, text, more in _forms(error, said, other):
            with suppress(BaseException):
                data = pickle.dumps((form, notes + more))
                again, _ = pickle.loads(data)
                if (type(form) is _Rebuilt or type(again) is kind) and text in shown(again, str):
                    return data
    return pickle.dumps((RuntimeError(other), notes))


def _forms(error: Any, said: str, other: str) -> Iterator[tuple[Any, str, list[str]]]:
    """Yield forms of an error, what each must say, and its further notes, from the whole error to a RuntimeError."""
    kind, args, attributes = type(error), error.args, dict(vars(error))
    members: tuple[Any, ...] = ()
    if isinstance(error, BaseExceptionGroup):  # its members travel by themselves
        member = Exception() if isinstance(error, Exception) else BaseException()
        members = ([member] * len(error.exceptions),)
        args = (error.message, *members)
    else:
        yield error, said, []
    kept = {name: value for name, value in attributes.items() if _can_be_pickled(value)}
    more = [f"left out, as it cannot be pickled: {name}" for name in attributes if name not in kept]
    args = tuple(arg if _can_be_pickled(arg) else shown(arg) for arg in args)
    for base in kind.__mro__:
        if issubclass(base, BaseException) and base not in (Exception, BaseException):
            yield _Rebuilt((base, args, kept)), said, more if base is kind else [*more, other]
            text = said if base is kind else other
            yield _Rebuilt((base, (text, *members), kept)), text, more
    yield _Rebuilt((RuntimeError, (other,), kept)), other, more


def _can_be_pickled(x: Any) -> bool:
    with suppress(BaseException):
        pickle.loads(pickle.dumps(x))
        return True
    return False


class _Rebuilt(tuple[Any, ...]):
    """Pickles as an error whose `__init__` may take other arguments than it stores: class, arguments, attributes."""

    def __reduce__(self) -> Any:
        return _rebuild, tuple(self)


def _rebuild(kind: type[BaseException], args: tuple[Any, ...], attributes: dict[str, Any]) -> Any:
    base: Any = next(base for base in kind.__mro__ if base.__module__ == "builtins")
    error = base.__new__(kind, *args)
    with suppress(TypeError):
        base.__init__(
            error, *args
        )  # it sets what Python's own errors keep in C: `start` of UnicodeDecodeError
    BaseException.__setattr__(error, "args", args)
    vars(error).update(attributes)
    return error


def unpack_error(packed: PackedError) -> Exception:
    """Return the error that `pack_error` packed."""
    links = packed.links
    left_out = RuntimeError(f"left out: a worker hands over {_MOST_LINKED} linked errors at most")
    errors: dict[int | None, Any] = {None: None, -1: left_out}
    for k, link in enumerate(links):
        error = _complete(k, links, errors)
        set_field = partial(BaseException.__setattr__, error)  # a frozen dataclass refuses its own
        set_field("__cause__", _complete(link.cause, links, errors))
        set_field("__context__", _complete(link.context, links, errors))
        set_field("__suppress_context__", link.suppressed)
    found: Exception = errors[0]
    return found


def _complete(k: Any, links: list[PackedLink], errors: dict[int | None, Any]) -> Any:
    """Return error `k` of `errors`, with its members. Make what is not there yet."""
    if k not in errors:
        errors[k] = _unpickled(links[k])
        if isinstance(group := errors[k], BaseExceptionGroup):
            members = [_complete(member, links, errors) for member in links[k].members]
            errors[k] = _rebuild(type(group), (group.message, members), dict(vars(group)))
    return errors[k]


def _unpickled(link: PackedLink) -> Any:
    try:
        error, notes = pickle.loads(link.pickle)
    except BaseException as exc:
        return RuntimeError(
            f"an error of a worker cannot be rebuilt: {type(exc).__name__}: {shown(exc, str)}"
        )
    with suppress(Exception):
        notes = [*getattr(error, "__notes__", ()), *notes]
        BaseException.__setattr__(error, "__notes__", notes)
    return error
