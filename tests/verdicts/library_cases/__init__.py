"""Datasets as users of other libraries write them, each with the kind of workers that is known to be right for it.

Each library has a module here, which imports it at the top, as a user's own module does. A maker takes a folder in
which it may write files, and returns a new dataset. No sample of it has been read.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple


class Made(NamedTuple):
    """What a maker returns: arguments of a loader. `sampler` is None if samples come in the dataset's own order."""

    dataset: Any
    collate_fn: Callable[[Any], Any] | None = None
    sampler: Iterable[int] | None = None


@dataclass(frozen=True)
class Case:
    """A dataset of a library.

    Args:
        name: what it shows; also the name of its maker.
        module: the module of this package that has the maker.
        libraries: what must be installed.
        reason: if processes should read it, a part of the verdict's reason.
    """

    name: str
    module: str
    libraries: tuple[str, ...]
    reason: str = ""

    @property
    def expected(self) -> str:
        """The kind of workers that the verdict should name."""
        return "process" if self.reason else "thread"

    def make(self, folder: Path) -> Made:
        """Return a new dataset, whose files lie in `folder`."""
        maker = getattr(importlib.import_module(f"{__name__}.{self.module}"), self.name)
        made: Made = maker(folder)
        return made


_TABLE = """
    hugging_face     torch_format                      datasets
    hugging_face     with_transform                    datasets torchvision
    hugging_face     set_transform                     datasets tokenizers transformers
    hugging_face     wrapped                           datasets
    hugging_face     streamed                          datasets
    hugging_face     interleaved                       datasets
    hugging_face     concatenated                      datasets
    hugging_face     decoded_images                    datasets PIL torchvision
    hugging_face     sound_bytes                       datasets soundfile
    trainers         padding_collator                  transformers datasets accelerate
    trainers         default_collator                  transformers
    trainers         lightning_module                  lightning torchvision PIL
    tokenized        word_level                        tokenizers
    timm_images      imagenet_recipe                   timm torchvision PIL
    monai_volumes    dictionaries                      monai | hold the GIL
    torchio_subjects subjects                          torchio
    pyg_graphs       graphs                            torch_geometric
    albumentations_images masks                        albumentations
    kornia_images    augmented                         kornia
    sounds           wav_files                         soundfile
    torchaudio_waves spectrograms                      torchaudio
    films            clips                             av
    shards           tar_shards                        webdataset
    pandas_rows      frame                             pandas
    polars_rows      frame                             polars
    arrow_rows       table                             pyarrow
    zarr_arrays      array                             zarr
    hdf5_files       opened_lazily                     h5py
    hdf5_files       opened_each_time                  h5py
    lmdb_values      opened_lazily                     lmdb PIL | lmdb.Environment
    sqlite_rows      opened_each_time                  sqlite3
    sampled          weighted                          torch
    sampled          own_sampler                       torch
    detection        detection_dicts                   torchvision PIL
    detection        voc                               torchvision PIL
    vision           two_views                         torchvision PIL
    vision           fake_data                         torchvision PIL
    vision           image_folder                      torchvision PIL
    vision           cifar_like                        torchvision PIL
    skimage_images   warped                            skimage
    sklearn_rows     scaled                            sklearn
    scipy_images     rotated                           scipy
    opencv_images    read_and_resized                  cv2
    imageio_images   read                              imageio
    numba_code       compiled                          numba
    zstandard_blocks decompressed                      zstandard
    librosa_sounds   mel_spectrograms                  librosa soundfile
    rasterio_tiles   opened_each_time                  rasterio
    shapely_polygons overlaps                          shapely
    pyproj_points    projected                         pyproj
    simpleitk_volumes resampled                        SimpleITK
    simpleitk_volumes held                             SimpleITK | is for one thread
    torchcodec_films frames                            torchcodec av
    packed_records   records                           orjson xxhash lz4
    soxr_streams     resampled                         soxr
    soxr_streams     held                              soxr | ResampleStream, which is for one thread
    netcdf_fields    opened_each_time                  netCDF4 | netCDF4
    netcdf_fields    held                              netCDF4 | netCDF4
    own_sets         image_files                       PIL
    own_sets         file_list_with_torchvision        torchvision PIL
    own_sets         packed                            pyarrow PIL
    own_sets         parquet                           pyarrow
    own_sets         mnist                             torch
    own_sets         set_of_columns                    pyarrow
    own_sets         tensors                           torch
    yolo_images      yolo                              ultralytics cv2 | dataset.ims
"""
"""Module, maker and libraries. After a bar: what the reason for processes says.

ultralytics is the last, because its import puts a function of its own in the place of `PIL.Image.open`.
"""


def _case(line: str) -> Case:
    words, _, reason = line.partition(" | ")
    module, name, *libraries = words.split()
    return Case(name, module, tuple(libraries), reason)


CASES = [_case(line) for line in _TABLE.strip().splitlines()]
