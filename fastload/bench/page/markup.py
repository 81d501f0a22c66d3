"""HTML and SVG from Python values. Text is escaped unless it is markup already."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence


class Markup(str):
    """Text that is HTML already, made by `element` and `join`. A plain string in its place is escaped."""

    __slots__ = ()


UNKNOWN = "n/a"
"""Text for a missing figure."""
Child = str | int | None
_VOID = {"meta", "br", "hr"}


def element(name: str, /, *children: Child, **attributes: str | int | float | None) -> Markup:
    """Return `<name attributes>children</name>`. Leave out children and attributes that are None.

    In attribute names, a trailing underscore is dropped, and others become dashes: `class_`, `aria_label`. Names in
    camel case are kept, because SVG needs them. Floats are coordinates, so they get at most two decimals.
    """
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(_text(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in _VOID:
        return Markup(f"<{name}{written}>")
    return Markup(f"<{name}{written}>{join(children)}</{name}>")


def join(children: Iterable[Child]) -> Markup:
    """Join the children, without None. Escape text."""
    return Markup(
        "".join(
            child if isinstance(child, Markup) else html.escape(str(child))
            for child in children
            if child is not None
        )
    )


def _text(value: str | int | float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


# ---- what a page is made of ----


def section(title: str, *children: Child, id_: str) -> Markup:
    """Return a section of the page with a heading."""
    return element("section", element("h2", title, id=id_), *children, aria_labelledby=id_)


def note(*text: Child) -> Markup:
    """Return a paragraph in small print."""
    return element("p", *text, class_="note")


def definitions(entries: Iterable[tuple[str, Child]]) -> Markup:
    """Return a list of names and their values."""
    return element(
        "dl",
        *(part for name, value in entries for part in (element("dt", name), element("dd", value))),
    )


def grid(caption: str, titles: Sequence[str], lines: Sequence[Sequence[Child]]) -> Markup:
    """Return a table that scrolls sideways on a narrow screen. The first cell of a line is its name."""
    head = element("tr", *(element("th", title, scope="col") for title in titles))
    body = (
        element(
            "tr", element("th", line[0], scope="row"), *(element("td", cell) for cell in line[1:])
        )
        for line in lines
    )
    table = element(
        "table", element("caption", caption), element("thead", head), element("tbody", *body)
    )
    return element("div", table, class_="scroll", tabindex=0, role="region", aria_label=caption)
