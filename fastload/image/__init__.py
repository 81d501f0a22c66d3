"""Encoded bytes to pixels and back: decoders, and plans that crop, resize and flip in one step.

This needs the extra `images`. Nothing else in fastload imports Pillow.
"""

from typing import TYPE_CHECKING, Any

from fastload.errors import needs

try:
    import PIL  # noqa: F401
except ModuleNotFoundError as error:
    raise needs("fastload.image", "Pillow", "images", error) from error

if TYPE_CHECKING:
    from fastload.image.decode import decode_pixels, open_rgb
    from fastload.image.encode import encode_jpeg, encode_rgb
    from fastload.image.normalize import IMAGENET_MEAN, IMAGENET_STD, normalize_on
    from fastload.image.plans import (
        Plan,
        RandomResizedCrop,
        Resize,
        ResizeCenterCrop,
        is_known_plan,
        open_image,
    )
    from fastload.image.regions import Box, Region

__all__ = [
    "IMAGENET_MEAN",
    "IMAGENET_STD",
    "Box",
    "Plan",
    "RandomResizedCrop",
    "Region",
    "Resize",
    "ResizeCenterCrop",
    "decode_pixels",
    "encode_jpeg",
    "encode_rgb",
    "is_known_plan",
    "normalize_on",
    "open_image",
    "open_rgb",
]


if not TYPE_CHECKING:  # one that sees it takes each name for one that exists

    def __getattr__(name: str) -> Any:
        """Load a public name at its first use: `fastload env` needs no torch to say which kernels there are."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from fastload.image import decode, encode, normalize, plans, regions

        homes = (decode, encode, normalize, plans, regions)
        return next(vars(home)[name] for home in homes if name in vars(home))


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
