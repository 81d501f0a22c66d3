"""Thread safety of the user's objects: what each worker thread gets a copy of, and whether the code is thread-safe.

- `survey` answers for a loader. `graph` walks over its objects once, and `copies` makes each worker's copies.
- `objects` tells what an object consists of, and state from data. `objects.toml` lists classes of libraries.
  `modules` tells the user's code from libraries, and finds random generators that the user's modules hold.
- `kinds` copies each kind of object. `memory` copies arrays and tensors.
- `walk` goes to all code that samples can run, and `plain` has the rule for it. `source` finds a function's syntax
  tree, and what its names stand for. `plain.toml` lists functions and methods.
- `libraries` is a table of libraries: which survive a fork, and which names are process-wide state.
"""

from fastload.safety.plain import Finding
from fastload.safety.survey import CodeSafety, CopyDataset, Survey, WorkerCopies

__all__ = ["CodeSafety", "CopyDataset", "Finding", "Survey", "WorkerCopies"]
