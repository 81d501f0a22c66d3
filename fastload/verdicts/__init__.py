"""Verdicts: whether threads are known to read a dataset rightly, found by reading code.

- `libraries` is the list of libraries that are not read, since tests show that they are right in threads or forks.
- `findings` is what a verdict may say.
- `values`, `reader` and `effects` read the source of a function: the names in it, and the objects that it changes.
- `objects` looks at objects, functions and names. `reach` searches from a dataset to all that samples can reach.
- `changes` tells which changes reach what threads share. `judge` puts all together.
"""

from fastload.verdicts.findings import Finding
from fastload.verdicts.judge import Verdict, verdict

__all__ = ["Finding", "Verdict", "verdict"]
