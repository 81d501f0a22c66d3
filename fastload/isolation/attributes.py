"""The attributes of instances, read and written without running any code of their class, as a fork would copy them."""

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Protocol

from fastload.isolation.rules import GENERATORS, HEAP, is_code, own_dict

Part = tuple[str, Any]
"""The expression that reaches a part of an object (`.name`, `[3]`), and the part."""

SCALARS = frozenset({type(None), int, float, complex, bool, str, bytes})


class Copier(Protocol):
    """Makes one worker's copy of a graph."""

    memo: dict[int, Any]
    """Copies and shared objects, by the id of the original. It can be passed to `copy.deepcopy`."""

    def copy(self, x: Any) -> Any:
        """Return the worker's own `x`, which is `x` itself if that is shared."""

    def known(self, x: Any) -> bool:
        """Return whether an object belongs to the graph."""

    def is_shallow(self, x: Any) -> bool:
        """Return whether the elements of a container are data, although its attributes are copied."""

    def memory(self, x: Any) -> Any:
        """Return an array, tensor or buffer like `x`, over the worker's copy of its memory."""


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

    def items(self, x: Any) -> Iterator[Part]:
        """Yield names and values."""
        own = own_dict(x)
        yield from list(own.items())
        for name, value in self._of_class.items():
            if name not in own:
                yield name, value
        for name, _, value in filled(self.slots, x):
            yield name, value

    def fill(self, x: Any, y: Any, copier: Copier) -> None:
        """Give `y` copies of the attributes of `x`."""
        before, own = own_dict(x), own_dict(y)
        # Plain values first: `__hash__` may need them if the next attribute is a set that holds `x`.
        own.update((name, value) for name, value in before.items() if type(value) in SCALARS)
        for name, value in (*before.items(), *self._of_class.items()):
            if name not in own:
                own[name] = copier.copy(value)
        for name in before:
            own[name] = own.pop(name)  # in the order of the original
        for _, member, value in filled(self.slots, x):
            member.__set__(y, copier.copy(value))

    def put(self, y: Any, values: dict[str, Any]) -> None:
        """Give `y` attributes."""
        slots = dict(self.slots)
        for name, value in values.items():
            if name in slots:
                slots[name].__set__(y, value)
            else:
                own_dict(y)[name] = value


def class_state(cls: type) -> dict[str, Any]:
    """Return the class attributes that are generators or called instances: each copy gets its own.

    Other class attributes stay in the class: code may write them through the class and read them through `self`.
    """
    nearest: dict[str, Any] = {}
    for k in cls.__mro__[:-1]:
        for name, value in vars(k).items():
            nearest.setdefault(name, value)
        if k.__module__.partition(".")[0] in _WITHOUT_CLASS_STATE:
            break
    return {name: value for name, value in nearest.items() if _is_class_state(value)}


def _is_class_state(value: Any) -> bool:
    kind = type(value)
    if kind in _WITHOUT_STATE or kind.__module__.partition(".")[0] in _WITHOUT_CLASS_STATE:
        return isinstance(value, GENERATORS)
    return is_code(kind) and hasattr(value, "__dict__") and not hasattr(kind, "__get__")


_WITHOUT_STATE = SCALARS | {
    *(tuple, list, dict, types.FunctionType, property, staticmethod, classmethod)
}
_WITHOUT_CLASS_STATE = {
    *("abc", "builtins", "collections", "enum", "functools", "numpy", "torch", "typing")
}
