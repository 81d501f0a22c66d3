"""Programs that change one shared object, each by another part of the language."""

from __future__ import annotations

from tests.verdicts.programs import Case

LISTS = "L, T = [[1], [2]], {'a': []}\n"
THING = "class Thing:\n    items = []\n"
SLOTS = "class Slots:\n    __slots__ = ('words',)\nS = Slots()\nS.words = []\n"
INNER_CLASS = "class Inner:\n    def go(self): L.append(1)\nInner().go(); return i"
TWO = "A, B = {'a': []}, {'b': 1}\ndef put(a, b): a.append(1)\n"
DEFAULT = "L = []\ndef add(x, __dict__=L): __dict__.append(x)\n"

SYNTAX = [
    Case("inner function", r"\.L`", "def go(): L.append(i)\ngo(); return i", LISTS),
    Case("inner lambda", r"\.L`", "go = lambda: L.append(i)\ngo(); return i", LISTS),
    Case("inner class", r"\.L`", INNER_CLASS, LISTS),
    Case("starred target", r"\.L\[", "a, *b = L\nfor x in b: x.append(i)\nreturn i", LISTS),
    Case("annotated variable", r"\.L`", "x: list = L; x.append(i); return i", LISTS),
    Case("part of a dict by get", r"\.T\[", "T.get('a').append(i); return i", LISTS),
    Case("list of a new object's class", "Thing.items|items", "Thing().items.append(i); return i", THING),
    Case("list in a slot", "S.words", "S.words.append(i); return i", SLOTS),
    Case("constant by global", r"\.N`", "global N\nN = 1\nreturn i", "N = 0\n", proven=False),
    Case("two dicts of arguments", r"\.put", "put(**A, **B); return i", TWO),
    Case("default of a name with a meaning", "default|L", "add(i); return i", DEFAULT),
    Case("generator", r"\.RNG`", "return RNG.integers(3)", "import numpy as np\nRNG = np.random.default_rng()\n"),
    Case("connection", "open Connection", init="import sqlite3\nself.db = sqlite3.connect(':memory:')", proven=True),
]  # fmt: skip
