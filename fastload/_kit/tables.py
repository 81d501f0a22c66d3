"""Tables of text."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def columns(
    lines: Sequence[Sequence[str]], *, left: Collection[int] = (0,), rule: bool = True
) -> list[str]:
    """Return lines of cells as lines of text, with a rule after the first. Columns in `left` are aligned left."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rules = [["-" * width for width in widths]] if rule else []
    return [
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in (lines[0], *rules, *lines[1:])
    ]
