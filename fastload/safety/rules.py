"""Rules that tell state, data, and objects that cannot be copied.

The rule: every object that code can change is copied for each worker. Data is shared:

- arrays, tensors and buffers of more than 16 MiB, read-only ones, those in memory that processes share, and tables;
- containers with more than 1,000 elements;
- containers with 16 elements or more, and with more than 2,000 objects or 4 MiB below them.

A container that holds datasets, transforms, functions or generators is never data.
"""

from __future__ import annotations

import io
import itertools
import random
from collections.abc import Collection, Iterable
from functools import partial
from types import FunctionType, MethodDescriptorType, MethodType, WrapperDescriptorType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from fastload.random import numpy_random, python_random

MEMORY_BYTES = 16 * 2**20
"""An array or tensor of more bytes is data. At 1 MiB, a float buffer for one 1024 x 1024 image would be shared."""

ELEMENTS = 1_000
"""A container of more elements is data."""

FEW = 16
"""A container with fewer elements is not data, whatever is below it: a pair of 3 MiB buffers is not."""


BELOW, BELOW_BYTES = 2_000, 4 * 2**20
"""A container is data if more objects, or more bytes of arrays and containers, are below it."""

PER_WORKER = "fastload_per_worker"
"""The class attribute that makes a class thread-safe: names of the attributes of which each worker gets its own copy.

All else in an instance is shared; with no names, the instance itself. It is read from the class's own `__dict__`, so
a subclass, which may add state, does not inherit it.
"""

GENERATORS = (
    *(np.random.Generator, np.random.RandomState, np.random.BitGenerator),
    *(random.Random, torch.Generator),
)


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_SHARED_MODULES = _words(
    "_contextvars _queue _thread asyncio concurrent contextvars logging multiprocessing queue subprocess threading"
)
"""Modules whose instances are all shared: they connect threads or processes, or have no state."""

# lmdb's classes are in `builtins` if they are written in C.
_SHARED_CLASSES = _words("""
    _ctypes.CFuncPtr asyncio.events.AbstractEventLoop builtins.Environment builtins._Database ctypes.CDLL
    datasets.table.Table fastload.reading.failures._Skip h5py._hl.base.HLObject h5py.h5a.AttrID h5py.h5d.DatasetID
    h5py.h5f.FileID h5py.h5g.GroupID h5py.h5r.Reference lightning.pytorch.trainer.trainer.Trainer lmdb.cffi.Environment
    mmap.mmap numpy._globals._NoValueType pandas.core.base.PandasObject pandas.core.generic.NDFrame
    polars.dataframe.frame.DataFrame polars.lazyframe.frame.LazyFrame polars.series.series.Series
    pyarrow.lib._Weakrefable pytorch_lightning.trainer.trainer.Trainer random.SystemRandom sqlite3.Row
    torch._ops.OpOverloadPacket torch._ops.OperatorBase torch.cuda.streams.Stream typing._Final weakref.finalize
    zarr.core.array.Array zarr.core.group.Group zarr.hierarchy.Group
""")
"""Classes of data, of objects without state, and of handles that threads may share."""

_NO_DATA = _words("""
    pyarrow._feather.FeatherReader pyarrow._orc.ORCReader pyarrow._parquet.ParquetReader
    pyarrow.lib._RecordBatchFileReader
""")
"""Classes that have no position, but are not for several threads either, although they derive from one of data."""

REFUSED_CLASSES = _words("""
    _duckdb.DuckDBPyConnection av.container.core.Container av.stream.Stream builtins.Cursor builtins.Transaction
    cv2.VideoCapture cv2.VideoWriter decord.video_loader.VideoLoader decord.video_reader.VideoReader lmdb.cffi.Cursor
    lmdb.cffi.Transaction netCDF4._netCDF4.Dataset pyarrow.parquet.core.ParquetFile
    pysam.libcalignmentfile.AlignmentFile rasterio.io.DatasetReader soundfile.SoundFile sqlite3.Connection
    sqlite3.Cursor torchcodec.decoders._video_decoder.VideoDecoder
""")
"""Classes whose open instances can neither be copied nor be used by several threads."""

REDUCED_CLASSES = _words("""
    PIL.Image.Image SimpleITK.SimpleITK.Image fastload.datasets.row_groups.RowGroupCache fastload.loader.DataLoader
    fsspec.spec.AbstractFileSystem sentencepiece.SentencePieceProcessor torch.jit._script.ScriptModule
""")
"""Classes in Python that only their own protocol copies: they hold data in C, or what one process has."""


def names(kind: type) -> list[str]:
    """Return the dotted names of a class and its bases."""
    return [f"{k.__module__}.{k.__qualname__}" for k in kind.__mro__[:-1]]


def shared_class(kind: type) -> str | None:
    """Return why all instances of a class are shared, or None. What has a position is no data."""
    found = names(kind)
    for module in (name.partition(".")[0] for name in found):
        if module in _SHARED_MODULES:
            return f"an object of {module}"
    if "fastload.engine.iterator.LoaderIterator" in found:
        return "a loop over a loader"
    positioned = hasattr(kind, "__next__") or not _NO_DATA.isdisjoint(found)
    return None if positioned or _SHARED_CLASSES.isdisjoint(found) else "data"


def is_one_of(kind: type, classes: Collection[str]) -> bool:
    """Return whether a class or a base of it is named in `classes`."""
    return not {*classes}.isdisjoint(names(kind))


def is_open(handle: Any) -> bool:
    """Return whether a handle of a refused class is open. One that does not say counts as open."""
    if hasattr(handle, "isOpened"):
        return bool(handle.isOpened())
    if type(handle).__module__ == "sqlite3":
        try:
            return bool(getattr(handle, "connection", handle).total_changes + 1)
        except Exception as error:
            return "closed" not in str(error)
    return getattr(handle, "closed", False) is not True


def per_worker(kind: type) -> tuple[str, ...] | None:
    """Return the attributes to copy of a class that declares itself thread-safe, or None for any other class."""
    return () if kind is TensorDataset else vars(kind).get(PER_WORKER)


def is_global_generator(x: Any) -> bool:
    """Return whether Python's, NumPy's or torch's global functions draw from `x`, or from what `x` draws from."""
    if isinstance(x, np.random.Generator):
        x = x.bit_generator
    numpys: Any = np.random
    numpys_own = numpys.mtrand._rand, numpys.get_bit_generator(), *numpy_random.GLOBAL
    return any(x is each for each in (python_random.GLOBAL, torch.default_generator, *numpys_own))


HEAP, IMMUTABLE = 1 << 9, 1 << 8
"""Bits of `type.__flags__`. HEAP: a class statement, or similar C code, made the class. IMMUTABLE: it cannot change."""


def is_in_c(kind: type) -> bool:
    """Return whether a class is written in C, or Rust: a module of Python may hold it."""
    own = vars(kind).values()
    in_c = MethodDescriptorType, WrapperDescriptorType
    return any(type(v) in in_c and v.__objclass__ is kind for v in own)


_CODE = (Dataset, nn.Module, FunctionType, MethodType, partial, io.IOBase, *GENERATORS)


def is_code(kind: type) -> bool:
    """Return whether a container with instances of a class is never data."""
    if issubclass(kind, _CODE):
        return True
    if "torch_geometric.data.data.BaseData" in names(kind):  # it is called to iterate
        return False
    return not issubclass(kind, torch.Tensor | type) and any(
        "__call__" in vars(k) for k in kind.__mro__[:-1] if k.__flags__ & HEAP
    )


def holds_code(container: Any) -> bool:
    """Return whether a container holds code, so that it is never data.

    It looks at up to 1,000 elements, evenly spaced if possible. Of each container or instance among them it looks at 16
    parts, and at 16 parts of each of those.
    """
    level, many = [container], ELEMENTS
    for _ in range(3):
        elements = [e for x in level for e in some(x, many)]
        kinds = set(map(type, elements))
        if any(map(is_code, kinds)):
            return True
        nested = {k for k in kinds if k in _NESTED or k.__dictoffset__}
        found = (e for e in elements if type(e) in nested)
        level = [
            e if type(e) in _NESTED else own_dict(e) for e in itertools.islice(found, ELEMENTS)
        ]
        many = FEW
    return False


_NESTED = {list, tuple, dict, set, frozenset}


def own_dict(x: Any) -> dict[str, Any]:
    """Return the `__dict__` of an instance, or an empty dict. No code of its class runs."""
    try:
        own = object.__getattribute__(x, "__dict__")
    except AttributeError:  # it has none, or its class is written in C
        return {}
    return own if type(own) is dict else {}


def some(container: Any, count: int) -> Iterable[Any]:
    """Return about `count` elements. No code of a subclass runs."""
    step = slice(None, None, max(1, len(container) // count))
    if isinstance(container, list):
        return list.__getitem__(container, step)
    if isinstance(container, tuple):
        return tuple.__getitem__(container, step)
    held = dict.values(container) if isinstance(container, dict) else container
    return itertools.islice(held, count)
