"""A reader of MNIST, or of any set in the same IDX files: a drop-in for torchvision's class."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Callable, Sequence
from http.client import HTTPException
from typing import Any, ClassVar
from urllib.error import URLError

import torch
from torch.utils.data import Dataset

from fastload._kit.integers import as_indices
from fastload.datasets.idx import read_idx
from fastload.errors import IdxError, NoDatasetError
from fastload.reading.rows import Gatherer
from fastload.rows import Run

MARKER = "SYNTHETIC.txt"
"""The name of a file that marks a synthetic set."""

_NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


class MNIST(Dataset[tuple[Any, Any]]):
    """MNIST, a map-style dataset of `(image, label)`: the samples of `torchvision.datasets.MNIST`.

    An image is a PIL image of mode "L", 28 x 28, and a label an int, 0 to 9. All images are in memory, 47 MB for
    training. The files are MNIST's four, or the two of the split, in `root/MNIST/raw` (torchvision's place) or in
    `root` itself. Unpack those that end in `.gz`.

    `fastload mnist --synthetic ROOT` writes a set in these files for a machine without a network. It is not MNIST:
    `synthetic` is True, and `repr()` says so.

    Args:
        root: the folder.
        train: True for train-*, False for t10k-*.
        transform, target_transform: called with the image and with the label. Transforms run on the loader's threads.
        download: True to download MNIST into `root/MNIST/raw` if the split is missing. torchvision, which must be
            installed, downloads it from its mirrors and checks it. If the folder holds a synthetic set, this downloads
            nothing and warns. Of several ranks, let one do it first.
        tensors: True for images as tensors, uint8[1, 28, 28] from 0 to 255, without Pillow. Without
            transforms, the loader then copies whole batches out of `data`, with no call for each sample (docs/rows.md).
            Scale on the device: `images.to(device).float().div_(255)`. A `transform` gets the tensor.

    Attributes:
        data: the images, uint8[n, 28, 28].
        targets: the labels, int64[n].
        classes, class_to_idx: the names of the classes, as in torchvision, and the number of each.
        folder: where the files were found.
        synthetic: whether SYNTHETIC.txt lies beside them.

    Raises:
        NoDatasetError: the files are missing or cannot be downloaded.
        IdxError: a file is damaged, or is not what its name says.

    Examples:
        >>> from fastload.datasets.synthetic import generate_digits
        >>> folder = generate_digits("digits", train=64, test=1)
        >>> digits = fastload.datasets.MNIST("digits", tensors=True)
        >>> next(iter(DataLoader(digits, batch_size=64)))[0].shape
        torch.Size([64, 1, 28, 28])
    """

    fastload_per_worker = ("transform", "target_transform")
    fill_rows_only_copies = True
    classes: ClassVar[list[str]] = [f"{number} - {name}" for number, name in enumerate(_NAMES)]

    def __init__(
        self,
        root: str | os.PathLike[str],
        train: bool = True,
        transform: Callable[[Any], Any] | None = None,
        target_transform: Callable[[Any], Any] | None = None,
        download: bool = False,
        *,
        tensors: bool = False,
    ) -> None:
        self.root = os.path.expanduser(os.fspath(root))
        self.train, self.tensors = train, tensors
        self.transform, self.target_transform = transform, target_transform
        found = _find(self.root, train)
        if found is None and download:
            _download(self.root)
            found = _find(self.root, train)
        if found is None:
            raise NoDatasetError(_missing(self.root, train))
        images, labels = found
        self.folder = os.path.dirname(images)
        self.synthetic = os.path.exists(os.path.join(self.folder, MARKER))
        if download and self.synthetic:
            warnings.warn(
                f"{self.folder} holds synthetic digits, which are not MNIST. Nothing was downloaded. To download "
                "MNIST, delete that folder or name another",
                stacklevel=2,
            )
        self.data = torch.from_numpy(read_idx(images, dimensions=3))
        self.targets = torch.from_numpy(read_idx(labels, dimensions=1)).long()
        if len(self.data) != len(self.targets):
            raise IdxError(
                f"{images} has {len(self.data)} images, but {labels} has {len(self.targets)} labels"
            )
        self._gatherer = Gatherer()

    @property
    def class_to_idx(self) -> dict[str, int]:
        """The number of each class."""
        return {name: number for number, name in enumerate(self.classes)}

    @property
    def raw_folder(self) -> str:
        """The folder of torchvision's files, and of downloads."""
        return raw_folder(self.root)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        image: Any = self.data[index]
        target: Any = int(self.targets[index])
        if self.tensors:
            image = image[None].clone()  # a transform may write into it
        else:
            from PIL import Image

            image = Image.fromarray(image.numpy())
        if self.transform is not None:
            image = self.transform(image)
        if self.target_transform is not None:
            target = self.target_transform(target)
        return image, target

    def empty_sample(self) -> Any:
        """Return an empty sample, or None if a sample is not a plain copy; see `fastload.rows`."""
        return (self.data.new_empty((1, *self.data.shape[1:])), 0) if self._only_copies() else None

    def _only_copies(self) -> bool:
        return self.tensors and self.transform is None and self.target_transform is None

    def fill_rows(self, run: Run) -> Sequence[int]:
        """Copy the images and labels of a run into the batch; see `fastload.rows`."""
        images, labels = run.rows
        data, targets = self.data, self.targets  # read once: they may be replaced at any time
        indices = as_indices(run.indices, len(data))
        fits = data.shape[1:] == images.shape[2:] and data.dtype is images.dtype
        if indices is None or not fits or not self._only_copies():
            return range(len(run))
        try:
            self._gatherer.gather(data, indices, images[:, 0])
            labels[:] = targets.numpy()[indices]
        # `__getitem__` says what is wrong with them.
        except (IndexError, RuntimeError, TypeError):
            return range(len(run))
        return ()

    def __len__(self) -> int:
        return len(self.data)

    def __repr__(self) -> str:
        use = "training" if self.train else "testing"
        kind = ", synthetic: not MNIST" if self.synthetic else ""
        return f"{type(self).__name__}({self.root!r}: {len(self)} samples for {use}{kind})"


def raw_folder(root: str | os.PathLike[str]) -> str:
    """Return the folder below `root` in which torchvision stores MNIST's files."""
    return os.path.join(os.path.expanduser(os.fspath(root)), "MNIST", "raw")


def split_files(train: bool) -> tuple[str, str]:
    """Return the names of a split's files, images and labels."""
    split = "train" if train else "t10k"
    return f"{split}-images-idx3-ubyte", f"{split}-labels-idx1-ubyte"


def _find(root: str, train: bool) -> tuple[str, str] | None:
    """Return the paths of a split's images and labels, or None if no folder has both."""
    for folder in (raw_folder(root), root):
        paths = [os.path.join(folder, name) for name in split_files(train)]
        if all(map(os.path.isfile, paths)):
            return paths[0], paths[1]
    return None


def _missing(root: str, train: bool) -> str:
    images, labels = split_files(train)
    return (
        f"{root}: MNIST was not found. Expected {images} and {labels}, unpacked, in {raw_folder(root)} or in "
        f"{root}. Give download=True, or write a synthetic set: fastload mnist --synthetic {root}"
    )


def _download(root: str) -> None:
    """Let torchvision download MNIST into a folder of its own, because it accepts a truncated file as complete."""
    try:
        from torchvision.datasets import MNIST as TorchvisionMNIST
    except ImportError as error:
        raise NoDatasetError(
            f"{root}: download=True needs torchvision, which is not installed. Run pip install "
            f"'torch-fastload[images]'. Or write a synthetic set: fastload mnist --synthetic {root}"
        ) from error
    folder = raw_folder(root)
    os.makedirs(folder, exist_ok=True)
    if os.path.exists(os.path.join(folder, MARKER)):
        raise NoDatasetError(
            f"{folder} holds a part of a synthetic set, which must not be mixed with MNIST. Delete that folder, or "
            f"complete the set: run `fastload mnist --synthetic {root}` again"
        )
    with tempfile.TemporaryDirectory(prefix=".download-", dir=folder) as temporary:
        try:
            TorchvisionMNIST(temporary, download=True)
        except (RuntimeError, URLError, HTTPException, ConnectionError, TimeoutError) as error:
            raise NoDatasetError(
                f"{root}: MNIST could not be downloaded: {' '.join(str(error).split())}. Copy the files of MNIST to "
                f"{folder}, or write a synthetic set: fastload mnist --synthetic {root}"
            ) from error
        for name in (*split_files(True), *split_files(False)):
            os.replace(os.path.join(raw_folder(temporary), name), os.path.join(folder, name))
