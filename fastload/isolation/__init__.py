"""Give each worker its own copy of all state that user code can change, as a process would have it.

`rules` says what is state and what is data, and `users` what is the user's own code. `classify` gives an object its
kind; `kinds`, `attributes`, `callables` and `cached` say how each kind is copied, `memory` how arrays and tensors are.
`plan` walks over the graph of a dataset once, and `copies` makes each worker's copies by that plan. `files` opens a
file anew, `finalizers` silences copies, `lmdb_once` lets workers share an environment. `code` finds module-level
objects that the code of a graph reads, `module_state` gives each worker its own, and `watch` looks at what no copy
reaches. `worker_copies` puts these together.

`python_random`, `numpy_random` (with `numpy_memory`) and `torch_random` route the global random functions by thread,
and `generators` the generators that a dataset holds; `fastload.randomness` gives them their streams.
"""

from fastload.isolation.watch import Watch
from fastload.isolation.worker_copies import Isolation, WorkerCopies

__all__ = ["Isolation", "Watch", "WorkerCopies"]
