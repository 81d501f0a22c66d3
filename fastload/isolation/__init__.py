"""Give each worker its own copy of all state that user code can change, as a process would have it.

`rules` says what is state and what is data, `kinds` how each kind of object is copied, `memory` how arrays and tensors
are copied. `plan` walks over the graph of a dataset once, and `copies` makes each worker's copies by that plan.
`files` opens a file anew, `finalizers` silences copies, `lmdb_once` lets workers share an environment. `code` finds
module-level objects that the code of a graph reads, `module_state` gives each worker its own, and `watch` looks at
what no copy reaches. `workers` puts these together.
"""

from fastload.isolation.watch import Watch
from fastload.isolation.workers import Isolation, Own

__all__ = ["Isolation", "Own", "Watch"]
