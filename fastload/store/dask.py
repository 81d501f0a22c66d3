"""The partitions of a Dask collection, and how each becomes a part of a set."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import zip_longest
from typing import Any

import dask
from dask.delayed import Delayed

from fastload.store.columns import naming


def current_client(client: Any) -> Any:
    """Return `client`, or the current one of `distributed`, or None if there is none."""
    if client is None:
        with suppress(ImportError, ValueError):
            from distributed import get_client

            return get_client()
    return client


def partitions(data: Any) -> list[Delayed]:
    """Return the delayed object of each partition, in order. Cells are not converted to Arrow strings.

    Raises TypeError unless `data` is a Dask frame, array or bag, a mapping of arrays, or a list of delayed parts.
    """
    with dask.config.set({"dataframe.convert-string": False}):
        if isinstance(data, Mapping):
            columns = {str(name): _of_array(array) for name, array in data.items()}
            if len({len(blocks) for blocks in columns.values()}) > 1:
                raise ValueError("all arrays must have the same chunks in dim 0. Rechunk them")
            make = dask.delayed(dict, pure=False)
            return [
                make(**dict(zip(columns, blocks, strict=True)))
                for blocks in zip(*columns.values(), strict=True)
            ]
        if isinstance(data, Delayed):
            return [data]
        if isinstance(data, list | tuple):
            return [part if isinstance(part, Delayed) else dask.delayed(part) for part in data]
        if hasattr(data, "chunks"):
            return _of_array(data)
        if hasattr(data, "expr"):
            from dask.dataframe.dask_expr._collection import new_collection

            data = new_collection(_without_conversion(data.expr))
        if not hasattr(data, "to_delayed"):
            raise TypeError(
                f"expected a frame, array or bag of Dask, or delayed parts, got {type(data)}"
            )
        return list(data.to_delayed())


def _of_array(array: Any) -> list[Delayed]:
    whole = array.rechunk(dict.fromkeys(range(1, array.ndim), -1)) if array.ndim > 1 else array
    return list(whole.to_delayed().ravel())


def _without_conversion(expr: Any) -> Any:
    """Return a frame's expression without the conversion of `dataframe.convert-string`.

    With that conversion, a cell that is an array becomes the string that NumPy prints for it.
    """
    from dask.dataframe.dask_expr._expr import ArrowStringConversion, Expr

    if isinstance(expr, ArrowStringConversion):
        return _without_conversion(expr.frame)
    operands = []
    for name, operand in zip_longest(expr._parameters, expr.operands):
        if name == "pyarrow_strings_enabled":
            operand = False
        operands.append(_without_conversion(operand) if isinstance(operand, Expr) else operand)
    same = all(a is b for a, b in zip(operands, expr.operands, strict=True))
    return expr if same else type(expr)(*operands)


def as_part(part: Any) -> Any:
    """Return a partition as `record_batch` takes it: an array as the column "data", rows of a bag as columns."""
    if hasattr(part, "shape") and not hasattr(part, "columns") and not hasattr(part, "schema"):
        return {part.name: part} if hasattr(part, "to_frame") else {"data": part}
    if isinstance(part, Mapping) or hasattr(part, "columns"):
        return part
    rows = list(part)
    if not all(isinstance(row, Mapping) and list(row) == list(rows[0]) for row in rows):
        raise TypeError("the rows of a bag must be mappings of the same names")
    return {name: [row[name] for row in rows] for name in (rows[0] if rows else ())}


def local_parts(data: Any) -> Iterator[Any]:
    """Yield the partitions for a put without a client. This process computes each just before it is written."""
    for number, delayed in enumerate(partitions(data)):
        with dask.config.set({"dataframe.convert-string": False}):
            part = delayed.compute()
        with naming(f"partition {number}"):
            yield as_part(part)
