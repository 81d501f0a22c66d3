"""Verdicts: whether the code that samples can reach is plainly safe in threads, found by reading it.

- `plain` has the rule, and reads one function. `source` finds its syntax tree, `names` what its names stand for.
- `walk` goes from a dataset to all that samples can reach. `judge` puts all together.
- `libraries` is a table of libraries: which survive a fork, and which names are process-wide state.
"""

from fastload.verdicts.findings import Finding
from fastload.verdicts.judge import Verdict, verdict

__all__ = ["Finding", "Verdict", "verdict"]
