"""Promises:
- A plan has torchvision's defaults. The same random numbers give the same boxes and flips as torchvision v1 and v2,
  and leave the same random state.
- Sizes and center crops are torchvision's too, padding included.
- Pixels are as near to torchvision's as the module states: photographs and noise, tiny and narrow images, any memory
  layout.
- Decoding at a smaller scale happens only if enough pixels are left over.
- float32, channels-last memory and `normalize_on` equal ToTensor and Normalize. Results share memory with no other
  object.
- A plan is a value, and a bad argument is named.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import io
import math
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st
from PIL import Image
from torchvision import transforms as v1
from torchvision.transforms import v2

from fastload.errors import DecodeError
from fastload.image import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    Box,
    Plan,
    RandomResizedCrop,
    Region,
    Resize,
    ResizeCenterCrop,
    decode_pixels,
    normalize_on,
)
from tests.image.photographs import Pixels, encoded, photographs

# What the module's docstring states, of 255.
FARTHEST = 3
MEAN = 0.5
MEAN_SCALED, MEAN_SCALED_CROP = 5.0, 8.0

SIDES = st.one_of(st.integers(1, 64), st.integers(1, 4000))
NOISE: Pixels = np.random.default_rng(0).integers(0, 256, (211, 307, 3), dtype=np.uint8)
IMAGES = [*photographs(), "noise"]
VERSIONS = pytest.mark.parametrize("theirs", [v1, v2], ids=["v1", "v2"])


def sample_image(name: str) -> Pixels:
    return NOISE if name == "noise" else photographs()[name]


def apart(ours: torch.Tensor, theirs: torch.Tensor) -> tuple[int, float]:
    """The largest and the mean distance of two uint8[3, H, W]."""
    assert ours.dtype == theirs.dtype == torch.uint8
    assert ours.shape == theirs.shape
    difference = (ours.int() - theirs.int()).abs()
    return int(difference.max()), float(difference.float().mean())


def pil_result(transform: Callable[[Any], Any], pixels: Any) -> torch.Tensor:
    """What torchvision's transform makes of a PIL image, as uint8[3, H, W]."""
    source = Image.fromarray(pixels) if isinstance(pixels, np.ndarray) else pixels
    return v1.functional.pil_to_tensor(transform(source))


# ---- boxes ----


@VERSIONS
def test_the_defaults_are_torchvisions(theirs: Any) -> None:
    ours = inspect.signature(RandomResizedCrop).parameters
    for name, parameter in inspect.signature(theirs.RandomResizedCrop).parameters.items():
        if name in ours:
            assert ours[name].default == parameter.default or name == "size", name
    assert {"size", "scale", "ratio"} <= set(ours)
    assert (RandomResizedCrop(8).scale, RandomResizedCrop(8).ratio) == ((0.08, 1.0), (3 / 4, 4 / 3))


@VERSIONS
@given(
    SIDES,
    SIDES,
    st.integers(0, 2**40),
    st.sampled_from([(0.08, 1.0), (0.5, 0.5), (1e-4, 2e-4), (0.9, 3.0)]),
    st.sampled_from([(3 / 4, 4 / 3), (1.0, 1.0), (0.1, 0.2), (7.0, 9.0)]),
    st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    st.booleans(),
)
def test_the_same_random_numbers_give_torchvisions_boxes_and_flips(
    theirs: Any,
    height: int,
    width: int,
    seed: int,
    scale: tuple[float, float],
    ratio: tuple[float, float],
    flip: float,
    own: bool,
) -> None:
    torch.manual_seed(seed)
    shape = torch.empty(3, height, width, device="meta")
    if theirs is v1:
        box = v1.RandomResizedCrop.get_params(shape, list(scale), list(ratio))
    else:
        crop = v2.RandomResizedCrop(224, scale, ratio)
        # Renamed when torchvision 0.21 made it public.
        params = (getattr(crop, "make_params", None) or crop._get_params)([shape])
        box = tuple(params[key] for key in ("top", "left", "height", "width"))
    mirrored = False
    if flip > 0:
        pair = theirs.RandomHorizontalFlip(flip)(torch.tensor([[[0, 1]]]))
        mirrored = pair.flatten().tolist() == [1, 0]
    after = torch.get_rng_state()

    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed) if own else None
    region = RandomResizedCrop(224, scale, ratio, flip).region(height, width, generator)
    if min(box[2:]) == 0:  # of which torchvision makes an error, and we a pixel
        assert 1 in region.box[2:]
        box = region.box
    assert region == Region(Box(*box), (224, 224), None, mirrored)
    assert torch.equal(after, generator.get_state() if generator else torch.get_rng_state())


@VERSIONS
@given(SIDES, SIDES, st.one_of(st.integers(1, 600), st.tuples(st.integers(1, 99), SIDES)))
@example(1, 1, 224)
@example(333, 500, 256)
@example(500, 333, 256)
def test_resize_has_torchvisions_sizes(
    theirs: Any, height: int, width: int, size: int | tuple[int, int]
) -> None:
    shape = torch.empty(3, height, width, device="meta")
    resized = theirs.functional.resize(shape, [size] if isinstance(size, int) else list(size))
    assume(resized[0].numel() <= 2 * Image.MAX_IMAGE_PIXELS)  # more are refused
    region = Resize(size).region(height, width)
    assert region == Region(Box(0, 0, height, width), tuple(resized.shape[1:]))


SMALL = st.integers(1, 24)


@VERSIONS
@given(SMALL, SMALL, SMALL, SMALL)
@example(5, 5, 8, 8)
@example(5, 8, 8, 5)
def test_the_centre_is_cut_or_padded_as_by_torchvision_to_the_bit(
    theirs: Any, height: int, width: int, rows: int, columns: int
) -> None:
    pixels = np.arange(1, height * width * 3 + 1, dtype=np.int64).reshape(height, width, 3) % 251
    pixels = (pixels + 1).astype(np.uint8)  # no black but the padding
    plan = ResizeCenterCrop((height, width), (rows, columns))
    centre = theirs.CenterCrop((rows, columns))
    assert torch.equal(plan(pixels), pil_result(centre, pixels))


# ---- pixels ----

PAIRS: dict[str, tuple[Plan, Callable[[Any], Any]]] = {
    "crop": (RandomResizedCrop(64), v1.RandomResizedCrop(64)),
    "crop and flip": (
        RandomResizedCrop((48, 80), flip=0.5),
        v1.Compose([v1.RandomResizedCrop((48, 80)), v1.RandomHorizontalFlip()]),
    ),
    "crop and flip, v2": (
        RandomResizedCrop(224, flip=0.5),
        v2.Compose([v2.RandomResizedCrop(224), v2.RandomHorizontalFlip()]),
    ),
    "resize both sides": (Resize((96, 56)), v1.Resize((96, 56))),
    "resize the shorter side": (Resize(101), v1.Resize(101)),
    "enlarge": (Resize((520, 460)), v1.Resize((520, 460))),
    "validation": (ResizeCenterCrop(256, 224), v1.Compose([v1.Resize(256), v1.CenterCrop(224)])),
    "validation, odd": (
        ResizeCenterCrop(33, (27, 70)),
        v1.Compose([v1.Resize(33), v1.CenterCrop((27, 70))]),
    ),
}


@pytest.mark.parametrize("name", IMAGES)
@pytest.mark.parametrize("pair", PAIRS)
def test_pixels_of_a_decoded_image_are_as_near_as_stated(pair: str, name: str) -> None:
    plan, theirs = PAIRS[pair]
    distances = []
    for seed in range(2):
        torch.manual_seed(seed)
        expected = pil_result(theirs, sample_image(name))
        torch.manual_seed(seed)
        distances.append(apart(plan(Image.fromarray(sample_image(name))), expected))
    farthest, mean = (max(values) for values in zip(*distances, strict=True))
    assert farthest <= FARTHEST
    assert mean < MEAN


@pytest.mark.parametrize("name", [name for name in IMAGES if name != "noise"])
@pytest.mark.parametrize("pair", PAIRS)
def test_pixels_of_a_jpeg_are_as_near_as_stated(pair: str, name: str) -> None:
    plan, theirs = PAIRS[pair]
    jpeg = encoded(sample_image(name), quality=90)
    by_pillow = Image.open(io.BytesIO(jpeg)).convert("RGB")
    scaled_means = []
    for seed in range(2 if isinstance(plan, RandomResizedCrop) else 1):
        torch.manual_seed(seed)
        expected = pil_result(theirs, by_pillow)
        torch.manual_seed(seed)
        whole = dataclasses.replace(plan, scaled_decode=False).decode(jpeg, name=name)
        torch.manual_seed(seed)
        scaled_means.append(apart(plan.decode(jpeg, name=name), expected)[1])
        farthest, mean = apart(whole, expected)
        assert farthest <= FARTHEST
        assert mean < MEAN
    assert max(scaled_means) <= MEAN_SCALED_CROP
    assert np.mean(scaled_means) <= MEAN_SCALED


def test_scaled_decoding_is_used_where_pixels_are_left_over_and_nowhere_else() -> None:
    photograph = next(iter(photographs().values()))
    height, width = photograph.shape[:2]
    jpeg, png = encoded(photograph, quality=90), encoded(photograph, "PNG", compress_level=1)
    for size, content, same in (
        ((height // 4, width // 4), jpeg, False),
        ((height * 2 // 3, width * 2 // 3), jpeg, True),  # 7/8, 6/8 ... take longer than all of it
        ((height + 1, width + 1), jpeg, True),
        ((height // 4, width), jpeg, True),
        ((height // 4, width // 4), png, True),
    ):
        scaled = Resize(size).decode(content, name="a")
        whole = Resize(size, scaled_decode=False).decode(content, name="a")
        assert torch.equal(scaled, whole) == same, size


# ---- types and memory ----

NORMALIZED = {"mean": IMAGENET_MEAN, "std": IMAGENET_STD}


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize(
    "plan",
    [RandomResizedCrop(40, flip=0.5), Resize((31, 67)), Resize((211, 307)), ResizeCenterCrop(9, 8)],
)
def test_mean_and_std_are_totensor_and_normalize(plan: Plan, channels_last: bool) -> None:
    results = []
    for options in ({}, {"channels_last": channels_last}, NORMALIZED):
        torch.manual_seed(3)
        options = {"channels_last": channels_last} | options if options else {}
        results.append(dataclasses.replace(plan, **options)(NOISE))
    plain, as_bytes, floats = results
    assert torch.equal(plain, as_bytes)
    recipe = v1.Compose([v1.ToTensor(), v1.Normalize(IMAGENET_MEAN, IMAGENET_STD)])
    expected = recipe(np.ascontiguousarray(plain.permute(1, 2, 0).numpy()))
    assert floats.dtype == torch.float32
    assert floats.shape == expected.shape
    assert (floats - expected).abs().max() <= 1e-6
    for result in (as_bytes, floats):
        assert result.permute(1, 2, 0).is_contiguous() == channels_last
        assert result.is_contiguous() != channels_last


@pytest.mark.parametrize(
    "plan", [Resize((16, 24)), Resize((64, 96)), ResizeCenterCrop((64, 96), 100)]
)
def test_a_result_shares_no_memory_with_what_it_came_from(plan: Plan) -> None:
    source = NOISE[:64, :96].copy()
    before = source.copy()
    result = plan(source)
    kept = result.clone()
    assert np.array_equal(source, before)  # and nothing is done in place
    source[:] = 0
    assert torch.equal(result, kept)


def read_only(pixels: Pixels) -> Pixels:
    pixels = pixels.copy()
    pixels.flags.writeable = False
    return pixels


LAYOUTS: dict[str, Callable[[Pixels], Any]] = {
    "read-only": read_only,
    "every second pixel": lambda p: np.repeat(np.repeat(p, 2, 0), 2, 1)[::2, ::2],
    "backwards": lambda p: p[::-1, ::-1].copy()[::-1, ::-1],
    "channels first in memory": lambda p: p.transpose(2, 0, 1).copy().transpose(1, 2, 0),
    "Fortran order": np.asfortranarray,
    "with alpha behind": lambda p: np.concatenate([p, p[..., :1]], axis=2)[..., :3],
    "an image": Image.fromarray,
    "an image with alpha": lambda p: Image.fromarray(p).convert("RGBA"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "plan", [Resize((50, 70)), Resize((211, 307)), RandomResizedCrop(64, flip=1.0)]
)
def test_the_memory_of_an_array_does_not_matter(plan: Plan, layout: str) -> None:
    torch.manual_seed(5)
    expected = plan(NOISE)
    torch.manual_seed(5)
    assert torch.equal(plan(LAYOUTS[layout](NOISE)), expected)


@pytest.mark.parametrize("shape", [(1, 1), (1, 300), (300, 1), (2, 3), (7, 6000), (6000, 7)])
@pytest.mark.parametrize("pair", ["crop and flip", "resize both sides", "validation, odd"])
def test_tiny_and_narrow_images_are_as_with_torchvision(pair: str, shape: tuple[int, int]) -> None:
    plan, theirs = PAIRS[pair]
    pixels = np.random.default_rng(1).integers(0, 256, (*shape, 3), dtype=np.uint8)
    png = encoded(pixels, "PNG", compress_level=1)
    results = []
    for make in (
        lambda: pil_result(theirs, pixels),
        lambda: plan(pixels),
        lambda: plan.decode(png, name="a"),
    ):
        torch.manual_seed(6)
        results.append(make())
    expected, of_array, of_file = results
    assert torch.equal(of_array, of_file)
    farthest, mean = apart(of_array, expected)
    assert farthest <= FARTHEST
    assert mean < MEAN


# ---- values ----

VALUES: list[tuple[Callable[[], Plan], Callable[[], Plan]]] = [
    (
        lambda: RandomResizedCrop([8, 9], [0.1, 1], [1, 2], mean=[0, 0, 0], std=[1, 1, 1]),
        lambda: RandomResizedCrop((9, 8), (0.1, 1), (1, 2), mean=(0, 0, 0), std=(1, 1, 1)),
    ),
    (lambda: Resize(np.int64(8)), lambda: Resize((8, 8))),
    (lambda: ResizeCenterCrop(9, 8), lambda: ResizeCenterCrop(9, 8, channels_last=True)),
]


@pytest.mark.parametrize(("make", "make_other"), VALUES)
def test_a_plan_is_a_value(make: Callable[[], Plan], make_other: Callable[[], Plan]) -> None:
    plan, other = make(), make_other()
    assert plan == make()
    assert hash(plan) == hash(make())
    assert plan != other
    assert len({plan, make(), other}) == 2
    assert pickle.loads(pickle.dumps(plan)) == plan
    assert copy.deepcopy(plan) == plan
    assert eval(repr(plan)) == plan
    for field in dataclasses.fields(plan):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(plan, field.name, None)


BAD_ARGUMENTS: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: Plan(), TypeError, "abstract"),
    (lambda: RandomResizedCrop(0), ValueError, "size must be .*got 0"),
    (lambda: Resize((1, 2, 3)), ValueError, "size must be .*got \\(1, 2, 3\\)"),
    (lambda: Resize(2.5), ValueError, "size must be .*got 2.5"),
    (lambda: Resize(True), ValueError, "size must be .*got True"),
    (lambda: ResizeCenterCrop(0, 8), ValueError, "resize must be .*got 0"),
    (lambda: ResizeCenterCrop(8, (8, 0)), ValueError, "crop must be .*got \\(8, 0\\)"),
    (lambda: RandomResizedCrop(8, scale=0.5), ValueError, "scale must be .*got 0.5"),
    (lambda: RandomResizedCrop(8, scale=(1, 0.5)), ValueError, "scale must be .*from <= to"),
    (lambda: RandomResizedCrop(8, ratio=(1, math.inf)), ValueError, "ratio must be .*inf"),
    (lambda: RandomResizedCrop(8, ratio=("a", "b")), ValueError, "ratio must be"),
    (lambda: RandomResizedCrop(8, flip=1.5), ValueError, "flip must be .*got 1.5"),
    (lambda: RandomResizedCrop(8, flip=math.nan), ValueError, "flip must be .*nan"),
    (lambda: Resize(8, mean=(0, 0, 0)), ValueError, "give both mean and std"),
    (lambda: Resize(8, mean=0.5, std=0.5), ValueError, "mean must be .*got 0.5"),
    (lambda: Resize(8, mean=(0, 0), std=(1, 1)), ValueError, "mean must be 3"),
    (lambda: Resize(8, mean=(0, 0, 0), std=(1, 1, 0)), ValueError, "std must be above 0"),
    (lambda: Resize(8)(np.zeros((4, 4), np.uint8)), ValueError, "uint8\\[H, W, 3\\].*\\[4, 4\\]"),
    (lambda: Resize(8)(np.zeros((3, 4, 5), np.uint8)), ValueError, "got uint8 \\[3, 4, 5\\]"),
    (lambda: Resize(8)(np.zeros((4, 4, 3), np.float32)), ValueError, "got float32"),
    (lambda: Resize(8)(np.zeros((0, 4, 3), np.uint8)), ValueError, "got uint8 \\[0, 4, 3\\]"),
    (lambda: Resize(8)(torch.zeros(3, 4, 4)), TypeError, "PIL image .*got Tensor"),
    (lambda: Resize(8)(Image.new("F", (4, 4))), ValueError, "floating-point"),
    (lambda: decode_pixels(b"x", name="a", max_size=0), ValueError, "max_size must be"),
    (lambda: normalize_on("cpu", std=(1, 1, 0)), ValueError, "std must be"),
    (lambda: normalize_on("cpu")(torch.zeros(2, 3, 4, 4)), ValueError, "expected uint8.*float32"),
    (lambda: normalize_on("cpu")(BATCH[:, :2]), ValueError, "got torch.uint8 \\[2, 2, 64, 96\\]"),
]


@pytest.mark.parametrize(("make", "error", "message"), BAD_ARGUMENTS)
def test_a_bad_argument_is_named(
    make: Callable[[], object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        make()
    assert not isinstance(caught.value, DecodeError)


# ---- decode_pixels, normalize_on ----


BATCH = torch.from_numpy(NOISE[:64, :96].copy()).permute(2, 0, 1).contiguous().expand(2, 3, 64, 96)


@pytest.mark.parametrize("channels_last", [False, True])
def test_normalize_on_is_totensor_and_normalize_of_a_batch(channels_last: bool) -> None:
    batch = torch.stack([BATCH[0], 255 - BATCH[1]])
    before = batch.clone()
    result = normalize_on("cpu", channels_last=channels_last)(batch)
    recipe = v1.Compose([v1.ToTensor(), v1.Normalize(IMAGENET_MEAN, IMAGENET_STD)])
    expected = torch.stack([recipe(image.permute(1, 2, 0).numpy()) for image in batch])
    assert result.dtype == torch.float32
    assert (result - expected).abs().max() <= 1e-6
    memory = torch.channels_last if channels_last else torch.contiguous_format
    assert result.is_contiguous(memory_format=memory)
    assert torch.equal(batch, before)
    kept = normalize_on("cpu")(batch.contiguous(memory_format=memory))
    assert kept.is_contiguous(memory_format=memory)
    assert torch.equal(result, kept)
