"""Isolation: each worker gets its own copy of all state that user code can change, as a process would have.

- `worker_copies` puts the others together.
- `rules` tells state from data, and `users` tells the user's code from libraries.
- `kinds` and `callables` copy each kind of object. `memory` copies arrays and tensors, and `files` reopens files.
  `finalizers` silences copies.
- `in_modules` finds random generators that modules and classes of the user hold.
- `plan` walks over the graph of a dataset once, and gives each object its kind. `copies` makes each worker's copies.
"""

from fastload.isolation.worker_copies import Isolation, WorkerCopies

__all__ = ["Isolation", "WorkerCopies"]
