"""The run of a model over a dataset, part by part: one loader reads on while the model works."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastload.loader import DataLoader
from fastload.store.room import expect_room


class _Batches:
    """A batch sampler of the rows of all parts from one on. A batch never has rows of two parts.

    So a part has the same bytes, whether it was made after others or by the call that goes on after a kill.
    """

    def __init__(self, ranges: Sequence[range], size: int) -> None:
        self._ranges, self._size = ranges, size

    def __iter__(self) -> Iterator[list[int]]:
        for rows in self._ranges:
            for begin in range(0, len(rows), self._size):
                yield list(rows[begin : begin + self._size])

    def __len__(self) -> int:
        return sum(math.ceil(len(rows) / self._size) for rows in self._ranges)


class Ahead:
    """The batches of parts in order. One loader reads on from part to part; another begins only after a gap."""

    def __init__(self, dataset: Any, ranges: Sequence[range], options: Mapping[str, Any]) -> None:
        self._dataset, self._ranges = dataset, ranges
        self._options = dict(options)
        self._size = self._options.pop("batch_size")
        self._loader: DataLoader[Any] | None = None
        self._iterator: Iterator[Any] = iter(())
        self._at: int | None = None  # the first row that the loader has not given

    def __enter__(self) -> Ahead:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def batches(self, rows: range) -> Iterator[tuple[int, Any]]:
        """Yield the batches of a part, each with the number of its samples."""
        if self._at != rows.start:
            self._begin(rows.start)
        self._at = None
        for begin in range(0, len(rows), self._size):
            yield min(self._size, len(rows) - begin), next(self._iterator)
        self._at = rows.stop

    def _begin(self, start: int) -> None:
        self._close()
        left = [rows for rows in self._ranges if rows.start >= start]
        self._loader = DataLoader(
            self._dataset, batch_sampler=_Batches(left, self._size), **self._options
        )
        self._iterator = iter(self._loader)

    def _close(self) -> None:
        self._iterator = iter(())
        if self._loader is not None:
            self._loader.close()


@dataclass
class Run:
    """Makes the columns of a part.

    Attributes:
        batches, model, device, dtype: what runs over what, where, and the dtype of the column "x".
        data, label: of samples that are dicts, the keys of input and label.
        rows: those of the whole set.
        folder: in which the set is made.
        bar: counts rows.
        fastload_fingerprint: of the key, see `fingerprint`.
        error: what dataset or model raised.
    """

    batches: Ahead
    model: Any
    device: torch.device
    dtype: torch.dtype
    data: str | None
    label: str | None
    rows: int
    folder: str
    bar: Any
    fastload_fingerprint: str
    error: Exception | None = None
    _shape: torch.Size | None = None  # of a row

    def __call__(self, rows: range) -> dict[str, Any]:
        """Return the columns of these rows."""
        try:
            return self._columns(rows)
        except Exception as error:
            self.error = error
            raise

    def _columns(self, rows: range) -> dict[str, Any]:
        x, labels, done = torch.empty(0), [], 0
        self.bar.update(rows.start - self.bar.n)
        for size, batch in self.batches.batches(rows):
            inputs, label = _parted(batch, self.data, self.label)
            outputs = self._outputs(inputs, size)
            if not done:
                self._expect_room(rows, outputs)
                x = torch.empty((len(rows), *outputs.shape[1:]), dtype=self.dtype)
            x[done : done + size] = outputs
            self._expect_finite(x[done : done + size], outputs)
            labels.append(label)
            done += size
            self.bar.update(size)
        return {"x": x} if labels[0] is None else {"x": x, "y": _labels(labels, len(rows))}

    def _outputs(self, inputs: Any, size: int) -> Tensor:
        """Run the model on a batch. Raises TypeError unless it returns a tensor of a row for each sample."""
        if isinstance(inputs, Tensor):
            inputs = inputs.to(self.device, non_blocking=True)
        with torch.inference_mode():
            outputs = self.model(inputs)
        if not isinstance(outputs, Tensor) or not outputs.dim() or len(outputs) != size:
            raise TypeError(
                f"the model returned {_shown(outputs)} for a batch of {size} samples, {_shown(inputs)}: expected a "
                "tensor of a row for each"
            )
        if self._shape not in (None, outputs.shape[1:]):
            raise TypeError(
                f"the model returned rows of {list(outputs.shape[1:])}, and of {list(self._shape or ())} before: all "
                "rows must have one shape"
            )
        self._shape = outputs.shape[1:]
        return outputs

    def _expect_room(self, rows: range, outputs: Tensor) -> None:
        """Raise StoreFullError if the rows that are to come will not fit."""
        of_a_row = outputs[0].numel() * self.dtype.itemsize + 8  # of the label
        expect_room(self.folder, (self.rows - rows.start) * of_a_row)

    def _expect_finite(self, kept: Tensor, outputs: Tensor) -> None:
        """Raise ValueError if a value became infinite only because its dtype is too small."""
        if self.dtype == torch.float16 and not kept.isfinite().all() and outputs.isfinite().all():
            raise ValueError(
                f"a feature of {float(outputs.abs().max()):,.0f} does not fit into float16, whose largest number is "
                "65,504: use torch.bfloat16 or torch.float32"
            )


def _parted(batch: Any, data: str | None, label: str | None) -> tuple[Any, Any]:
    """Return what the model gets of a batch, and its labels, or None."""
    if isinstance(batch, Mapping):
        missing = [name for name in (data, label) if name is not None and name not in batch]
        if data is None or missing:
            raise TypeError(
                f"the samples are dicts of {list(batch)}: name the model's input and the label, data=, label="
            )
        return batch[data], None if label is None else batch[label]
    if isinstance(batch, Tensor):
        return batch, None
    if isinstance(batch, tuple | list) and len(batch) == 2:
        return batch[0], batch[1]
    raise TypeError(
        f"expected samples (x, y), single tensors or dicts, got {_shown(batch)} as a batch"
    )


def _labels(labels: Sequence[Any], rows: int) -> Any:
    """Return the column of labels: whole numbers as int64, others as they are."""
    if not all(isinstance(found, Tensor) for found in labels):
        texts = [text for found in labels for text in found]
        if len(texts) != rows or not all(isinstance(text, str) for text in texts):
            raise TypeError(
                f"expected a number, a tensor or a text as label, got {_shown(labels[0])} for a batch"
            )
        return texts
    whole = torch.cat(list(labels)).cpu()
    if len(whole) != rows:
        raise TypeError(f"expected a label for each of {rows} samples, got {len(whole)}")
    return (
        whole if whole.is_floating_point() or whole.dtype == torch.bool else whole.to(torch.int64)
    )


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return type(value).__name__
