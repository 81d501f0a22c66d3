"""Promises:
- The module-level objects that the code of a dataset uses by name are found, and only those.
- The search for module-level objects runs no code of the user.
"""

from __future__ import annotations

import functools
import random
import re
import sys
import threading
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fastload.isolation.code as code_module
from fastload.isolation.code import ModuleObject, is_stateless, module_level

HELPERS = """
import numpy as np
class Flip:
    def __call__(self, x): return x
transform = Flip()
rng = np.random.default_rng(0)
unused = Flip()
"""

SCRIPT = """
import functools, os, random
import numpy as np
import helpers, helpers as h
from helpers import Flip

g = Flip()
other = Flip()
buffer = np.zeros(4)
config = {"size": 3}
table = {"train": Flip()}
MEAN, SIZE, PATH = (1.0, 2.0), 3, os.sep
last = None
draw = np.random.RandomState(0).rand
generator = random.Random(0)

def make():
    t = Flip()
    return lambda x: t(x)
made = make()

def counter():
    n = 0
    def count():
        nonlocal n
        n += 1
        return n
    return count
count = counter()

def helper(x): return g(x)
def helpers_helper(x): return helper(x)
def with_default(i, cache={}): return cache
def with_attribute(i): return with_attribute.cache
with_attribute.cache = []
part, plain_part = functools.partial(Flip(), 1), functools.partial(helper, 1)

def decorate(f):
    @functools.wraps(f)
    def wrapper(*args):
        other
        return f(*args)
    return wrapper

@decorate
def decorated(i): return g(i)

class Base:
    rng = np.random.RandomState(0)
    n = 0
    @classmethod
    def draw(cls): return cls.rng
class Child(Base):
    pass

class Uses:
    def apply(self): return g
    @property
    def size(self): return config
    @staticmethod
    def still(): return buffer
    @functools.cached_property
    def kept(self): return table
    @functools.lru_cache
    def remembered(self): return other
uses = Uses()
"""

FORMS = {
    "by name": ("def f(i): return g(i)", "script.g"),
    "in a helper's helper": ("def f(i): return helpers_helper(i)", "script.g"),
    "in nested code": ("def f(i): return [(lambda: g)() for _ in range(i)]", "script.g"),
    "in an inner class": ("def f(i):\n class A:\n  x = g\n return A", "script.g"),
    "in a partial": ("f = functools.partial(helper, 3)", "script.g"),
    "in a decorated function": ("def f(i): return decorated(i)", "script.g script.other"),
    "a container": ("def f(i): return table['train'](i)", "script.table"),
    "an array": ("def f(i): buffer[:] = i", "script.buffer"),
    "a generator": ("def f(i): return generator.random()", "script.generator"),
    "a method written in C": ("def f(i): return draw()", "script.draw"),
    "of another module": (
        "def f(i): return helpers.transform(i), h.rng",
        "helpers.rng helpers.transform",
    ),
    "imported inside": (
        "def f(i):\n from helpers import transform\n return transform",
        "helpers.transform",
    ),
    "of a module in a closure": (
        "def outer():\n import helpers as x\n return lambda i: x.rng\nf = outer()",
        "helpers.rng",
    ),
    "rebound": ("def f(i):\n global last\n last = (i,)\n return last", "script.last!"),
    "rebound, first by a sample": (
        "def f(i):\n global reader\n if 'reader' not in globals(): reader = i\n return reader",
        "script.reader!",
    ),
    "in the class of an instance": (
        "def f(i): return uses.apply()",
        "script.buffer script.config script.g script.other script.table script.uses script.Uses.remembered",
    ),
    "in a class that is called": (
        "def f(i): return Uses().apply()",
        "script.buffer script.config script.g script.other script.table script.Uses.remembered",
    ),
    "of a class": ("def f(i): return Child.draw()", "script.Base.rng"),
    "of a class, counted": ("def f(i): Base.n += 1", "script.Base.n! script.Base.rng"),
    "in the closure of a function": ("def f(i): return made(i)", "script.made"),
    "a variable of a closure": ("def f(i): return count()", "script.count"),
    "a cached function": (
        "@functools.cache\ndef load(i): return g\ndef f(i): return load(i)",
        "script.g script.load",
    ),
    "a default": ("def f(i): return with_default(i)", "script.with_default"),
    "an attribute of a function": (
        "def f(i): return with_attribute(i)",
        "script.with_attribute script.with_attribute.cache",
    ),
    "a partial": ("def f(i): return part(), plain_part()", "script.g script.part"),
    "only an attribute of that name": ("def f(self): return self.g", ""),
    "only a local of that name": ("def f(g): return g", ""),
    "only what cannot change": ("def f(i): return MEAN, SIZE, PATH, Flip, np.zeros, helpers", ""),
    "in a library": ("def f(i): return random.random(), np.random.rand(), os.environ", ""),
}


class Samples:
    def __init__(self, function: Any) -> None:
        self.function = function

    def __getitem__(self, index: int) -> Any:
        return self.function(index)


def run(source: str, name: str, filename: str, **contents: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    sys.modules[name] = module
    vars(module).update(contents)
    exec(compile(source, filename, "exec"), vars(module))
    return module


@pytest.fixture(autouse=True)
def helpers() -> Iterator[types.ModuleType]:
    yield run(HELPERS, "helpers", "/home/me/helpers.py", __file__="/home/me/helpers.py")
    del sys.modules["helpers"]


@pytest.fixture(params=["/home/me/script.py", "/tmp/ipykernel_7/1.py", "<ipython-input-1-af>"])
def script(request: pytest.FixtureRequest) -> Iterator[types.ModuleType]:
    yield run(SCRIPT, "script", request.param)
    del sys.modules["script"]


def names(found: list[ModuleObject]) -> str:
    return " ".join(f"{x.module}.{x.name}{'!' * x.rebound}" for x in found)


@pytest.mark.parametrize("form", FORMS)
def test_what_code_names_is_found_in_each_of_its_forms(form: str, script: types.ModuleType) -> None:
    source, expected = FORMS[form]
    exec(compile(source, "/home/me/script.py", "exec"), vars(script))
    assert names(module_level([Samples(script.f)])) == expected
    assert names(module_level([script.f, None])) == expected


@pytest.mark.parametrize(
    "path",
    [
        "/home/me/venv/lib/python3.11/site-packages/lib/__init__.py",
        "/usr/lib/python3/dist-packages/lib.py",
        random.__file__,
        code_module.__file__,
    ],
)
def test_the_code_of_libraries_is_not_read(path: str) -> None:
    source = (
        "from helpers import transform\ndef f(i): return transform(i)\nclass A:\n  t = transform"
    )
    module = run(source, "lib", path, __file__=path)
    try:
        assert module_level([module.f, module.A()]) == []
    finally:
        del sys.modules["lib"]


def test_user_code_in_a_librarys_wrapper_is_read(script: types.ModuleType) -> None:
    kept = functools.singledispatch(script.helper)
    assert names(module_level([kept])) == "script.g"
    assert names(module_level([functools.lru_cache(script.helper)])) == "script.g"


def test_objects_below_the_roots_are_looked_through(script: types.ModuleType) -> None:
    exec("def f(i): return g", vars(script))
    below = [{"a": (1, {2: Samples(script.f)})}]
    for root in (below, Samples(below), torch.utils.data.Subset([Samples(script.f)], [0])):
        assert names(module_level([root])) == "script.g"


def test_no_code_of_the_users_runs() -> None:
    class Touchy:
        def __getattribute__(self, name: str) -> Any:
            raise AssertionError(name)

        __getattr__ = __eq__ = __hash__ = __iter__ = __len__ = __bool__ = __getattribute__  # type: ignore[assignment]

        @property
        def asked(self) -> Any:
            raise AssertionError

    class Things(list[Any]):
        def __iter__(self) -> Any:
            raise AssertionError

        __len__ = __getitem__ = __iter__

    assert module_level([Touchy(), Things([Touchy()])]) == []


@pytest.mark.parametrize(
    "value",
    [
        *(None, 3, "text", b"", (1, (2.0, "x")), range(3), Path("/"), int, np.float32, np.int8(3)),
        *(torch.float32, threading.Lock(), threading.local(), time, print, [].append.__name__),
        *(np.random.rand, random.random, np.add, functools.partial(print, 3), list[int]),
    ],
    ids=lambda x: re.sub(r" at 0x\w+", "", repr(x)),
)
def test_what_cannot_change_is_stateless(value: Any) -> None:
    assert is_stateless(value)


@pytest.mark.parametrize(
    "value",
    [
        *([], {}, set(), (1, []), np.zeros(1), torch.zeros(1), np.random.default_rng(0)),
        *(random.Random(0), random.Random(0).random, [].append, functools.partial(print, [])),
        *(bytearray(1), Samples(None), Samples(None).__getitem__, iter([1])),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_can_change_is_not_stateless(value: Any) -> None:
    assert not is_stateless(value)


def test_recursive_objects_and_functions_end() -> None:
    loop: list[Any] = []
    loop.append(loop)

    def again(i: int) -> Any:
        return again(i - 1), loop

    again.itself = functools.partial(again)  # type: ignore[attr-defined]
    assert module_level([again, loop]) == []
    assert not is_stateless(again)


def test_the_search_is_bounded(script: types.ModuleType) -> None:
    chain = "\n".join(f"def f{k}(i): return f{k + 1}(i)" for k in range(3000))
    exec(chain + "\ndef f3000(i): return g\ndef f(i): return f0(i), other", vars(script))
    assert names(module_level([script.f])) == "script.other"
