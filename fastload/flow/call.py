"""The process of a `FunctionTask`: `python -m fastload.flow.call MODULE|SCRIPT NAME ARGUMENTS`."""

from __future__ import annotations

import base64
import operator
import os
import pickle
import pkgutil
import runpy
import sys
from types import SimpleNamespace
from typing import Any


def main(where: str, name: str, call: str) -> None:
    """Call the function `name` of a module, or of a script, which is run but not as `__main__`."""
    function: Any
    if os.path.isabs(where):
        sys.path.insert(0, os.path.dirname(where))
        function = operator.attrgetter(name)(
            SimpleNamespace(**runpy.run_path(where, run_name="__flow__"))
        )
    else:
        sys.path.insert(0, os.getcwd())
        function = pkgutil.resolve_name(f"{where}:{name}")
    args, kwargs = pickle.loads(base64.b64decode(call))
    function(*args, **kwargs)


if __name__ == "__main__":
    main(*sys.argv[1:])
