"""The run of a model over parts of a dataset. One loader reads ahead while the model works."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
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

    def __init__(self, parts: Iterable[Part], size: int) -> None:
        self._parts, self._size = parts, size
        self.begun: deque[Part] = deque()

    def __iter__(self) -> Iterator[list[int]]:
        for part in self._parts:
            self.begun.append(part)
            _, rows = part
            for begin in range(0, len(rows), self._size):
                yield PlacedBatch(rows[begin : begin + self._size], rows.start + begin)


def batches_of(
    dataset: Any, parts: Iterable[Part], options: Mapping[str, Any]
) -> Generator[tuple[Part, Iterator[tuple[int, Any]]], None, None]:
    """Yield each part with its batches, which have to be read before the next part: (number of samples, batch).

    One loader reads all parts, and reads ahead across them. It takes a part from `parts` when it begins to read it.

    Args:
        options: arguments of the loader, with `batch_size`.
    """
    options = dict(options)
    size = options.pop("batch_size")
    sampler = _Batches(parts, size)
    with DataLoader(dataset, batch_sampler=sampler, **options) as loader:
        batches = iter(loader)
        for first in batches:
            part = sampler.begun.popleft()
            yield part, _of_part(len(part[1]), size, first, batches)


def _of_part(rows: int, size: int, first: Any, batches: Iterator[Any]) -> Iterator[tuple[int, Any]]:
    yield min(size, rows), first
    for begin in range(size, rows, size):
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


class Run:
    """The run of a model, which computes the columns of parts.

    Args:
        forward: the model, its input and its columns.
        device: device of the model.
        rows: maximum number of rows to make.
        folder: folder in which the set is made.
        made: called with the number of samples of each batch.
    """

    def __init__(
        self,
        forward: Forward,
        *,
        device: torch.device,
        rows: int,
        folder: str,
        made: Callable[[int], object],
    ) -> None:
        self._forward, self._device, self._folder = forward, device, folder
        self._left = rows
        self._made = made
        self._layout: dict[str, str] = {}  # dtype and shape of a row, by column

    def columns(self, rows: int, batches: Iterator[tuple[int, Any]]) -> dict[str, Any]:
        """Return the columns of a part of `rows` rows."""
        kept: dict[str, Tensor] = {}
        labels, done = [], 0
        for size, batch in batches:
            inputs, label = self._forward.split(batch)
            outputs = self._outputs(inputs, size)
            if not done:
                self._expect_room(outputs, of_label=0 if label is None else 8)
                kept = {
                    name: torch.empty(
                        (rows, *found.shape[1:]), dtype=self._forward.dtype or found.dtype
                    )
                    for name, found in outputs.items()
                }
            for name, column in kept.items():
                column[done : done + size] = outputs[name]
                _expect_finite(column[done : done + size], outputs[name])
            labels.append(label)
            done += size
            self._left -= size
            self._made(size)
        return kept if labels[0] is None else {**kept, "y": _labels(labels, rows)}

    def _outputs(self, inputs: Any, size: int) -> Mapping[str, Tensor]:
        """Run the model on a batch. Raises TypeError unless each output column is a tensor with one row per sample."""
        inputs = map_tensors(inputs, lambda part: part.to(self._device, non_blocking=True))
        with torch.inference_mode():
            returned = self._forward.model(inputs)
        outputs = self._forward.named(returned)
        for found in outputs.values():
            if not isinstance(found, Tensor) or not found.dim() or len(found) != size:
                also = "" if found is returned else f", with {shown(found)}"
                raise TypeError(
                    f"the model returned {shown(returned)}{also} for a batch of {size} samples, {shown(inputs)}: "
                    "expected a tensor with one row per sample"
                )
        self._expect_layout({name: self._row(found) for name, found in outputs.items()})
        return outputs

    def _row(self, outputs: Tensor) -> str:
        kind = shown(outputs).partition("[")[0] if self._forward.dtype is None else ""
        return f"{kind}{list(outputs.shape[1:])}"

    def _expect_layout(self, found: dict[str, str]) -> None:
        """Raise TypeError if the rows differ in columns, shape or dtype from those of earlier batches."""
        before, self._layout = self._layout or found, found
        if before.keys() != found.keys():
            raise TypeError(
                f"the model returned the columns {list(found)}, but {list(before)} for an earlier batch. All rows "
                "must have the same columns"
            )
        for name, row in found.items():
            if row != before[name]:
                of_column = "" if len(found) == 1 else f" as {name!r}"
                raise TypeError(
                    f"the model returned rows of {row}{of_column}, but {before[name]} for an earlier batch. All rows "
                    f"must have the same shape{' and dtype' * (self._forward.dtype is None)}"
                )

    def _expect_room(self, outputs: Mapping[str, Tensor], *, of_label: int) -> None:
        """Raise StoreFullError if the remaining rows will not fit."""
        of_a_row = of_label
        for found in outputs.values():
            of_a_row += found[0].numel() * (self._forward.dtype or found.dtype).itemsize
        expect_room(self._folder, self._left * of_a_row)


def _expect_finite(kept: Tensor, outputs: Tensor) -> None:
    """Raise ValueError if a value became infinite only because its dtype is too small."""
    if kept.dtype != torch.float16 or outputs.dtype == torch.float16:
        return
    if not kept.isfinite().all() and outputs.isfinite().all():
        raise ValueError(
            f"a feature of {float(outputs.abs().max()):,.0f} does not fit into float16, whose largest number is "
            "65,504. Use torch.bfloat16 or torch.float32"
        )


def _labels(labels: Sequence[Any], rows: int) -> Any:
    """Return the column of labels: whole numbers as int64, others as they are."""
    if not all(isinstance(found, Tensor) for found in labels):
        texts = [text for found in labels for text in found]
        if len(texts) != rows or not all(isinstance(text, str) for text in texts):
            raise TypeError(
                f"expected a number, a tensor or a text as label, got {shown(labels[0])} for a batch"
            )
        return texts
    whole = torch.cat(list(labels)).cpu()
    if len(whole) != rows:
        raise TypeError(f"expected {rows} labels, one per sample, got {len(whole)}")
    return (
        whole if whole.is_floating_point() or whole.dtype == torch.bool else whole.to(torch.int64)
    )


def shown(value: Any) -> str:
    """Describe a value for an error: dtype and shape of a tensor, or else the type."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return type(value).__name__
