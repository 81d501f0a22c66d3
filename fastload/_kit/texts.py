"""Numbers and sizes as texts."""

from __future__ import annotations


def counted(number: int, one: str, many: str = "") -> str:
    """Return a number with its noun."""
    plural = many or one + ("es" if one.endswith(("s", "ch")) else "s")
    return f"{number:,} {one if number == 1 else plural}"


def size_text(count: float) -> str:
    """Return a number of bytes with its unit."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} TB"
