"""The run of a model over parts of a dataset. One loader reads ahead while the model works."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastload._kit.nested import map_tensors
from fastload.loader import DataLoader
from fastload.order.sampler import PlacedBatch
from fastload.store.room import expect_room

Part = tuple[str, range]
"""A part of a set: its fingerprint and its rows."""


class _Batches:
    """A batch sampler of the rows of parts. A batch never has rows of two parts.

    So the samples of a batch, and their random numbers, do not depend on the process that makes the part, nor on the
    parts that it has made before.
    """

    def __init__(self, parts: Sequence[Part], size: int) -> None:
        self._parts, self._size = parts, size

    def __iter__(self) -> Iterator[list[int]]:
        for _, rows in self._parts:
            for begin in range(0, len(rows), self._size):
                yield PlacedBatch(rows[begin : begin + self._size], rows.start + begin)


def batches_of(
    dataset: Any, parts: Sequence[Part], options: Mapping[str, Any]
) -> Generator[tuple[Part, Iterator[tuple[int, Any]]], None, None]:
    """Yield each part with its batches, which have to be read before the next part: (number of samples, batch).

    One loader reads all parts, and reads ahead across them.

    Args:
        options: arguments of the loader, with `batch_size`.
    """
    options = dict(options)
    size = options.pop("batch_size")
    with DataLoader(dataset, batch_sampler=_Batches(parts, size), **options) as loader:
        batches = iter(loader)
        for part in parts:
            yield part, _of_part(len(part[1]), size, batches)


def _of_part(rows: int, size: int, batches: Iterator[Any]) -> Iterator[tuple[int, Any]]:
    for begin in range(0, rows, size):
        yield min(size, rows - begin), next(batches)


@dataclass(frozen=True)
class Forward:
    """A model, how a batch becomes its input, and how its output becomes columns.

    Attributes:
        model: the model.
        split: returns the model's input and the labels of a batch, or None as labels to store none.
        named: returns the columns that the model's output has, by name.
        dtype: dtype of these columns. None: that of the model's output.
    """

    model: Any
    split: Callable[[Any], tuple[Any, Any]]
    named: Callable[[Any], Mapping[str, Any]]
    dtype: torch.dtype | None = None


@dataclass
class ModelRun:
    """The run of a model, which computes the columns of parts.

    Attributes:
        forward: the model, its input and its columns.
        device: device of the model.
        left: maximum number of rows to make.
        folder: folder in which the set is made.
        made: called with the number of samples of each batch.
        layout: names, dtypes and shapes of a row, once they are known.
    """

    forward: Forward
    device: torch.device
    left: int
    folder: str
    made: Callable[[int], object]
    layout: str = ""

    def columns(self, rows: int, batches: Iterator[tuple[int, Any]]) -> dict[str, Any]:
        """Return the columns of a part of `rows` rows."""
        kept: dict[str, Any] = {}
        done = 0
        for size, batch in batches:
            inputs, labels = self.forward.split(batch)
            outputs = self._outputs(inputs, size)
            if labels is not None:
                outputs["y"] = _labels(labels, size)
            self._expect_layout(outputs)
            if not done:
                tensors = [found for found in outputs.values() if isinstance(found, Tensor)]
                of_a_row = sum(found[0].numel() * found.itemsize for found in tensors)
                expect_room(self.folder, self.left * of_a_row)
                kept = {name: _column(found, rows) for name, found in outputs.items()}
            for name, found in outputs.items():
                kept[name][done : done + size] = found
            done += size
            self.left -= size
            self.made(size)
        return kept

    def _outputs(self, inputs: Any, size: int) -> dict[str, Any]:
        """Run the model on a batch. Raise TypeError unless each output column is a tensor with one row per sample."""
        inputs = map_tensors(inputs, lambda part: part.to(self.device, non_blocking=True))
        with torch.inference_mode():
            returned = self.forward.model(inputs)
        outputs = self.forward.named(returned)
        for found in outputs.values():
            if not isinstance(found, Tensor) or not found.dim() or len(found) != size:
                also = "" if found is returned else f", with {shown(found)}"
                raise TypeError(
                    f"the model returned {shown(returned)}{also} for a batch of {size} samples, {shown(inputs)}: "
                    "expected a tensor with one row per sample"
                )
        return {name: _cast(found, self.forward.dtype) for name, found in outputs.items()}

    def _expect_layout(self, outputs: Mapping[str, Any]) -> None:
        """Raise TypeError if the rows differ in columns, shape or dtype from those of earlier batches."""
        rows = {
            name: shown(found[0]) if isinstance(found, Tensor) else "text"
            for name, found in outputs.items()
        }
        layout = ", ".join(f"{name} {row}" for name, row in rows.items())
        self.layout = self.layout or layout
        if layout != self.layout:
            raise TypeError(
                f"the model returned rows of {layout}, but {self.layout} for an earlier batch. All rows must have the "
                "same columns, shapes and dtypes"
            )


def _column(found: Any, rows: int) -> Any:
    """Return an empty column of `rows` rows, for rows such as these."""
    return (
        found.new_empty((rows, *found.shape[1:]), device="cpu") if isinstance(found, Tensor) else []
    )


def _cast(outputs: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return the outputs in a dtype. Raise ValueError if a value becomes infinite because that is too small."""
    cast = outputs if dtype is None else outputs.to(dtype)
    is_smaller = dtype == torch.float16 != outputs.dtype
    if is_smaller and not cast.isfinite().all() and outputs.isfinite().all():
        raise ValueError(
            f"a feature of {float(outputs.abs().max()):,.0f} does not fit into float16, whose largest number is "
            "65,504. Use torch.bfloat16 or torch.float32"
        )
    return cast


def _labels(labels: Any, size: int) -> Any:
    """Return the labels of a batch: whole numbers as int64, others as they are."""
    if isinstance(labels, Tensor):
        plain = labels.is_floating_point() or labels.dtype == torch.bool
        labels = labels if plain else labels.to(torch.int64)
    elif not isinstance(labels, tuple | list) or not all(isinstance(text, str) for text in labels):
        raise TypeError(
            f"expected a number, a tensor or a text as label, got {shown(labels)} for a batch"
        )
    if len(labels) != size:
        raise TypeError(f"expected {size} labels, one per sample of a batch, got {len(labels)}")
    return labels


def shown(value: Any) -> str:
    """Describe a value for an error: dtype and shape of a tensor, or else the type."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return type(value).__name__
