"""The process of a `FunctionTask`, which reads the call from its standard input: `python -m fastload.flow.call`."""

from __future__ import annotations

import pickle
import sys
from multiprocessing import spawn


def main() -> None:
    """Prepare this process as multiprocessing prepares a spawned process, then make the call."""
    around, call = pickle.load(sys.stdin.buffer)
    own = [path for path in sys.path if path not in around["sys_path"]]
    spawn.prepare({**around, "sys_path": [*around["sys_path"], *own]})
    function, args, kwargs = pickle.loads(call)
    function(*args, **kwargs)


if __name__ == "__main__":
    main()
