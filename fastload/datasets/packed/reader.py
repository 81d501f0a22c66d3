"""`PackedDataset`: the records of a packed set, by position."""

from __future__ import annotations

import operator
import os
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from fastload._kit.integers import as_indices
from fastload._kit.texts import counted
from fastload.datasets.manifest import read_index
from fastload.datasets.packed.format import Table, packed_index, read_table, schema_of
from fastload.datasets.packed.payloads import Payloads
from fastload.datasets.packed.shards import AnyFile, Shards
from fastload.errors import DecodeError, PackedDataError
from fastload.remote.files import is_url
from fastload.rows import Run
from fastload.telemetry import stage

if TYPE_CHECKING:
    from fastload.image.render import Render
    from fastload.remote.cache import Cache


class PackedDataset(Dataset[tuple[Any, ...]]):
    """A packed set, written by `fastload set pack`, as a map-style dataset of `(transform(image), label)`.

    It reads records by position, with the GIL released, without Arrow and without a lock. It can be shared between
    threads, pickled, copied, and used after a fork. The first read of a record in a process compares its payload with
    its checksum (0.7 ms a MB), and the first read from a shard all other bytes.

    Args:
        path: the directory of the set, or its URL, such as "s3://bucket/set".
        transform: a plan of `fastload.image`, which gets the bytes or the raw pixels (the fast way), or any
            callable that takes an RGB `PIL.Image.Image`. None returns the image itself.
        target_transform: a callable that takes the label, an int.
        decode: False if payloads are not images, or must not be decoded. The transform, if given, gets the
            payload as `bytes`, or in a set of mode "raw" as pixels, `uint8[H, W, 3]`.
        columns: names of extra columns. Their values, as Python objects, follow the label in a sample. After the
            first read from a shard, its columns stay in memory, including those of fastload.
        read_ahead_bytes: if a record is not in memory yet, ask the kernel to read the whole aligned piece of this many
            bytes around it. This helps slow storage with an order that soon returns to the same piece:
            `RankSampler(window=, run=)`, with a piece of about a run. 0 reads only the record.
        cache_dir: the folder that keeps what was read of a set at a URL, in blocks of 1 MiB. All processes of a node
            may share it, and later runs. Default: a temporary folder, which goes with this process.
        cache_bytes: the disk space that the cache may take, about; in a temporary folder at most half of what is free.
            The longest unused blocks are deleted for new ones. 0 keeps nothing: each read asks for its payload only.

    For a part for each rank, give the loader a `fastload.RankSampler`.

    Memory: 29 bytes for each record of every shard that was read from, 37 in mode "raw". Each thread has a buffer for
    the largest record, and a quarter more. At most 16 shards are open at once, or a quarter of the process's limit of
    open files if that is more.

    Attributes:
        path, mode, schema, made: see `fastload.datasets.manifest.Index`.
        classes, class_to_idx: class names in the order of their numbers, and the number of each. Empty if the set has
            no classes.
        targets: the labels, int64[len(self)]. The first use reads the columns of all shards.

    Raises:
        FileNotFoundError: the set does not exist.
        PackedDataError: the set, or a record that is read, is damaged or of a newer version. The message names shard
            and record.
        ValueError: an argument is out of range.
        DecodeError: a payload that is read is undamaged, but not an image.
        IndexError: there is no such sample.

    Examples:
        >>> from fastload.datasets.packed.packing import pack
        >>> _ = pack("train.txt", "packed", base_dir=".")
        >>> plan = fastload.image.ResizeCenterCrop(32, 32)
        >>> image, label = fastload.datasets.PackedDataset("packed", transform=plan)[0]
        >>> image.shape, label
        (torch.Size([3, 32, 32]), 0)
    """

    fastload_per_worker = ("transform", "target_transform")

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        transform: Callable[[Any], Any] | None = None,
        target_transform: Callable[[Any], Any] | None = None,
        decode: bool = True,
        columns: Sequence[str] = (),
        read_ahead_bytes: int = 0,
        cache_dir: str | os.PathLike[str] | None = None,
        cache_bytes: int = 64_000_000_000,
    ) -> None:
        if read_ahead_bytes < 0:
            raise ValueError(f"read_ahead_bytes must be 0 or more, got {read_ahead_bytes}")
        self._cache: Cache | None = None
        if is_url(path):
            from fastload.remote.cache import Cache

            if read_ahead_bytes:
                raise ValueError("read_ahead_bytes is for sets on this machine, not at a URL")
            self.path = path.rstrip("/")
            self._cache = Cache(cache_dir, cache_bytes)
        else:  # the working directory may change before a shard is opened
            self.path = os.path.abspath(path)
        self._index = index = packed_index(self.path, read_index(self.path))
        own = len(schema_of(index.mode))
        known = [name for name, _ in index.schema[own:]]
        if isinstance(columns, str) or (unknown := [name for name in columns if name not in known]):
            unknown = [columns] if isinstance(columns, str) else unknown
            raise ValueError(
                f"{self.path} has no extra columns {unknown}. Its extra columns are {known}"
            )
        self.columns = tuple(columns)
        self.read_ahead_bytes = read_ahead_bytes
        self.decode = decode
        self.transform = transform
        self.target_transform = target_transform
        self.mode, self.schema, self.made = index.mode, index.schema, dict(index.made)
        self.classes = list(index.classes)
        self.class_to_idx = {name: number for number, name in enumerate(self.classes)}
        self._ends = list(accumulate(shard.rows for shard in index.shards))
        self._forget()

    def _forget(self) -> None:
        """Drop all that reading has opened or loaded."""
        # A thread that is reading continues with the shards that it holds.
        self._shards: Shards
        if self._cache is None:
            self._shards = Shards(self.path, self._index, extras=self.columns)
        else:
            from fastload.datasets.packed.remote_shards import RemoteShards

            self._shards = RemoteShards(self.path, self._index, self._cache, extras=self.columns)
        self._targets: NDArray[np.int64] | None = None

    def close(self) -> None:
        """Close the files and free the tables. The next read opens them again."""
        self._forget()

    def __getstate__(self) -> dict[str, Any]:
        own = ("_shards", "_targets")
        return {name: value for name, value in self.__dict__.items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    def __len__(self) -> int:
        return self._index.rows

    def __repr__(self) -> str:
        size = f"{counted(len(self), 'record')}, {counted(len(self.classes), 'class')}"
        return f"PackedDataset({self.path!r}: {size}, {self.mode})"

    @property
    def targets(self) -> NDArray[np.int64]:
        """The labels, int64[len(self)]."""
        if (found := self._targets) is None:  # read once: another thread may call `close`
            tables = (self._shards.table(k) for k in range(len(self._index.shards)))
            self._targets = found = np.concatenate([table.labels for table in tables])
        return found

    def locate(self, index: int) -> str:
        """Return where sample `index` is: shard, record, and the name of its source.

        The source is left out before the first read from a shard at a URL.
        """
        number, row = self._place(index)
        shard = self._index.shards[number]
        place = f"{os.path.join(self.path, shard.name)}, record {row}"
        if not self._shards.may_locate(number):
            return place
        try:
            file = self._shards.file(number)  # keep a reference: the descriptor closes with it
            sources = read_table(
                self.path, self._index, shard, file.size, file.read_into, columns=["source"]
            )
        except (OSError, PackedDataError):
            return place  # the shard is damaged: no source to name
        return f"{place} ({_extras(sources, row)[0]})"

    def read(self, index: int) -> bytes:
        """Return the payload of sample `index`, unchanged from the file. Its first read is checked."""
        return bytes(self._payloads().read(*self._place(index)))

    def _payloads(self) -> Payloads:
        return Payloads(self._shards, self.read_ahead_bytes)

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        number, row = self._place(index)
        table = self._shards.table(number)
        target: Any = int(table.labels[row])
        try:
            sample = self._sample(number, row, table)
        except DecodeError as error:
            raise DecodeError(self.locate(index), error.reason) from error
        if self.target_transform is not None:
            target = self.target_transform(target)
        if not self.columns:
            return sample, target
        return sample, target, *_extras(table, row)

    def empty_sample(self) -> Any:
        """Return an empty sample, or None if samples vary or cannot be filled in runs; see `fastload.rows`."""
        plan: Any = self.transform
        if not self._can_fill(plan):
            return None
        from fastload.image.render import empty_result

        image = empty_result(plan)
        return None if image is None else (image, 0)

    def _can_fill(self, plan: Any) -> bool:
        ordinary = self.read_ahead_bytes or not self.decode or self.columns
        return not ordinary and self.target_transform is None and _is_plan(plan)

    def fill_rows(self, run: Run) -> Sequence[int]:
        """Write the images and labels of a run into the batch; see `fastload.rows`."""
        images, labels = run.rows
        plan: Any = self.transform  # read once: it may be replaced at any time
        records, payloads = as_indices(run.indices, len(self)), self._payloads()
        shards = payloads.shards
        if records is None or not self._can_fill(plan):
            return range(len(run))
        from fastload.image.render import make_render

        render = make_render(plan, images, run.keys)
        if render is None:
            return range(len(run))
        numbers = np.searchsorted(self._ends, records, side="right")
        if len(np.unique(numbers)) > shards.most_open:
            return range(len(run))
        try:
            # References until the end: a descriptor closes with its file.
            for number in (needed := set(numbers.tolist())):
                shards.table(number)
            files = {number: shards.file(number) for number in needed}
        except (OSError, PackedDataError):
            return range(len(run))  # reading a sample of that shard raises it again
        with shards.held(files, records, numbers) as ready:
            if not ready:
                return range(len(run))
            return self._fill(render, payloads, files, records, numbers, labels)

    def _fill(
        self,
        render: Render,
        payloads: Payloads,
        files: dict[int, AnyFile],
        records: NDArray[np.int64],
        numbers: NDArray[np.int64],
        labels: Any,
    ) -> list[int]:
        """Fill the rows of records, which lie in the shards `numbers`. Return the positions that lack."""
        shards = payloads.shards
        columns = shards.columns
        labels[:] = columns.labels[records]
        checked = ~columns.seen[records]
        source = _Source(
            np.array([files[number].fd for number in numbers.tolist()]),
            np.where(checked, columns.checksums[records].astype(np.int64), -1),
        )
        places = [*zip(numbers.tolist(), (records - shards.begins[numbers]).tolist(), strict=True)]
        missing = self._render(render, source, payloads, records, places)
        checked[missing] = False
        columns.seen[records[checked]] = True
        return missing

    def _render(
        self,
        render: Render,
        source: _Source,
        payloads: Payloads,
        records: NDArray[np.int64],
        places: list[tuple[int, int]],
    ) -> list[int]:
        """Render the images of `records`, which lie at `places` (shard, record). Return the positions not rendered."""
        columns = payloads.shards.columns
        if columns.sides is not None:

            def rows(k: int, first: int, stop: int) -> NDArray[np.uint8]:
                with payloads.buffer(*places[k]) as buffer:
                    return payloads.read_rows(*places[k], buffer, first, stop)

            begins, sides = columns.begins[records], columns.sides[records]
            return render.raw(source.files, begins, sides, source.checksums, rows)

        def encoded(k: int) -> memoryview:
            with payloads.buffer(*places[k]) as buffer:
                return payloads.read(*places[k], buffer)

        def place(images: NDArray[Any]) -> None:
            images["file"], images["checksum"] = source
            images["source"] = columns.begins[records]
            images["length"] = columns.lengths[records]

        return render.encoded(encoded, place)

    @property
    def will_read(self) -> Callable[[Sequence[int]], None] | None:
        """Begins to fetch samples of a set at a URL, or None for a set on this machine.

        fastload's loader calls it with the indices of the batches that its workers will read soon. An empty list
        forgets what was begun.
        """
        return self._shards.will_read

    def _place(self, index: int) -> tuple[int, int]:
        """Return the shard, and the record in it, of sample `index`."""
        index = operator.index(index)
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {self!r}: expected 0 to {len(self) - 1}")
        number = bisect_right(self._ends, index)
        return number, index - (self._ends[number - 1] if number else 0)

    def _sample(self, number: int, row: int, table: Table) -> Any:
        plan: Any = self.transform if self.decode and _is_plan(self.transform) else None
        sides = None if table.sides is None else table.sides[row]
        payloads = self._payloads()
        if plan is not None:
            with payloads.buffer(number, row) as buffer:
                if sides is not None:

                    def rows(first: int, stop: int) -> NDArray[np.uint8]:
                        with stage("read"):
                            return payloads.read_rows(number, row, buffer, first, stop)

                    return plan.resample_rows(rows, *sides.tolist())
                with stage("read"):
                    payload = payloads.read(number, row, buffer)
                return plan.decode(payload, name=self._index.shards[number].name)
        with stage("read"):
            payload = payloads.read(number, row)
        image: Any
        if not self.decode:
            image = bytes(payload) if sides is None else _pixels(payload, sides).copy()
        elif sides is None:
            from fastload.image import open_image

            return open_image(payload, self.transform, name=self._index.shards[number].name)
        else:
            from PIL import Image

            image = Image.fromarray(_pixels(payload, sides))
        if self.transform is None:
            return image
        with stage("transform"):
            return self.transform(image)


class _Source(NamedTuple):
    """Where the payloads of a run are read from."""

    files: NDArray[np.int64]
    """Descriptors of their files."""
    checksums: NDArray[np.int64]
    """Checksums that payloads must have. -1: the payload was already verified."""


def _is_plan(transform: Any) -> bool:
    # Not by its class: importing that needs Pillow, and a set without images does not.
    return hasattr(type(transform), "resample_rows")


def _pixels(payload: memoryview, sides: NDArray[np.int32]) -> NDArray[np.uint8]:
    height, width = sides.tolist()
    return np.frombuffer(payload, np.uint8).reshape(height, width, 3)


def _extras(table: Table, row: int) -> list[Any]:
    """Return the values at a row of the requested columns, as Python objects."""
    number = int(np.searchsorted(table.batch_ends, row, side="right"))
    batch = table.extras[number]
    at = row - (int(table.batch_ends[number - 1]) if number else 0)
    return [column[at].as_py() for column in batch.columns]
