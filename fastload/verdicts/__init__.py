"""Verdicts: whether threads are known to read a dataset rightly, found by reading code.

- `libraries` is the list of libraries that are not read, since tests show that they are right in threads or forks.
- `effects` reads the source of a function: the names in it, and the objects that it changes.
- `reach` searches from a dataset to all objects and functions that samples can reach.
- `judge` puts them together, and tells which changes reach what threads share.
"""

from fastload.verdicts.judge import Verdict, verdict
from fastload.verdicts.reach import Finding

__all__ = ["Finding", "Verdict", "verdict"]
