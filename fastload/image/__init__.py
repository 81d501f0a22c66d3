"""Encoded bytes to pixels and back. Needs the extra `images`; nothing else in fastload imports Pillow."""

try:
    import PIL  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "fastload reads and writes pictures with Pillow, which is not installed: "
        'pip install "fastload[images]"',
        name=error.name,
    ) from error
