"""What `remote` reads: the layouts of the same objects, and each library's loader by its own recipe.

An object is a small JPEG, with bytes after its end up to 115 KB, the last of which are its number. So reading costs as
for a photo, and decoding costs nothing beside it. A loader's batches are tensors of numbers. All get the same number of
workers, and shuffle as they do by default or by one argument.
"""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset

import fastload
from fastload.datasets import ImageFileList, PackedDataset, PackedWriter
from fastload.remote import open_store
from fastload.streams import Shards

SIZE, BATCH, WORKERS = 115_000, 64, 8
IN_SHARD = 120
BUCKET = "s3://data"


class Task(NamedTuple):
    """How many objects there are, and an empty folder for lists and caches."""

    count: int
    folder: Path

    @property
    def names(self) -> list[str]:
        """The names of the objects."""
        return [name(number) for number in range(self.count)]

    @property
    def tars(self) -> list[str]:
        """The names of the shards."""
        return [f"tars/{first:06}.tar" for first in range(0, self.count, IN_SHARD)]


def name(number: int) -> str:
    """Return the name of an object."""
    return f"files/{number:06}.jpg"


# ---- what lies in the bucket ----


def encoded(number: int) -> bytes:
    """Return the bytes of an object. The size of its image tells its number too."""
    from PIL import Image

    image = io.BytesIO()
    Image.new("RGB", (16 + number // 64, 16 + number % 64)).save(image, "JPEG")
    return image.getvalue().ljust(SIZE - 8, b"\0") + number.to_bytes(8, "big")


def number_of(content: bytes) -> int:
    """Return the number of an object that was read whole."""
    if len(content) != SIZE:
        raise ValueError(f"an object of {SIZE} bytes came with {len(content)}")
    return int.from_bytes(content[-8:], "big")


def number_of_image(image: Any) -> int:
    """Return the number that the size of an image tells."""
    return int((image.width - 16) * 64 + image.height - 16)


def write(task: Task) -> None:
    """Write all layouts whose libraries are installed into the folder."""
    (task.folder / "files").mkdir()
    (task.folder / "tars").mkdir()
    for number, object_name in enumerate(task.names):
        (task.folder / object_name).write_bytes(encoded(number))
    for k, path in enumerate(task.tars):
        with tarfile.open(task.folder / path, "w") as tar:
            for object_name in task.names[k * IN_SHARD : (k + 1) * IN_SHARD]:
                tar.add(task.folder / object_name, object_name.removeprefix("files/"))
    of_shard = IN_SHARD * SIZE
    with PackedWriter(task.folder / "packed", mode="encoded", shard_bytes=of_shard) as packed:
        for number, object_name in enumerate(task.names):
            packed.add(encoded(number), label=number, source=object_name)
    with suppress(ImportError):
        from streaming import MDSWriter

        path = str(task.folder / "mosaic")
        with MDSWriter(out=path, columns={"jpg": "bytes"}, size_limit=of_shard) as mosaic:
            for number in range(task.count):
                mosaic.write({"jpg": encoded(number)})
    with suppress(ImportError):
        import litdata

        litdata.optimize(
            fn=encoded,
            inputs=[*range(task.count)],
            output_dir=str(task.folder / "litdata"),
            chunk_bytes=of_shard,
            num_workers=1,
        )


def _numbers(samples: Iterable[Any]) -> torch.Tensor:
    """Make a batch of samples that have the bytes of an object at 0 or "jpg"."""
    return torch.tensor([number_of(of["jpg" if isinstance(of, dict) else 0]) for of in samples])


# ---- fastload ----


def _ours(dataset: Any, **arguments: Any) -> Any:
    return fastload.DataLoader(dataset, batch_size=BATCH, num_workers=WORKERS, **arguments)


class Objects(Dataset[int]):
    """A dataset of a user's own, by `open_store`."""

    def __init__(self, count: int) -> None:
        self.count, self.store = count, open_store(BUCKET)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return number_of(self.store.read(name(index)))


class ObjectsAhead(Objects):
    """The same, which hands on what is read soon."""

    def will_read(self, indices: list[int]) -> None:
        """Begin to read these."""
        self.store.will_read(map(name, indices))


def _image_list(task: Task) -> Any:
    path = task.folder / "list.txt"
    path.write_text("".join(f"{BUCKET}/{object_name}\n" for object_name in task.names))
    return _ours(ImageFileList(path, transform=number_of_image), shuffle=True)


def _shards(task: Task) -> Any:
    urls = [f"{BUCKET}/{path}" for path in task.tars]
    return _ours(Shards(urls).map(lambda sample: number_of(sample["jpg"])))


def _packed(task: Task) -> Any:
    dataset = PackedDataset(f"{BUCKET}/packed", decode=False)
    return _ours(dataset, shuffle=True, collate_fn=_numbers)


# ---- the others ----


def _torchs(dataset: Any, **arguments: Any) -> Any:
    return TorchDataLoader(dataset, BATCH, num_workers=WORKERS, **arguments)


class S3Files(Dataset[int]):
    """A dataset by s3fs. Each worker opens a file system of its own: another process's does not survive a fork."""

    def __init__(self, count: int) -> None:
        self.count, self._files = count, None

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        if self._files is None:
            import s3fs

            self._files = s3fs.S3FileSystem()
        return number_of(self._files.cat_file(f"data/{name(index)}"))


def _connector(task: Task) -> Any:
    from s3torchconnector import S3ClientConfig, S3MapDataset

    dataset = S3MapDataset.from_objects(
        [f"{BUCKET}/{object_name}" for object_name in task.names],
        region=os.environ["AWS_REGION"],
        endpoint=os.environ["AWS_ENDPOINT_URL"],
        transform=lambda reader: number_of(reader.read()),
        s3client_config=S3ClientConfig(force_path_style=True),
    )
    return _torchs(dataset, shuffle=True)


def _allow_http() -> None:
    """Let LitData's client read without TLS. It has no option for that."""
    from litdata.streaming import downloader

    downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True


def _litdata_raw(task: Task) -> Any:
    from litdata import StreamingRawDataset

    _allow_http()
    dataset = StreamingRawDataset(
        f"{BUCKET}/files", str(task.folder), transform=number_of, recompute_index=True
    )
    return _torchs(dataset, shuffle=True)


def _litdata(task: Task) -> Any:
    from litdata import StreamingDataLoader, StreamingDataset

    _allow_http()
    dataset = StreamingDataset(
        f"{BUCKET}/litdata", cache_dir=str(task.folder), shuffle=True, transform=number_of
    )
    return StreamingDataLoader(dataset, batch_size=BATCH, num_workers=WORKERS)


def _mosaic(task: Task) -> Any:
    from streaming import StreamingDataset

    dataset = StreamingDataset(
        remote=f"{BUCKET}/mosaic", local=str(task.folder), shuffle=True, batch_size=BATCH
    )
    return _torchs(dataset, collate_fn=_numbers)


def _webdataset(task: Task) -> Any:
    import boto3
    import webdataset

    sign = boto3.client("s3").generate_presigned_url
    urls = [sign("get_object", {"Bucket": "data", "Key": path}) for path in task.tars]
    dataset = webdataset.WebDataset(
        [f"pipe:curl -sS '{url}'" for url in urls], shardshuffle=len(urls), empty_check=False
    )
    numbers = dataset.map(lambda sample: number_of(sample["jpg"]))
    return _torchs(numbers)


class Recipe(NamedTuple):
    """The modules of a library, which are imported before the clock starts, and what makes a loader."""

    modules: str
    make: Callable[[Task], Iterable[Any]]


FILES = {
    "fastload, own dataset": Recipe(
        "obstore", lambda task: _ours(ObjectsAhead(task.count), shuffle=True)
    ),
    "fastload, the same without will_read": Recipe(
        "obstore", lambda task: _ours(Objects(task.count), shuffle=True)
    ),
    "fastload, ImageFileList": Recipe("obstore", _image_list),
    "s3fs": Recipe("s3fs", lambda task: _torchs(S3Files(task.count), shuffle=True)),
    "s3torchconnector": Recipe("s3torchconnector", _connector),
    "LitData, raw": Recipe("litdata s3fs", _litdata_raw),
}
SETS = {
    "fastload, packed": Recipe("obstore", _packed),
    "fastload, tar shards": Recipe("obstore", _shards),
    "WebDataset": Recipe("webdataset boto3", _webdataset),
    "MosaicML Streaming": Recipe("streaming", _mosaic),
    "LitData, chunks": Recipe("litdata", _litdata),
}
