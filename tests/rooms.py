"""What each room of the package may import: the one table of the layering, which `tests/test_layering.py` reads.

A room is a folder, or a file beside them. Imports inside functions and for the type checker count too. The rooms of the
core stand in their order: each imports only rooms above it. Plug-ins may import what their line names, and the core
imports none of them. What stands in brackets may be imported inside functions only.
"""

from __future__ import annotations

CORE = {
    "errors": "",
    "_kit": "errors",
    "telemetry": "_kit",
    "random": "_kit",
    "safety": "errors _kit random",
    "rows": "",
    "settings": "_kit telemetry random safety",
    "memory": "_kit telemetry random",
    "order": "errors _kit telemetry random settings memory",
    "reading": "errors _kit telemetry random safety rows settings memory order",
    "processes": "errors _kit telemetry random safety settings memory order reading",
    "engine": "errors _kit telemetry random safety settings memory order reading processes",
    "loader": "_kit telemetry safety settings order reading engine",
    "__init__": "errors telemetry random safety memory order reading loader (metrics stream)",
}

PLUG_INS = {
    "bench": "__init__ errors _kit telemetry datasets image measure",
    "check": "errors _kit random safety reading loader",
    "compat": "errors _kit order loader datasets distributed elastic flow",
    "datasets": "__init__ errors _kit telemetry rows reading image remote",
    "distributed": "errors _kit",
    "elastic": "errors _kit memory order distributed",
    "flow": "errors _kit distributed",
    "image": "errors _kit telemetry random",
    "integrations": "errors _kit random settings order loader",
    "measure": "__init__ errors _kit telemetry rows reading",
    "metrics": "errors telemetry",
    "parameters": "errors _kit distributed",
    "remote": "errors _kit telemetry",
    "sequences": "errors _kit order rows remote",
    "store": "errors _kit rows order reading loader datasets distributed (train)",
    "streams": "errors _kit random reading sequences remote",
    "stream": "errors _kit random safety reading engine",
    "train": "__init__ errors _kit telemetry datasets distributed image measure remote",
}

COMMANDS = {
    "cli": "__init__ errors _kit bench measure train (check datasets distributed flow image parameters store stream)",
    "__main__": "cli",
}

ROOMS = {**CORE, **PLUG_INS, **COMMANDS}


def allowed(room: str, *, at_load: bool) -> set[str]:
    """Return the rooms that a room may import, as it is loaded or later."""
    early, _, late = ROOMS[room].partition("(")
    return {*early.split(), *(() if at_load else late.strip(")").split())}
