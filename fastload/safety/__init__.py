"""Thread safety of the user's objects: what each worker thread gets a copy of, and whether its code is thread-safe.

- `worker_copies` has the copies of all workers. `plan` walks over the objects, and `copies` copies them by that plan.
- `rules` tells state from data, and `users` tells the user's code from libraries.
- `kinds` and `callables` copy each kind of object. `memory` copies arrays and tensors, and `files` reopens files.
  `finalizers` silences copies. `in_modules` finds random generators that modules and classes of the user hold.
- `judge` says whether code is plainly safe. `walk` goes to all that samples can reach, and `plain` has the rule.
- `source` finds a function's syntax tree, and `names` what its names stand for.
- `libraries` is a table of libraries: which survive a fork, and which names are process-wide state.
"""

from fastload.safety.findings import Finding
from fastload.safety.judge import Verdict, verdict
from fastload.safety.worker_copies import Isolation, WorkerCopies

__all__ = ["Finding", "Isolation", "Verdict", "WorkerCopies", "verdict"]
