"""What multiprocessing's fork server imports for worker processes, once for all of them."""

import warnings

import fastload.processes.child  # noqa: F401  # with torch and all that a worker needs

# A thread of an imported library that survives forks, as pyarrow's, is no reason for a warning at each start.
warnings.filterwarnings("ignore", r"This process \(pid=\d+\) is multi-threaded")
