"""Images in single files: from a list, or from a tree with one directory per class."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from fastload._kit.integers import as_indices
from fastload._kit.texts import counted
from fastload.datasets.file_lists import read_classes, read_list
from fastload.datasets.image_folders import EXTENSIONS, found_at, found_in
from fastload.datasets.path_table import Lazy, PathTable
from fastload.errors import FileListError, UsageError
from fastload.image import open_image
from fastload.image.decode import read_file
from fastload.image.render import Render, empty_result, make_render
from fastload.remote.files import announce, in_store, is_url, root_of, store_from, store_of
from fastload.remote.listing import listing_of
from fastload.rows import Run
from fastload.telemetry import stage

if TYPE_CHECKING:
    from fastload.remote import Store

Path = str | os.PathLike[str]


class ImageFiles(Dataset[tuple[Any, Any]]):
    """Base of both readers: a map-style dataset of `(transform(image), class number)`.

    The class number is an int below `len(classes)`. `target_transform`, if given, is applied to it. A transform that is
    a plan of `fastload.image` decodes, crops and resizes in one step, to uint8[3, H, W]. Any other gets an RGB
    `PIL.Image.Image`, as from torchvision's readers. Transforms run on the loader's threads.

    Memory: 20 bytes a sample, plus its file name (see `PathTable`). A million samples are only a few objects. So a fork
    copies nothing, and the garbage collector has nothing to visit.

    Attributes:
        classes, class_to_idx: the class names in order, and the number of each. They cover the whole set, so
            every rank has the same. `id_to_index` is another name of `class_to_idx`.
        image_paths: the sequence of paths.
        targets: the class numbers, int64[len(self)].
        samples: the sequence of `(path, class number)`.
        rank, world_size: say which part of the set this is: `files[rank::world_size]`, whose length differs by at most
            one sample. If all ranks must take equally many steps (DDP), read the whole set on each rank and give the
            loader a `fastload.RankSampler`, which pads or drops.
        partitioned_by_rank: `world_size > 1`. The loader refuses to partition such a set again.
    """

    def __init__(
        self,
        paths: PathTable,
        class_names: Iterable[str],
        classes: Sequence[str],
        *,
        transform: Callable[[Any], Any] | None,
        target_transform: Callable[[Any], Any] | None,
        store: Store | None = None,
    ) -> None:
        """Set up the dataset. `class_names` has one name for each of `paths.directories`."""
        self._store = store
        self.classes = list(classes)
        self.class_to_idx = {name: number for number, name in enumerate(self.classes)}
        numbers = np.array([self.class_to_idx[name] for name in class_names], dtype=np.int64)
        self.image_paths = paths
        self.targets = numbers[paths.directory_of]
        roots = {root_of(at) for at in paths.directories if is_url(at)}
        self._roots = sorted(roots) if store is None else [""]
        self.rank, self.world_size = paths.rank, paths.world_size
        self.partitioned_by_rank = paths.world_size > 1
        self.transform = transform
        self.target_transform = target_transform

    @property
    def id_to_index(self) -> dict[str, int]:
        """The number of each class name."""
        return self.class_to_idx

    @property
    def samples(self) -> Sequence[tuple[str, int]]:
        """The sequence of `(path, class number)`."""
        return _Samples(self)

    def load_image(self, index: int) -> tuple[Any, Any]:
        """Read, decode and transform sample `index`.

        Raises OSError, with its `filename`, if the file is missing or cannot be read. Raises `DecodeError`, with its
        `path`, if it is not an image, and IndexError if `index` is not in 0..len(self)-1.
        """
        path = self.locate(index)
        with stage("read"):
            remote = self._store is not None or is_url(path)
            encoded = self._store_of(path).read(path) if remote else read_file(path)
        image = open_image(encoded, self.transform, name=path)
        target: Any = int(self.targets[index])
        if self.target_transform is not None:
            target = self.target_transform(target)
        return image, target

    def locate(self, index: int) -> str:
        """Return the path of sample `index`, 0..len(self)-1."""
        if not 0 <= index < len(self.image_paths):
            raise IndexError(f"sample {index} of {self!r}: expected 0 to {len(self) - 1}")
        return self.image_paths[index]

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return self.load_image(index)

    def empty_sample(self) -> Any:
        """Return an empty sample, or None if samples vary or cannot be filled in runs; see `fastload.rows`."""
        image = empty_result(self.transform) if self.target_transform is None else None
        return None if image is None else (image, 0)

    def fill_rows(self, run: Run) -> Sequence[int]:
        """Write the images and labels of a run into the batch; see `fastload.rows`."""
        images, labels = run.rows
        plan: Any = self.transform  # read once: it may be replaced at any time
        indices = as_indices(run.indices, len(self))
        render = make_render(plan, images, run.keys)
        if indices is None or render is None or self.target_transform:
            return range(len(run))
        labels[:] = self.targets[indices]
        paths = [self.image_paths[index] for index in indices.tolist()]
        if self._roots:
            return self._fill_remote(render, paths)
        return render.files([*map(os.fsencode, paths)], lambda k: read_file(paths[k]))

    def _store_of(self, path: str) -> Store:
        return store_of(path) if self._store is None else self._store

    def _fill_remote(self, render: Render, paths: Sequence[str]) -> Sequence[int]:
        try:
            with stage("read"):
                found = self._read_together(paths)
        except OSError:
            return range(len(paths))  # read one by one, those that fail raise

        def place(images: NDArray[Any]) -> None:
            images["file"], images["checksum"] = -1, -1
            images["source"] = [np.frombuffer(encoded, np.uint8).ctypes.data for encoded in found]
            images["length"] = [*map(len, found)]

        return render.encoded(found.__getitem__, place)

    def _read_together(self, paths: Sequence[str]) -> list[bytes]:
        objects: dict[str, bytes] = {}
        for root in self._roots:
            urls = [path for path in paths if path.startswith(root)]
            objects.update(zip(urls, self._store_of(root).read_many(urls), strict=True))
        return [objects[path] if path in objects else read_file(path) for path in paths]

    @property
    def will_read(self) -> Callable[[Sequence[int]], None] | None:
        """Begins to read the images of samples that are at URLs, or None if all are local files.

        fastload's loader calls it with the indices of the batches that its workers will read soon. An empty list
        forgets what was begun.
        """
        return self._begin if self._roots else None

    def _begin(self, indices: Sequence[int]) -> None:
        paths = [self.locate(index) for index in indices]
        ends, owner = not len(indices), id(self)
        announce(paths, self._roots, ends=ends, owner=owner, store_at=self._store_of)

    def __len__(self) -> int:
        return len(self.image_paths)

    def _described(self, source: str) -> str:
        part = f", rank {self.rank} of {self.world_size}" if self.partitioned_by_rank else ""
        size = f"{counted(len(self), 'sample')}, {counted(len(self.classes), 'class')}"
        return f"{type(self).__name__}({source!r}: {size}{part})"


class ImageFileList(ImageFiles):
    """The images that a text file lists, one path a line; the class is the parent directory's name.

    Blank lines are skipped, and so is white space around a path. A line may occur more than once.

    Args:
        file_list: the list, in UTF-8 (or the bytes that the file names consist of), or its URL. Its lines may be URLs.
        base_dir: the folder of relative paths in the list, or its URL (default: the folder of the list). Absolute
            paths and URLs stay as they are.
        transform: a plan of `fastload.image`, which decodes, crops and resizes in one call, or any callable, which gets
            an RGB `PIL.Image.Image`. None returns the image.
        target_transform: is applied to the class number.
        classes: the class names in the order of their numbers, or a file with one name a line (default: the
            sorted names in the whole list, on every rank). If the list may lack a class, as for validation, pass the
            `classes` of the training set: otherwise the numbers differ.
        rank, world_size: take only every `world_size`-th path, from number `rank` on.
        store: reads the images, and the list if that is a URL; see `ImageFolder`. Relative paths of a local list then
            begin at the store's top.

    Listed files are not checked for existence: that takes a system call for each.

    Raises:
        FileListError: `base_dir` is not a directory, or the list is missing, empty, not a text file, or shorter than
            the number of ranks. Or a path has no parent directory, or no class of `classes`. It names the line.
        FileNotFoundError: a listed file is missing, when it is read.

    Examples:
        >>> images = fastload.datasets.ImageFileList("train.txt")
        >>> len(images), images.classes
        (4, ['cat', 'dog'])
    """

    fastload_per_worker = ("transform", "target_transform")

    def __init__(
        self,
        file_list: Path,
        *,
        base_dir: Path | None = None,
        transform: Callable[[Any], Any] | None = None,
        target_transform: Callable[[Any], Any] | None = None,
        classes: Sequence[str] | Path | None = None,
        rank: int = 0,
        world_size: int = 1,
        store: Any = None,
    ) -> None:
        self.file_list, reads = os.fspath(file_list), store_from(store)
        beside = is_url(self.file_list) or reads is None  # the list is where the images are
        base = os.path.dirname(self.file_list) if beside else ""
        self.base_dir = base = base if base_dir is None else os.fspath(base_dir)
        if base_dir is not None and not (reads or is_url(base) or os.path.isdir(base)):
            raise FileListError(f"{self.file_list}: base_dir is not a directory: {base}")
        given = None if classes is None else read_classes(classes)
        listed = in_store(self.file_list, reads if beside else None)
        files = read_list(listed, os.fsencode(base), given)
        paths = PathTable(files, rank=rank, world_size=world_size)
        if paths.total < world_size:
            found = f"has {paths.total} paths, too few for {world_size} ranks"
            raise FileListError(
                f"{self.file_list}: the file list {found if paths.total else 'is empty'}"
            )
        names = [os.path.basename(directory.rstrip("/")) for directory in paths.directories]
        super().__init__(
            paths,
            names,
            sorted(set(names)) if given is None else given,
            transform=transform,
            target_transform=target_transform,
            store=reads,
        )

    fill_rows = ImageFiles.fill_rows  # it counts only in the class itself

    def __repr__(self) -> str:
        return self._described(self.file_list)


class ImageFolder(ImageFiles):
    """The images below `root`, one directory per class: a drop-in for torchvision's ImageFolder.

    Classes are the sorted names of the directories in `root`. Files are found in them at any depth, through links too,
    by torchvision's extensions, in any case. They are ordered by class, directory and name: the same samples in the
    same order as torchvision's. List files with other extensions in a text file, for `ImageFileList`.

    Args:
        root: the folder, or its URL, such as "s3://bucket/train". All objects below a URL are listed once: in a process
            group, by the first rank that asks.
        transform: a plan of `fastload.image`, which decodes, crops and resizes in one call, or any callable, which gets
            an RGB `PIL.Image.Image`. None returns the image.
        target_transform: is applied to the class number.
        rank, world_size: take only every `world_size`-th file, from number `rank` on.
        listing: a file, or its URL, that keeps the listing of a URL. If it exists, nothing is listed: images that came
            later are not in the dataset, and one that is gone raises FileNotFoundError when it is read.
        refresh: list anew, and replace `listing`.
        store: lists and reads `root`, which is then a path or URL in it: a `fastload.remote.Store`, or what
            `open_store` takes, such as a file system of fsspec.

    Raises:
        FileNotFoundError: `root` does not exist or has no directory, or a class has no image.
        NotADirectoryError: `root` is a file.
        FileListError: there are fewer images than ranks, or `listing` is damaged, or one of another URL.

    Examples:
        >>> images = fastload.datasets.ImageFolder("images")
        >>> image, label = images[0]
        >>> image.size, images.classes[label]
        ((64, 48), 'cat')
    """

    fastload_per_worker = ("transform", "target_transform")

    def __init__(
        self,
        root: Path,
        *,
        transform: Callable[[Any], Any] | None = None,
        target_transform: Callable[[Any], Any] | None = None,
        rank: int = 0,
        world_size: int = 1,
        listing: Path | None = None,
        refresh: bool = False,
        store: Any = None,
    ) -> None:
        self._listed = ""
        self.root, reads = os.path.expanduser(os.fspath(root)), store_from(store)
        if reads or is_url(self.root):
            self.root = self.root.rstrip("/")
            found = listing_of(in_store(self.root, reads), listing, refresh)
            classes, files = found_at(found)
            kept = "" if listing is None else f" in {listing}. Give refresh=True to list anew"
            self._listed = f"It was listed at {found.at}{kept}"
        elif listing is not None or refresh:
            raise UsageError(
                f"{self.root}: listing and refresh are for URLs. A folder here is walked"
            )
        else:
            classes, files = found_in(self.root)
        paths = PathTable(files, rank=rank, world_size=world_size)
        below = len(os.path.join(self.root, ""))
        names = [directory[below:].partition("/")[0] for directory in paths.directories]
        if not classes or (empty := sorted(set(classes) - set(names))):
            lacking = f"no image of class {', '.join(empty)}" if classes else "no class directory"
            raise FileNotFoundError(
                f"{self.root}: found {lacking}. Expected {self.root}/<class>/<image>, where the name of the image "
                f"ends in {', '.join(EXTENSIONS)}"
            )
        if paths.total < world_size:
            raise FileListError(
                f"{self.root}: {paths.total} images are too few for {world_size} ranks"
            )
        transforms = {"transform": transform, "target_transform": target_transform}
        super().__init__(paths, names, classes, store=reads, **transforms)

    fill_rows = ImageFiles.fill_rows  # it counts only in the class itself

    def load_image(self, index: int) -> tuple[Any, Any]:
        """Return sample `index`, transformed, as `ImageFiles.load_image` does."""
        try:
            return super().load_image(index)
        except FileNotFoundError as error:
            if self._listed:
                error.strerror = f"{error.strerror}. {self._listed}"
            raise

    def __repr__(self) -> str:
        return self._described(self.root)


class _Samples(Lazy[tuple[str, int]]):
    def __init__(self, files: ImageFiles) -> None:
        self._files = files

    def __len__(self) -> int:
        return len(self._files)

    def _at(self, position: int) -> tuple[str, int]:
        return self._files.image_paths[position], int(self._files.targets[position])
