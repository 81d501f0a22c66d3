"""The attributes of instances, read and written without running any code of their class, as a fork would copy them."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from fastload.isolation.rules import GENERATORS, HEAP, is_code, own_dict

Part = tuple[str, Any]
"""The expression that reaches a part of an object (`.name`, `[3]`), and the part."""

SCALARS = frozenset({type(None), int, float, complex, bool, str, bytes})

Slots = list[tuple[str, types.MemberDescriptorType]]


def slots_of(cls: type) -> Slots:
    """Return the slots of a class's instances, by name: those of Python's classes, not of C code."""
    return [
        (name, member)
        for k in cls.__mro__
        for name, member in vars(k).items()
        if type(member) is types.MemberDescriptorType
        and member.__objclass__ is k
        and k.__flags__ & HEAP
    ]


def filled(slots: Slots, x: Any) -> Iterator[tuple[str, types.MemberDescriptorType, Any]]:
    """Yield the slots that have a value in an instance: name, member and value."""
    for name, member in slots:
        with suppress(AttributeError):
            yield name, member, member.__get__(x)


class Attributes:
    """The attributes of the instances of one class: their own, and the class attributes that are state."""

    def __init__(self, cls: type) -> None:
        self.slots = slots_of(cls)
        self._of_class = class_state(cls) if cls.__dictoffset__ else {}
        self.any = bool(cls.__dictoffset__ or self.slots)

    def parts(self, x: Any) -> Iterator[Part]:
        """Yield names and values."""
        own = own_dict(x)
        yield from [(f".{name}", value) for name, value in own.items()]
        yield from ((f".{name}", v) for name, v in self._of_class.items() if name not in own)
        yield from ((f".{name}", value) for name, _, value in filled(self.slots, x))

    def fill(self, x: Any, y: Any, copy: Callable[[Any], Any]) -> None:
        """Give `y` copies of the attributes of `x`."""
        before, own = own_dict(x), own_dict(y)
        # Plain values first: `__hash__` may need them if the next attribute is a set that holds `x`.
        own.update((name, value) for name, value in before.items() if type(value) in SCALARS)
        for name, value in (*before.items(), *self._of_class.items()):
            if name not in own:
                own[name] = copy(value)
        for name in before:
            own[name] = own.pop(name)  # in the order of the original
        for _, member, value in filled(self.slots, x):
            member.__set__(y, copy(value))


def class_state(cls: type) -> dict[str, Any]:
    """Return the class attributes that are generators or called instances: each copy gets its own.

    Other class attributes stay in the class: code may write them through the class and read them through `self`.
    """
    nearest: dict[str, Any] = {}
    for k in cls.__mro__[:-1]:
        for name, value in vars(k).items():
            nearest.setdefault(name, value)
        if _is_without_state(k):
            break
    return {name: value for name, value in nearest.items() if _is_class_state(value)}


def _is_class_state(value: Any) -> bool:
    kind = type(value)
    if _is_without_state(kind):
        return isinstance(value, GENERATORS)
    return is_code(kind) and hasattr(value, "__dict__") and not hasattr(kind, "__get__")


def _is_without_state(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in _MODULES_WITHOUT_STATE


_MODULES_WITHOUT_STATE = {
    *("abc", "builtins", "collections", "enum", "functools", "numpy", "torch", "typing")
}
