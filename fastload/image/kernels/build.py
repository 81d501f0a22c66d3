"""The child process that compiles the kernels: `python -m fastload.image.kernels.build NAME MODULE...`.

Each module may have `ENTRY_POINTS`, a dict of name to (Python function, number of int64 arguments). It may have
`agrees_with_torch(call)`, which gets the compiled entry points by name. It, or a module beside it, may have
`EXTERNALS`, names of the C functions that the kernels may call.
The result is one object file without any reference to Python or to Numba's runtime.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from pkgutil import resolve_name
from struct import iter_unpack, unpack_from
from typing import Any

from fastload.image.kernels import Unavailable, cache, load

OPTIONS = {"error_model": "numpy", "fastmath": False, "boundscheck": False}
ALWAYS_THERE = {"memcpy", "memmove", "memset"}
"""C functions that LLVM calls for loops and copies."""


def main() -> None:
    """Compile, and store the object in the cache under NAME. The last line of stderr says what failed."""
    os.nice(10)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # `compiled` optimises all entry points together, so Numba need not optimise each of them fully. At 0 it would mark
    # functions so that LLVM never optimises them.
    os.environ["NUMBA_OPT"] = "1"
    name, *modules = sys.argv[1:]
    try:
        try:
            content = build(modules)
        except Unavailable as error:
            content = json.dumps({"refused": str(error)}).encode() + b"\n"
        cache.store(name, content)
    except Exception as error:
        traceback.print_exc()
        message = " ".join(str(error).split())
        sys.exit(f"{type(error).__name__}: {message[:400]}")


def _end_with_parent() -> None:
    """End this process when its parent ends, which holds the other end of standard input, and writes nothing."""
    os.read(0, 1)
    os._exit(1)


def build(modules: Sequence[str]) -> bytes:
    """Return the content of the cache's file: a header of one line, and the object.

    Raise Unavailable, with the reason, if these kernels must not run on this machine.
    """
    loaded = [resolve_name(name) for name in modules]
    entry_points = {
        name: entry
        for module in loaded
        for name, entry in getattr(module, "ENTRY_POINTS", {}).items()
    }
    packages = {module.__package__ for module in loaded}
    beside = [
        module for module in sys.modules.values() if getattr(module, "__package__", 0) in packages
    ]
    allowed = ALWAYS_THERE.union(*(vars(module).get("EXTERNALS", ()) for module in beside))
    code = compiled(entry_points)
    header = {
        "entries": {name: count for name, (_, count) in entry_points.items()},
        "externals": sorted(externals(code)),
    }
    if unknown := set(header["externals"]) - allowed:
        raise ValueError(f"the kernels need {', '.join(sorted(unknown))}, which no EXTERNALS names")
    content = json.dumps(header).encode() + b"\n" + code
    call = load(content)
    for module in loaded:
        if not getattr(module, "agrees_with_torch", lambda call: True)(call):
            raise Unavailable("off: this torch rounds differently from the kernels")
    return content


def compiled(entry_points: dict[str, tuple[Callable[..., Any], int]]) -> bytes:
    """Compile functions of int64 to int64, and all that they call, into one relocatable object file."""
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    linked = llvm.parse_assembly("")
    for name, (function, count) in entry_points.items():
        linked.link_in(_module(name, function, count))
    # LLVM then sees every call of these. No kernel raises, so it removes the code that reports errors to Python.
    for symbol in [*linked.functions, *linked.global_variables]:
        if not symbol.is_declaration and symbol.name not in entry_points:
            symbol.linkage = "internal"
    # The loader may put the code farther than 2 GiB from the C library and from its constants.
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(),
        features=llvm.get_host_cpu_features().flatten(),
        opt=3,
        reloc="static",
        codemodel="large",
    )
    passes = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=3))
    passes.getModulePassManager().run(linked, passes)
    if constant := re.search(r"inttoptr \(i64 \d{7,} to", str(linked)):
        raise ValueError(f"the kernels refer to an address of the compiling process: {constant[0]}")
    code: bytes = machine.emit_object(linked)
    return code


def _module(name: str, function: Callable[..., Any], count: int) -> Any:
    """Compile a function with Numba. Return an LLVM module in which its C version has this name."""
    import llvmlite.binding as llvm
    from numba import cfunc, int64

    entry = cfunc(int64(*[int64] * count), **OPTIONS)(getattr(function, "py_func", function))
    module = llvm.parse_assembly(entry.inspect_llvm())
    module.get_function(entry.native_name).name = name
    return module


# ---- what the object needs of the process that loads it ----

SYMBOLS, RELOCATIONS = 2, 4  # kinds of ELF sections
WHOLE_ADDRESSES = {1, 24}  # R_X86_64_64, R_X86_64_PC64


def externals(code: bytes) -> set[str]:
    """Return the undefined names of an object file. Raise ValueError if one must be within 2 GiB of its code."""
    sections = list(_sections(code))
    names: set[str] = set()
    for kind, link, content in sections:
        if kind == SYMBOLS:
            strings = sections[link][2]
            undefined = [name for name, section in iter_unpack("<I2xH16x", content) if not section]
            names |= {strings[name:].partition(b"\0")[0].decode() for name in undefined}
        elif kind == RELOCATIONS:
            near = {kind for (kind,) in iter_unpack("<8xI12x", content)} - WHOLE_ADDRESSES
            if near:
                raise ValueError(f"the object has relocations of 32 bits (kinds {near})")
    return names - {""}


def _sections(code: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Yield the kind, the linked section and the content of each section of an ELF64 file."""
    (table,), (count,) = unpack_from("<Q", code, 40), unpack_from("<H", code, 60)
    for k in range(count):
        kind, begin, size, link = unpack_from("<4xI16xQQI", code, table + 64 * k)
        yield kind, link, code[begin : begin + size]


if __name__ == "__main__":
    main()
