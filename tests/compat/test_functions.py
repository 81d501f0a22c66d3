"""Promises:
- With librosa, soxr, rasterio, shapely, pyproj, SimpleITK, torchcodec, xxhash, orjson and lz4, 8 threads read 1,024
  samples with the values that one thread reads. Functions are called, and files opened, in many samples at a time.
- Processes that are forked after these libraries were used read the same values.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import Dataset

from tests.compat.eight_workers import batches, library

pytestmark = pytest.mark.filterwarnings("ignore")

SAMPLES, FILES = 1_024, 16
Read = Callable[[int], list[Any]]


def wave(index: int, length: int = 2_000) -> np.ndarray[Any, Any]:
    return np.sin(np.arange(length, dtype=np.float32) * (index % 97 + 1) / 90)


def hashes(folder: Path) -> Read:
    xxhash = library("xxhash")

    def read(index: int) -> list[Any]:
        parts = xxhash.xxh64(seed=index)
        for _ in range(3):
            parts.update(wave(index).tobytes())
        return [
            parts.digest(),
            xxhash.xxh3_128_hexdigest(b"%d" % index),
            xxhash.xxh32_digest(b"a" * index),
        ]

    return read


def json(folder: Path) -> Read:
    orjson = library("orjson")

    def read(index: int) -> list[Any]:
        row = {"n": wave(index, 50), f"key {index}": [str(k) * (index % 7) for k in range(50)]}
        text = orjson.dumps(row, option=orjson.OPT_SERIALIZE_NUMPY)
        return [text, repr(orjson.loads(text))]

    return read


def compressed(folder: Path) -> Read:
    library("lz4")
    frame, block = library("lz4.frame"), library("lz4.block")
    for k in range(FILES):
        with frame.open(folder / f"{k}.lz4", "wb") as file:
            file.write(wave(k).tobytes())

    def read(index: int) -> list[Any]:
        with frame.open(folder / f"{index % FILES}.lz4") as file:
            data = file.read()
        again = frame.LZ4FrameDecompressor().decompress(frame.compress(data * (index % 3 + 1)))
        return [data, again, block.decompress(block.compress(wave(index).tobytes()))]

    return read


def sounds(folder: Path) -> Read:
    librosa, soundfile = library("librosa"), library("soundfile")
    for k in range(FILES):
        soundfile.write(folder / f"{k}.wav", wave(k), 8_000)

    def read(index: int) -> list[Any]:
        y, sr = librosa.load(folder / f"{index % FILES}.wav", sr=4_000)
        mel = librosa.feature.melspectrogram(y=y, sr=sr, n_fft=256, n_mels=16)
        mfcc = librosa.feature.mfcc(S=librosa.power_to_db(mel), n_mfcc=8)
        crossings = librosa.feature.zero_crossing_rate(y)
        onset = librosa.onset.onset_strength(y=y, sr=sr, n_fft=256)
        trimmed, _ = librosa.effects.trim(y, frame_length=256)
        return [y, mel, mfcc, crossings, onset, trimmed]

    return read


def resampled(folder: Path) -> Read:
    soxr = library("soxr")

    def read(index: int) -> list[Any]:
        stream = soxr.ResampleStream(8_000, 6_000, 1, dtype="float32")
        whole = soxr.resample(wave(index), 8_000, 3_000 + index % 11)
        return [whole, stream.resample_chunk(wave(index), last=True)]

    return read


def rasters(folder: Path) -> Read:
    rasterio, warp = library("rasterio"), library("rasterio.warp")
    vrt, windows = library("rasterio.vrt"), library("rasterio.windows")
    origin = rasterio.transform.from_origin(500_000, 5_000_000, 10, 10)
    options = {"driver": "GTiff", "dtype": "uint16", "crs": "EPSG:32633", "compress": "deflate"}
    for k in range(FILES):
        path, size = folder / f"{k}.tif", {"height": 64, "width": 64, "count": 3}
        with rasterio.open(path, "w", transform=origin, **size, **options) as target:
            values = np.arange(3 * 64 * 64).reshape(3, 64, 64) * (k + 1) % 997
            target.write(values.astype(np.uint16))

    def read(index: int) -> list[Any]:
        path = folder / f"{index % FILES}.tif"
        with rasterio.Env(GDAL_CACHEMAX=16), rasterio.open(path) as source:
            window = source.read(window=windows.Window(index % 20, index % 13, 32, 32))
            small = source.read(1, out_shape=(20, 20))
            bounds = warp.transform_bounds(source.crs, "EPSG:4326", *source.bounds)
            with vrt.WarpedVRT(source, crs="EPSG:3857") as warped:
                return [window, small, repr(bounds), warped.read(1), str(source.crs)]

    return read


def polygons(folder: Path) -> Read:
    """Use geometries and a tree that all threads share."""
    shapely = library("shapely")
    circles = shapely.buffer(shapely.points(np.arange(40), np.arange(40) * 7 % 13), 5)
    whole, tree = shapely.union_all(circles), shapely.STRtree(circles)

    def read(index: int) -> list[Any]:
        window = shapely.box(index % 20, index % 7, index % 20 + 6, index % 7 + 5)
        shapely.prepare(circles[index % 40])
        found = sorted(tree.query(window).tolist())
        inside = shapely.contains_xy(circles[index % 40], np.arange(30), np.arange(30) / 3)
        cut = shapely.intersection(circles, window)
        united = shapely.union_all(cut[index % 10 : index % 10 + 9])
        parts = [whole.intersection(window), united, shapely.from_wkt(window.wkt)]
        return [repr(found), inside, *shapely.to_wkb(parts), repr(shapely.area(cut).tolist())]

    return read


def points(folder: Path) -> Read:
    """Use transformers and systems of coordinates that all threads share."""
    pyproj = library("pyproj")
    shared = pyproj.Transformer.from_crs("EPSG:4326", "EPSG:32633", always_xy=True)
    geod, crs, proj = pyproj.Geod(ellps="WGS84"), pyproj.CRS(3857), pyproj.Proj("EPSG:32633")

    def read(index: int) -> list[Any]:
        x, y = np.linspace(10, 15, 50) + index / 1e4, np.linspace(40, 50, 50)
        own = pyproj.Transformer.from_crs(4326, 32_601 + index % 20, always_xy=True)
        bounds, name = shared.transform_bounds(10, 40, 11, 41), pyproj.CRS(32_601 + index % 60).name
        told = repr((bounds, name, crs.to_wkt(), crs.axis_info, geod.line_length(x, y)))
        return [*shared.transform(x, y), *own.transform(x - 190, y), *proj(x, y), told]

    return read


def volumes(folder: Path) -> Read:
    sitk = library("SimpleITK")
    for k in range(FILES):
        image = sitk.GetImageFromArray(np.float32(np.arange(3_072).reshape(12, 16, 16) * k % 251))
        sitk.WriteImage(image, str(folder / f"{k}.nii.gz"))

    def read(index: int) -> list[Any]:
        image = sitk.ReadImage(str(folder / f"{index % FILES}.nii.gz"))
        filter, transform = sitk.ResampleImageFilter(), sitk.Euler3DTransform()
        transform.SetRotation(index % 9 / 100, 0, 0.1)
        filter.SetReferenceImage(image)
        filter.SetTransform(transform)
        parts = sitk.ConnectedComponent(sitk.OtsuThreshold(image, 0, 1))
        made = [image, filter.Execute(image), sitk.DiscreteGaussian(image, 1.0), parts]
        return [*map(sitk.GetArrayFromImage, made), repr(image.GetSpacing())]

    return read


def films(folder: Path) -> Read:
    av = library("av")
    decoders = library("torchcodec.decoders")
    path = str(folder / "film.mp4")
    with av.open(path, "w") as film:
        stream = film.add_stream("mpeg4", rate=25)
        stream.width = stream.height = 64
        stream.pix_fmt, stream.gop_size = "yuv420p", 5
        for k in range(48):
            pixels = np.full((64, 64, 3), k * 5, np.uint8)
            film.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        film.mux(stream.encode())

    def read(index: int) -> list[Any]:
        decoder = decoders.VideoDecoder(path, seek_mode=("exact", "approximate")[index % 2])
        several = decoder.get_frames_at([index % 48, index * 7 % 48]).data
        return [decoder[index % 48].numpy(), several.numpy(), repr(decoder.metadata.num_frames)]

    try:
        read(0)
    except RuntimeError as error:  # it finds no FFmpeg
        pytest.skip(str(error).splitlines()[0])
    return read


LIBRARIES = {
    "xxhash": hashes,
    "orjson": json,
    "lz4": compressed,
    "librosa": sounds,
    "soxr": resampled,
    "rasterio": rasters,
    "shapely": polygons,
    "pyproj": points,
    "SimpleITK": volumes,
    "torchcodec": films,
}


class Digests(Dataset[Any]):
    """Each sample is a digest of all values that were read."""

    def __init__(self, read: Read, length: int = SAMPLES) -> None:
        self.read, self.length = read, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> str:
        digest = hashlib.sha256()
        for part in self.read(index):
            is_array = isinstance(part, np.ndarray)
            digest.update(part.tobytes() if is_array else repr(part).encode())
        return digest.hexdigest()


def read_by(dataset: Digests, kind: str, **options: Any) -> list[str]:
    return [each for batch in batches(dataset, worker_method=kind, **options) for each in batch]


EACH = pytest.mark.parametrize("name", LIBRARIES)


@EACH
def test_threads_read_what_one_thread_reads(name: str, tmp_path: Path) -> None:
    """Threads are first: they compile, load and fill what a library keeps."""
    dataset = Digests(LIBRARIES[name](tmp_path))
    found = read_by(dataset, "thread")
    assert found == [dataset[index] for index in range(SAMPLES)]
    assert len(set(found)) >= FILES


@EACH
def test_forked_processes_read_it_after_it_was_used(name: str, tmp_path: Path) -> None:
    dataset = Digests(LIBRARIES[name](tmp_path), 64)
    wanted = [dataset[index] for index in range(64)]
    assert read_by(dataset, "process", num_workers=2, batch_size=8) == wanted
