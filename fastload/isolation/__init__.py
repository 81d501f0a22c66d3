"""Isolation: each worker gets its own copy of all state that user code can change, as a process would have.

- `worker_copies` puts the others together.
- `rules` tells state from data, and `users` tells the user's code from libraries.
- `classify` gives an object its kind. `kinds`, `attributes` and `callables` copy each kind. `memory` copies
  arrays and tensors, and `files` reopens files. `finalizers` silences copies.
- `plan` walks over the graph of a dataset once, and `copies` makes each worker's copies by that plan.
"""

from fastload.isolation.worker_copies import Isolation, WorkerCopies

__all__ = ["Isolation", "WorkerCopies"]
