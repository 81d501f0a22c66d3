"""The private names of torch that fastload uses, each with its reason. No other file may use one of these.

If one of the first row is missing, `import fastload.loader` raises an error that names it. Others raise at their call,
or do what the row says. `tests/test_torch_private.py` checks all on the oldest and the newest torch.

    utils.data._utils, _generate_state                 what collates, pins and seeds as torch's own loader does, for the
    _ExperimentalConfig, WorkerInfo                    same batches; worker info; a profiler that sees all threads
    _dispatch_key_parse, _destroy, _schema, _cdata     kernels that route random operators. `torch_random.install` tests
    _dispatch_tls_set_dispatch_key_included            them with draws. Without them, "auto" uses processes
    _len_torch_function_stack, _get_dispatch_mode      whether modes are on in this thread, in which a draw or an
    _len_torch_dispatch_stack, _TorchDispatchModeKey   operation does more than it says
    _is_profiler_enabled                               whether a profiler runs: torch's functions know one thread only
    _get_default_store                                 the store of the ranks. No public name leads to it
    _set_thread_name                                   names threads for `ps`. Without it they have no names

Two functions also replace code: `show_worker_info_in_threads` and `seed_in_threads`. User code holds the functions that
they change, and a sample must see its own worker and seed its own stream. In other threads nothing changes.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from types import FunctionType
from typing import Any

import numpy as np
import torch
import torch.multiprocessing
from numpy.typing import NDArray
from torch._C._profiler import _ExperimentalConfig
from torch.autograd import profiler as torch_profiler
from torch.distributed import distributed_c10d
from torch.utils.data._utils import collate as torch_collate
from torch.utils.data._utils import pin_memory as torch_pin_memory
from torch.utils.data._utils import worker as torch_worker
from torch.utils.data._utils.worker import WorkerInfo

_local = threading.local()


def current_worker_info() -> WorkerInfo | None:
    """Return the worker info of this thread, or None outside of user code in a worker."""
    info: WorkerInfo | None = getattr(_local, "info", None)
    return info


def set_worker_info(info: WorkerInfo | None) -> None:
    """Set what `torch.utils.data.get_worker_info()` returns in this thread."""
    _local.info = info


def has_function_modes() -> bool:
    """Return whether modes such as that of `torch.set_default_device` are on in this thread."""
    return bool(torch._C._len_torch_function_stack())


_CALL: Any = (lambda *args, **kwargs: _fastload_(*args, **kwargs)).__code__  # type: ignore[name-defined]  # noqa: F821


def _replace_code(module: Any, name: str, ours: Callable[..., Any]) -> None:
    """Call `ours(theirs, ...)` whenever a function of torch's is called, also by code that imported it earlier."""
    theirs: Any = inspect.unwrap(getattr(module, name))
    key = f"_fastload_{name}"
    if theirs.__code__.co_names != (key,):
        own = FunctionType(theirs.__code__, theirs.__globals__, name, theirs.__defaults__)
        theirs.__globals__[key] = partial(ours, own)
        theirs.__code__ = _CALL.replace(co_names=(key,))


def show_worker_info_in_threads() -> None:
    """Make `get_worker_info()` return the info of the calling thread, also for code that imported it earlier.

    Torch keeps the info in a module global, and user code holds the function object. Neither can differ between
    threads, so this replaces the function's code. In other threads it returns what it always did.
    """
    _replace_code(torch_worker, "get_worker_info", lambda theirs: current_worker_info() or theirs())


_SEEDING: dict[str, Callable[..., Any]] = {
    "manual_seed": lambda generator, seed: generator.manual_seed(int(seed)),
    "seed": torch.Generator.seed,
    "initial_seed": torch.Generator.initial_seed,
    "get_rng_state": torch.Generator.get_state,
    "set_rng_state": lambda generator, new_state: generator.set_state(new_state),
}
"""What torch's functions of these names do with a generator."""


def seed_in_threads(generator: Callable[[], torch.Generator | None]) -> None:
    """Make `torch.manual_seed()` and its kin act on the generator that `generator()` returns in the calling thread.

    A sample may seed, for example to crop an image and its mask alike. That would seed the only generator of the
    process, which is the loop's. User code holds these functions, so this replaces their code, as for
    `get_worker_info`. If `generator()` returns None, they do what they always did. One thread at a time may call this.
    """

    def seeding(act: Callable[..., Any], theirs: Callable[..., Any], *a: Any, **k: Any) -> Any:
        own = generator()
        return theirs(*a, **k) if own is None else act(own, *a, **k)

    for name, act in _SEEDING.items():
        _replace_code(torch.random, name, partial(seeding, act))


_KERNELS_KEY = "TESTING_ONLY_GenericMode"
"""A dispatch key for which torch itself has no kernels. A thread that includes it tries it before all others."""

_Library: Any = torch.library.Library  # Any: it has no types
_libraries: list[Any] = []  # kept, because a registration lasts as long as its library


def register_kernels(kernels: dict[str, Callable[..., Any]]) -> Callable[[bool], None]:
    """Register kernels for torch's own operators, for the rest of the process. This takes 5 ms.

    Torch calls them in a thread that includes their key. For all other operators it skips the key at no cost.

    Args:
        kernels: by the name of the operator and its overload: `random_.from`.

    Returns:
        A function that makes the calling thread include the key (True) or not (False), in 0.2 us.
    """
    key = torch._C._dispatch_key_parse(_KERNELS_KEY)
    others, ours = libraries = _Library("_", "IMPL"), _Library("aten", "IMPL")
    try:
        others.fallback(torch.library.fallthrough_kernel, _KERNELS_KEY)
        for name, kernel in kernels.items():
            ours.impl(name, kernel, _KERNELS_KEY)
    except BaseException:  # Ctrl-C: half of the registrations would make the next attempt fail
        for library in libraries:
            library._destroy()
        raise
    _libraries.extend(libraries)
    return partial(torch._C._dispatch_tls_set_dispatch_key_included, key)


def overload(name: str) -> Any:
    """Return torch's operator of a name such as `random_.from`, or None if this torch has none."""
    base, _, of_it = name.partition(".")
    return getattr(getattr(torch.ops.aten, base, None), of_it or "default", None)


def takes_generator(operator: Any) -> bool:
    """Return whether an operator, as `overload` returns it, has an argument `generator`."""
    return any(argument.name == "generator" for argument in operator._schema.arguments)


_default_generator: Any = torch.default_generator  # Any: the stubs do not know all of it


def is_default_generator(generator: Any) -> bool:
    """Return whether `generator` is torch's default generator. Kernels get a new Python object for it at each call."""
    return bool(generator._cdata == _default_generator._cdata)


dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
"""Returns how many `TorchDispatchMode`s this thread is in, in 0.1 us."""


def is_faking() -> bool:
    """Return whether this thread computes without values, as when torch traces a graph."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def make_worker_info(
    worker_id: int,
    num_workers: int,
    seed: int,
    dataset: Any,
    method: str = "thread",
) -> WorkerInfo:
    """Return a WorkerInfo, with `worker_method` if torch has it (>= 2.13).

    `rng` stays None, also in threads: torch's own functions draw the sample's numbers there.
    """
    fields: dict[str, Any] = {
        "id": worker_id,
        "num_workers": num_workers,
        "seed": seed,
        "dataset": dataset,
    }
    if "worker_method" in vars(WorkerInfo).get("__dataclass_fields__", {}):
        fields["worker_method"] = method
    return WorkerInfo(**fields)


numpy_seed: Callable[[int, int], list[int]] = torch_worker._generate_state
"""Returns the seed of NumPy's global generator in a worker, from the base seed and the worker's id."""


def name_thread(name: str) -> None:
    """Name this thread for `ps` and debuggers, if torch has a function for it."""
    naming: Any = getattr(torch.multiprocessing, "_set_thread_name", None)
    if naming is not None:
        naming(name[:15])


def default_store() -> Any:
    """Return the store of the default process group. There is no public name for it."""
    return distributed_c10d._get_default_store()


def pin(data: Any) -> Any:
    """Copy every tensor of a batch into pinned memory, as torch's own loader does, containers included."""
    return torch_pin_memory.pin_memory(data)  # type: ignore[no-untyped-call]


def is_shared(tensor: torch.Tensor) -> bool:
    """Return whether a tensor lies in shared memory. The function is public, but has no types."""
    return bool(tensor.is_shared())  # type: ignore[no-untyped-call]


def collate_handler(kind: type) -> Callable[..., Any] | None:
    """Return the function that `default_collate` applies to samples of type `kind`, even one that a user registered.

    Return None if `default_collate` treats such a sample as a container, or refuses it.
    """
    table = torch_collate.default_collate_fn_map
    if kind in table:
        return table[kind]
    return next((handler for key, handler in table.items() if issubclass(kind, key)), None)


collate_tensors: Callable[..., Any] = torch_collate.collate_tensor_fn
"""Torch's own handler of tensors. A user may have registered another."""

collate_arrays: Callable[..., Any] = torch_collate.collate_numpy_array_fn
"""Torch's own handler of NumPy arrays."""

collate_numbers: tuple[Callable[..., Any], ...] = (
    torch_collate.collate_int_fn,
    torch_collate.collate_float_fn,
)
"""Torch's own handlers of Python's numbers."""


def profiler_is_on() -> bool:
    """Return whether one of torch's profilers runs, started by any thread. This takes 50 ns.

    Torch keeps this flag for such checks. Its functions only know about the calling thread.
    """
    return torch_profiler._is_profiler_enabled


def all_threads_profiler_config() -> _ExperimentalConfig:
    """Return an `experimental_config` with which a profiler also sees threads that already run."""
    return _ExperimentalConfig(profile_all_threads=True)


no_torch_function: Callable[[], AbstractContextManager[None]] = torch._C.DisableTorchFunction
"""`with no_torch_function():` keeps torch functions in the block from modes and subclasses; 0.2 us.

Torch's own modes use it, but `torch.overrides` has no public name for it."""


def resize_antialiased(
    pixels: NDArray[np.uint8], size: tuple[int, int], *, out: NDArray[np.uint8] | None = None
) -> NDArray[np.uint8]:
    """Resize uint8[h, w, 3] to uint8[*size, 3], bilinear and antialiased; into `out` if given. All are contiguous.

    `interpolate` is public, but wants other shapes.
    """
    # Permute [1, h, w, 3]. If [h, w, 3] is permuted before a dimension is added, the strides are not those of
    # channels-last memory. Then the kernel converts input and output to planes, which doubles the time.
    image = torch.from_numpy(pixels.reshape(1, *pixels.shape).transpose(0, 3, 1, 2))
    if out is None:
        out = np.empty((*size, 3), np.uint8)
    resized = torch.nn.functional.interpolate(image, size, mode="bilinear", antialias=True)
    torch.from_numpy(out.reshape(1, *out.shape).transpose(0, 3, 1, 2)).copy_(resized)
    return out


def modes_are_on() -> bool:
    """Return whether operations in this thread do more than they say: inference mode, a default device, a counter."""
    return has_function_modes() or dispatch_modes() > 0 or torch.is_inference_mode_enabled()
