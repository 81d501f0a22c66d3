"""What multiprocessing's fork server imports for worker processes, once for all of them."""

import json
import os
import warnings

import fastload.processes.worker_main  # noqa: F401  # with torch and all that a worker needs

ORIGINAL = "FASTLOAD_ORIGINAL_VARIABLES"
"""A server finds here what its workers are to have in place of the variables that decide what it imports."""

if ORIGINAL in os.environ:  # this is a server
    for name, value in json.loads(os.environ.pop(ORIGINAL)).items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value
    # A thread of an imported library that survives forks, as pyarrow's, is no reason for a warning at each start.
    warnings.filterwarnings("ignore", r"This process \(pid=\d+\) is multi-threaded")
