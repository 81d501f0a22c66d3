"""The samples of a run: finding their list, and adding indices to samples, so that delivered ones can be counted."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

from torch.utils.data import Dataset

from fastload._kit.will_read import WillRead, will_read_of
from fastload.errors import UsageError
from fastload.measure.options import ImageList
from fastload.reading.rows import filler
from fastload.rows import Run


class Source(Protocol):
    """A map-style dataset of `(image, class number)`: a file list or a packed set."""

    classes: list[str]

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> tuple[Any, ...]: ...

    def locate(self, index: int) -> str:
        """Return where a sample is stored."""
        ...


class Numbered(Dataset[tuple[Any, Any, int]]):
    """A dataset of pairs, with its index appended to each sample, so that delivered samples can be counted."""

    fastload_per_worker = ("dataset",)

    def __init__(self, dataset: Source) -> None:
        self.dataset = dataset
        self._fills = hasattr(dataset, "fill_rows") and filler(dataset) is not None

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[Any, Any, int]:
        image, label, *_ = self.dataset[index]
        return image, label, index

    @property
    def will_read(self) -> WillRead | None:
        """What tells the wrapped dataset what is read soon, or None if it does not listen."""
        return will_read_of(self.dataset)

    def empty_sample(self) -> Any:
        """Return an empty sample, or None if the wrapped dataset does not fill rows; see `fastload.rows`."""
        inner = filler(self.dataset)
        return None if inner is None else (*inner.sample[:2], 0)

    def fill_rows(self, run: Run) -> Iterable[int]:
        """Let the wrapped dataset fill its rows, and number them; see `fastload.rows`."""
        dataset: Any = self.dataset
        if not self._fills:
            return range(len(run))
        *rows, numbers = run.rows
        numbers[:] = run.indices
        missing: Iterable[int] = dataset.fill_rows(run.renamed(run.indices, tuple(rows)))
        return missing

    def locate(self, index: int) -> str:
        """Return where a sample is stored, for the loader's error notes."""
        return self.dataset.locate(index)


def find_list(images: ImageList) -> Path:
    """Return the path of the list: as given, or else relative to `base_dir`. Raise `UsageError` if it is in neither."""
    if images.file_list is None:
        raise UsageError(
            "--file-list-path is missing. Give a text file with one image path per line"
        )
    file_list = Path(images.file_list)
    places = [file_list, Path(images.base_dir or "") / file_list]
    for path in places:
        if path.exists():
            return path
    looked = " and ".join(dict.fromkeys(str(path.parent.absolute()) for path in places))
    raise UsageError(
        f"The file list was not found. There is no {file_list.name!r} in {looked}. Give --file-list-path a path "
        "that starts from the current folder or from --base-dir"
    )
